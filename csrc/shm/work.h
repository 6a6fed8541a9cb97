// Handle of an operation that runs in the background.
#pragma once
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "wait.h"

namespace weft::shm {

class Work {
 public:
  // A waiting thread calls `help`, which advances the operation and returns after at most the given time.
  using Help = std::function<void(Clock::duration)>;
  explicit Work(Help help = nullptr) : help_(std::move(help)) {}

  bool done() const;

  // Waits until the operation is done and rethrows its error. Returns false if `limit` passes first. Calls `on_slice`
  // from time to time, which may throw to stop waiting.
  bool wait(std::optional<Clock::duration> limit, const std::function<void()>& on_slice);

  // Calls `callback` once the operation is done, with its error or null. If it is done already, that is at once on this
  // thread; otherwise on another thread.
  using Callback = std::function<void(std::exception_ptr)>;
  void then(Callback callback);

  void finish(std::exception_ptr error);  // called once

 private:
  const Help help_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<Callback> callbacks_;
};

}  // namespace weft::shm
