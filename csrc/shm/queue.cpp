#include "queue.h"

#include <exception>

#include "errors.h"

namespace weft::shm {

namespace {

// A call that this thread runs while it waits.
struct Helping {
  const Queue* queue;
  std::exception_ptr interruption = nullptr;
  std::function<void()> afterwards = nullptr;
};

thread_local Helping* helping = nullptr;

}  // namespace

bool Queue::hand_over(std::exception_ptr interruption) {
  if (helping == nullptr) return false;
  helping->interruption = std::move(interruption);
  return true;
}

bool Queue::postpone(std::function<void()> end) {
  if (helping == nullptr || helping->queue != this) return false;
  helping->afterwards = std::move(end);
  return true;
}

void Queue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  if (helping != nullptr && helping->queue == this) return;  // the call ends when this thread goes on with it
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return !busy(); });  // another thread may run the last call
}

std::shared_ptr<Work> Queue::submit(std::function<void()> call) {
  auto work = std::make_shared<Work>([queue = weak_from_this()](Clock::duration patience) {
    if (const auto still = queue.lock()) still->help(patience);
  });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw CommError("the group was destroyed; create it again to use it.");
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    calls_.emplace_back(std::move(call), work);
  }
  changed_.notify_one();
  return work;
}

bool Queue::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return calls_.empty() && !running_;
}

bool Queue::on_thread() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::this_thread::get_id() == thread_.get_id();
}

void Queue::abandon() {
  if (thread_.joinable()) thread_.detach();
}

void Queue::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !busy() && (closing_ || !calls_.empty()); });
    if (calls_.empty()) return;
    run_next(lock);
  }
}

void Queue::help(Clock::duration patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (busy()) {
    finished_.wait_for(lock, patience);
  } else if (!calls_.empty()) {
    Helping here{this};
    Helping* const outer = std::exchange(helping, &here);
    run_next(lock);
    helping = outer;
    lock.unlock();
    if (here.afterwards) here.afterwards();
    if (here.interruption) std::rethrow_exception(here.interruption);
  }
}

// Runs the first call, without the lock.
void Queue::run_next(std::unique_lock<std::mutex>& lock) {
  auto [call, work] = std::move(calls_.front());
  calls_.pop_front();
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    call();
  } catch (...) {
    error = std::current_exception();
  }
  call = nullptr;  // releases its captures before any waiter learns that it is done
  lock.lock();
  running_ = false;
  finishing_ = true;
  lock.unlock();
  work->finish(error);
  lock.lock();
  finishing_ = false;
  changed_.notify_one();
  finished_.notify_all();
}

}  // namespace weft::shm
