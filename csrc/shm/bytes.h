// Helpers for addresses and sizes in bytes.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstring>

namespace weft::shm {

constexpr size_t line_bytes = 64;

inline const std::byte* at(const void* data, size_t offset_bytes) {
  return static_cast<const std::byte*>(data) + offset_bytes;
}
inline std::byte* at(void* data, size_t offset_bytes) { return static_cast<std::byte*>(data) + offset_bytes; }

inline void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes > 0 && destination != source) memcpy(destination, source, bytes);
}

// Returns the number of bytes from `offset` to `bytes`, at most `limit`.
inline size_t piece(size_t bytes, size_t offset, size_t limit) {
  return offset < bytes ? std::min(limit, bytes - offset) : 0;
}

}  // namespace weft::shm
