// Memory that the ranks of one group share.
//
// The segment is a memfd. It has no name in /dev/shm, so nothing is left behind when every rank is killed, and the size
// of /dev/shm does not limit it. The creator publishes its key and the descriptor's number; the other ranks ask for it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace weft::shm {

class Segment {
 public:
  static Segment create(size_t bytes);  // without memory yet
  static Segment open(uint64_t creator, int creator_descriptor, size_t bytes);  // the creator's key (handover.h)

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  // Reserves memory for a part, on this process's NUMA node and in its container; in huge pages where the system gives
  // them to shared memory that asks for them. A machine short of memory then fails here and not by a SIGBUS in a
  // collective.
  void reserve(size_t offset, size_t bytes);

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
