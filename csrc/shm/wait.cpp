#include "wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace weft::shm {

namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel waits on a plain 32-bit word");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "flags are shared between processes");

// FUTEX_PRIVATE_FLAG must not be set: the word is shared between processes.
void futex_wait(std::atomic<uint32_t>* word, uint32_t expected, Clock::duration limit) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count();
  timespec timeout{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // pauses, which `yield` does not do on most cores
#endif
}

}  // namespace

// The writer stores `value` and then reads `sleepers`; the waiter adds itself to `sleepers` and then reads `value`.
// Both are sequentially consistent, so at least one of the two sees the other, and no wake-up is lost.
void Flag::raise_to(uint32_t target) {
  value.store(target, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&value);
}

void Flag::ring() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex_wake(&value);
}

void Flag::nudge() { futex_wake(&value); }

bool Flag::sleep(uint32_t target, Clock::duration limit) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = value.load(std::memory_order_seq_cst);
  if (static_cast<int32_t>(seen - target) < 0) futex_wait(&value, seen, limit);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return reached(target);
}

bool spin(const Flag& flag, uint32_t target, Clock::duration limit, bool oversubscribed) {
  if (oversubscribed) {
    constexpr int yields = 4;
    for (int i = 0; i < yields; ++i) {
      if (flag.reached(target)) return true;
      sched_yield();
    }
    return flag.reached(target);
  }
  constexpr int pauses_per_look_at_the_clock = 64;
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < pauses_per_look_at_the_clock; ++i) {
      if (flag.reached(target)) return true;
      pause();
    }
  } while (Clock::now() < end);
  return flag.reached(target);
}

}  // namespace weft::shm
