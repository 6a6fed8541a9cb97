// Memory that the ranks of one group share.
//
// The segment is a memfd. It has no name in /dev/shm, so nothing is left behind when every rank is killed, and the size
// of /dev/shm does not limit it. The creator publishes its pid and descriptor; the other ranks open it through /proc.
#pragma once
#include <sys/types.h>

#include <cstddef>

namespace weft::shm {

class Segment {
 public:
  // Reserves every page at once. A machine short of memory then fails here and not by a SIGBUS in a collective.
  static Segment create(size_t bytes);
  static Segment open(pid_t creator, int creator_descriptor, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }
  void close_descriptor();  // call once every rank has mapped it; the mapping stays

 private:
  Segment(int descriptor, size_t bytes);

  int descriptor_ = -1;
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace weft::shm
