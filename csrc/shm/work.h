// The outcome of an operation that runs while its caller goes on.
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
  // Who waits may lend a hand: `help` moves the operation on, and returns after at most the time it is given.
  using Help = std::function<void(Clock::duration)>;
  explicit Work(Help help = nullptr) : help_(std::move(help)) {}

  bool done() const;

  // Waits until it is done and rethrows its error. `on_slice` is called now and then, and may throw to give up waiting.
  // Returns false where `limit` passed first.
  bool wait(std::optional<Clock::duration> limit, const std::function<void()>& on_slice);

  // Calls back once it is done, with its error if it has one: at once, or on a thread of its own.
  using Callback = std::function<void(std::exception_ptr)>;
  void then(Callback callback);

  void finish(std::exception_ptr error);  // once

 private:
  const Help help_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  std::exception_ptr error_;
  std::vector<Callback> callbacks_;
};

}  // namespace weft::shm
