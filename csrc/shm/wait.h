// Flag that one process raises and others wait for, by a bounded spin and then by sleeping in the kernel.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace weft::shm {

using Clock = std::chrono::steady_clock;

inline int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

// Has one writer. The value only grows. It wraps, so it is compared by difference.
struct alignas(64) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }

  // A process that sees the new value sees everything written before.
  void raise_to(uint32_t target);

  // Raises the value by one. For a flag with many writers that only signals a change.
  void ring();

  // Sleeps for at most `limit`, and returns whether the target is reached. May return early.
  bool sleep(uint32_t target, Clock::duration limit);

  // Wakes all sleepers without a new value, so that they check the rest of the group's state.
  void nudge();
};

// Spins for at most `limit`. If `oversubscribed` (ranks outnumber cores), yields the core a few times instead.
bool spin(const Flag& flag, uint32_t target, Clock::duration limit, bool oversubscribed);

}  // namespace weft::shm
