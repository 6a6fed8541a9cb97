// A range of bytes that lie in several places.
#pragma once
#include <cstddef>
#include <vector>

#include "bytes.h"

namespace weft::shm {

struct Stretch {
  const void* data;
  size_t offset, bytes;  // of the range
};

class Stretches {
 public:
  // In the order of their offsets; what lies in none of them lies in `rest`, which is as long as the range.
  // Throws std::invalid_argument where they overlap, or end after it.
  Stretches(const std::vector<Stretch>& apart, const void* rest, size_t bytes);

  // visit(data, offset, bytes) for each place that [offset, offset + bytes) lies in, in order.
  template <class Visit>
  void each(size_t offset, size_t bytes, Visit&& visit) const {
    for (size_t i = holding(offset); bytes > 0; ++i) {
      const Stretch& stretch = stretches_[i];
      const size_t skipped = offset - stretch.offset, n = piece(stretch.bytes, skipped, bytes);
      visit(at(stretch.data, skipped), offset, n);
      offset += n;
      bytes -= n;
    }
  }

  // These bytes in one place: where they lie, or else the scratch, which is then filled.
  const void* together(size_t offset, size_t bytes, std::byte* scratch) const;

 private:
  size_t holding(size_t offset) const;

  std::vector<Stretch> stretches_;  // without a gap
};

}  // namespace weft::shm
