#include "streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace weft::shm {

#if defined(__SSE2__)

void copy_past_cache(void* destination, const void* source, size_t bytes) {
  constexpr size_t line_bytes = 64;
  if (bytes == 0) return;
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  const size_t before = std::min(bytes, (line_bytes - reinterpret_cast<uintptr_t>(to) % line_bytes) % line_bytes);
  memcpy(to, from, before);
  size_t done = before;
  for (; done + line_bytes <= bytes; done += line_bytes) {
    const auto* line = reinterpret_cast<const __m128i*>(from + done);
    auto* place = reinterpret_cast<__m128i*>(to + done);
    for (int part = 0; part < 4; ++part) _mm_stream_si128(place + part, _mm_loadu_si128(line + part));
  }
  memcpy(to + done, from + done, bytes - done);
  _mm_sfence();  // nothing else orders these stores
}

#else

void copy_past_cache(void* destination, const void* source, size_t bytes) {
  if (bytes > 0) memcpy(destination, source, bytes);
}

#endif

}  // namespace weft::shm
