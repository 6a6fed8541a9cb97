// A flag that one process raises and others wait for: a bounded spin, then sleep in the kernel.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace weft::shm {

using Clock = std::chrono::steady_clock;

// One writer. The value only grows; it wraps, so it is compared by difference.
struct alignas(64) Flag {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }

  // Everything written before is visible to whoever sees the new value.
  void raise_to(uint32_t target);

  // Raises it by one; for a flag of many writers, where that there is news is all that counts.
  void ring();

  // Returns whether the target is reached; false after at most `limit` of sleep. May return early.
  bool sleep(uint32_t target, Clock::duration limit);

  // Wakes whoever sleeps without a new value, so that it looks at the rest of the group's state.
  void nudge();
};

// Spins for at most `limit`; where ranks outnumber cores, it gives the core away instead of spinning.
bool spin(const Flag& flag, uint32_t target, Clock::duration limit, bool oversubscribed);

}  // namespace weft::shm
