// Segment (csrc/shm/segment.h) for ranks that are threads: one mapping, which all of them share. A thread sanitizer
// knows memory by its address. Through a mapping per rank it would see no access of another rank.
#include "segment.h"

#include <sys/mman.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <utility>

#include "errors.h"

namespace weft::shm {

namespace {

struct Mapping {
  void* data;
  int users;
};

std::mutex mutex;
std::map<int, Mapping> mappings;  // by a number that takes the descriptor's place and is not used twice
int last_number = 0;

}  // namespace

Segment Segment::create(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw_errno(errno, "cannot map a segment");
  mappings[++last_number] = {data, 0};
  return Segment(last_number, bytes);
}

Segment Segment::open(uint64_t, int number, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (mappings.count(number) == 0) throw_errno(ENOENT, "the rank that created the segment has let go of it");
  return Segment(number, bytes);
}

Segment::Segment(int number, size_t bytes) : descriptor_(number), bytes_(bytes) {
  Mapping& mapping = mappings.at(number);
  ++mapping.users;
  data_ = static_cast<std::byte*>(mapping.data);
}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)) {}

Segment::~Segment() {
  if (data_ == nullptr) return;  // moved from; a lock here would order ranks that the engine does not order
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = mappings.begin(); entry != mappings.end(); ++entry) {
    if (entry->second.data != data_) continue;
    if (--entry->second.users == 0) {
      munmap(data_, bytes_);
      mappings.erase(entry);
    }
    return;
  }
}

void Segment::reserve(size_t, size_t) {}

void Segment::close_descriptor() { descriptor_ = -1; }

}  // namespace weft::shm
