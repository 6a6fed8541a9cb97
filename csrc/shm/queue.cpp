#include "queue.h"

#include <exception>

#include "errors.h"

namespace weft::shm {

void Queue::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Work> Queue::submit(std::function<void()> call) {
  auto work = std::make_shared<Work>();
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
    changed_.wait(lock, [this] { return closing_ || !calls_.empty(); });
    if (calls_.empty()) return;
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
    lock.unlock();
    work->finish(error);
    lock.lock();
  }
}

}  // namespace weft::shm
