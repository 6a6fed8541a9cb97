#include "work.h"

#include "callbacks.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace weft::shm {

bool Work::done() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool Work::wait(std::optional<Clock::duration> limit, const std::function<void()>& on_slice) {
  constexpr Clock::duration slice = std::chrono::milliseconds(50);
  const auto start = Clock::now();
  auto next_slice = start + slice;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!done_) {
    Clock::duration patience = slice;
    if (limit) {
      const auto left = *limit - (Clock::now() - start);
      if (left <= Clock::duration::zero()) return false;
      patience = std::min(patience, left);
    }
    if (help_) {
      lock.unlock();
      help_(patience);
      lock.lock();
    } else {
      finished_.wait_for(lock, patience);
    }
    if (done_ || !on_slice || Clock::now() < next_slice) continue;
    next_slice = Clock::now() + slice;
    lock.unlock();
    on_slice();
    lock.lock();
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

void Work::then(Callback callback) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(error_);
}

void Work::finish(std::exception_ptr error) {
  std::vector<Callback> callbacks;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    callbacks = std::move(callbacks_);
  }
  finished_.notify_all();
  for (Callback& callback : callbacks)
    run_on_a_thread([callback = std::move(callback), error = error_] { callback(error); });
}

}  // namespace weft::shm
