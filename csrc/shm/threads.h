// Threads that share the copies and sums of one rank. They sleep between calls.
#pragma once
#include <cstdint>
#include <functional>
#include <list>
#include <thread>

#include "wait.h"

namespace weft::shm {

class Threads {
 public:
  // `count` includes the thread that calls `run`. The others start when they are first needed.
  explicit Threads(int count) : count_(count) {}
  ~Threads();

  int count() const { return count_; }
  // Runs part(0) here and part(1) ... part(parts - 1) on other threads. Returns when all have ended, and throws what the
  // first of them threw. For one caller at a time.
  void run(int parts, const std::function<void(int)>& part);
  // Forgets the threads: in a forked child there are none.
  void abandon();

  static bool on_one_of_them();

 private:
  struct Helper {
    Flag wanted, done;
    uint32_t turn = 0;
    std::thread thread;
  };
  void live(Helper& helper, int number);

  int count_;
  std::list<Helper> helpers_;
  std::function<void(int)> part_;  // empty: end
};

}  // namespace weft::shm
