// Copies that do not evict data from the cache.
#pragma once
#include <cstddef>

namespace weft::shm {

// memcpy with stores that bypass the cache. A whole line is then written without being read first, which saves a third
// of the copy's traffic. Use it for data that is read again only after the cache would have evicted it. A thread that
// synchronises with this one afterwards sees the stores, as it sees ordinary ones.
void copy_past_cache(void* destination, const void* source, size_t bytes);

}  // namespace weft::shm
