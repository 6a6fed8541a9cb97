// Access to the data of other ranks where it lies, without staging: mapped if it is symmetric memory, else copied once by
// the system.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "bytes.h"
#include "group.h"
#include "streaming.h"

namespace weft::shm {

class Direct {
 public:
  // Sets the header's place if the data that this rank gives, `bytes` from `whole` on, is symmetric memory.
  Direct(const Group& group, CallHeader& header, const void* whole, size_t bytes) {
    if (bytes >= from_bytes && group.has_had_regions()) header.place = group.place_of(whole, bytes, &region_);
  }

  // Returns whether a call may go direct, the same on every rank. `part_bytes` is the size of the largest part that one
  // rank reads of another.
  static bool may(const Call& call, size_t part_bytes) {
    return call.world() > 1 && part_bytes >= from_bytes && call.may_go_direct();
  }

  // Announces the data that each rank may read, if the call may go direct. Returns false, on every rank, if the data is
  // to be staged. Otherwise an exchange must follow all reading.
  bool announce(Call& call, const std::vector<const void*>& of_rank, size_t part_bytes) {
    if (!may(call, part_bytes)) return false;
    auto* announced = reinterpret_cast<uint64_t*>(call.next_staging());
    for (size_t rank = 0; rank < of_rank.size(); ++rank) announced[rank] = reinterpret_cast<uint64_t>(of_rank[rank]);
    if (region_) announced[call.world()] = reinterpret_cast<uint64_t>(region_->part(call.rank()));
    call.exchange();
    mapped_ = call.same_place();
    for (int rank = 0; rank < call.world(); ++rank) {
      const auto* theirs = reinterpret_cast<const uint64_t*>(call.staged(rank));
      uint64_t address = theirs[call.rank()];
      if (mapped_) address += reinterpret_cast<uint64_t>(region_->part(rank)) - theirs[call.world()];
      addresses_.push_back(address);
    }
    if (!mapped_ && !call.single_copy()) return false;
    call.read_in_place();
    return true;
  }

  bool mapped() const { return mapped_; }
  // A rank's data, if it is mapped or the rank's own.
  const std::byte* at(int rank, size_t offset) const {
    return reinterpret_cast<const std::byte*>(addresses_[rank]) + offset;
  }
  void read(const Call& call, int rank, size_t offset, void* destination, size_t bytes) const {
    if (bytes == 0) return;
    call.share(bytes, [&](size_t begin, size_t end) {
      read_alone(call, rank, offset + begin, weft::shm::at(destination, begin), end - begin, bytes >= beyond_cache_bytes);
    });
  }
  // As `read`, on this thread.
  void read_alone(const Call& call, int rank, size_t offset, void* destination, size_t bytes, bool past_cache) const {
    if (!mapped_ && rank != call.rank())
      call.read_memory(rank, destination, addresses_[rank] + offset, bytes);
    else if (past_cache && destination != at(rank, offset))
      copy_past_cache(destination, at(rank, offset), bytes);
    else
      copy_bytes(destination, at(rank, offset), bytes);
  }

 private:
  // From here on, a further exchange costs less than a second copy.
  static constexpr size_t from_bytes = 8 << 10;
  // From here on, a copy does not stay in a core's own caches, so it need not go through them.
  static constexpr size_t beyond_cache_bytes = 4 << 20;

  std::shared_ptr<Region> region_;
  bool mapped_ = false;
  std::vector<uint64_t> addresses_;  // of the data of each rank for this rank
};

// Has `reduce(sources, offset, bytes)` reduce the ranks' data from `begin` to `end`, in blocks that stay in the caches.
// `sources` are the ranks' blocks, in order. One thread reduces all if the blocks must follow one another.
template <class Reduce>
void reduce_direct(Call& call, const Direct& direct, size_t begin, size_t end, bool in_order, const Reduce& reduce) {
  constexpr size_t mapped_bytes = 16 << 10;  // stays in the first-level cache
  constexpr size_t least_bytes = 1 << 10;   // of a copy by the system
  // No other rank reads this rank's next buffer before the next exchange. Each thread takes a part of it.
  const auto read_bytes_of = [&](int of_threads) {
    return call.staging_bytes() / call.world() / of_threads / line_bytes * line_bytes;
  };
  const bool alone = in_order || (!direct.mapped() && read_bytes_of(call.threads()) < least_bytes);
  const size_t read_bytes = read_bytes_of(alone ? 1 : call.threads());
  std::atomic<size_t> threads{0};
  const auto reduce_part = [&](size_t part_begin, size_t part_end) {
    std::vector<const void*> sources(call.world());
    std::byte* copies = call.next_staging() + threads++ * call.world() * read_bytes;
    const size_t block_bytes = direct.mapped() ? mapped_bytes : read_bytes;
    for (size_t block = begin + part_begin; block < begin + part_end; block += block_bytes) {
      const size_t bytes = std::min(block_bytes, begin + part_end - block);
      for (int rank = 0; rank < call.world(); ++rank) {
        if (direct.mapped() || rank == call.rank()) {
          sources[rank] = direct.at(rank, block);
        } else {
          direct.read_alone(call, rank, block, copies + rank * read_bytes, bytes, false);
          sources[rank] = copies + rank * read_bytes;
        }
      }
      reduce(sources, block, bytes);
    }
  };
  alone ? reduce_part(0, end - begin) : call.share(end - begin, reduce_part);
}

}  // namespace weft::shm
