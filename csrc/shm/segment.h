// Memory that the ranks of one group share.
//
// The segment is a memfd: it has no name in /dev/shm, so nothing is left behind when every rank is killed, and the size
// of /dev/shm does not limit it. The creator tells the others its pid and descriptor; they open it through /proc.
#pragma once
#include <sys/types.h>

#include <cstddef>

namespace weft::shm {

class Segment {
 public:
  // Reserves every page at once, so that a machine short of memory says so here and not by a SIGBUS in a collective.
  static Segment create(size_t bytes);
  static Segment open(pid_t creator, int creator_descriptor, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  void close_descriptor();  // once every rank has mapped it; the mapping stays

 private:
  Segment(int descriptor, size_t bytes);

  int descriptor_ = -1;
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace weft::shm
