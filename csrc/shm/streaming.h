// Copies that leave the cache alone.
#pragma once
#include <cstddef>

namespace weft::shm {

// memcpy whose stores go past the cache: a line that is written whole is then not read first, which is a third of a
// copy's traffic. For what is not read again before the cache would have lost it. Visible to who synchronises with this
// thread afterwards, as ordinary stores are.
void copy_past_cache(void* destination, const void* source, size_t bytes);

}  // namespace weft::shm
