#include "stretches.h"

#include <algorithm>
#include <stdexcept>

namespace weft::shm {

Stretches::Stretches(const std::vector<Stretch>& apart, const void* rest, size_t bytes) {
  size_t end = 0;
  const auto rest_until = [&](size_t offset) {
    if (offset > end) stretches_.push_back({at(rest, end), end, offset - end});
  };
  for (const Stretch& stretch : apart) {
    if (stretch.offset < end || stretch.offset + stretch.bytes > bytes)
      throw std::invalid_argument("stretches must be in order, apart from each other and inside the output");
    if (stretch.bytes == 0) continue;
    rest_until(stretch.offset);
    stretches_.push_back(stretch);
    end = stretch.offset + stretch.bytes;
  }
  rest_until(bytes);
}

const void* Stretches::together(size_t offset, size_t bytes, std::byte* scratch) const {
  if (bytes == 0) return scratch;
  const Stretch& first = stretches_[holding(offset)];
  const size_t skipped = offset - first.offset;
  if (skipped + bytes <= first.bytes) return at(first.data, skipped);
  each(offset, bytes, [&](const void* data, size_t from, size_t n) { memcpy(scratch + (from - offset), data, n); });
  return scratch;
}

size_t Stretches::holding(size_t offset) const {
  const auto after = std::upper_bound(stretches_.begin(), stretches_.end(), offset,
                                      [](size_t value, const Stretch& stretch) { return value < stretch.offset; });
  return static_cast<size_t>(after - stretches_.begin()) - 1;
}

}  // namespace weft::shm
