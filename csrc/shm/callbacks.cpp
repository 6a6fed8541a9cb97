#include "callbacks.h"

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace weft::shm {

namespace {

class Threads {
 public:
  void run(std::function<void()> callback) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(callback));
    if (waiting_.size() > idle_)
      std::thread([this] { work(); }).detach();
    else
      changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      std::function<void()> callback = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      callback();
      callback = nullptr;  // without the lock, because releasing its captures may run further callbacks
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  size_t idle_ = 0;
};

}  // namespace

void run_on_a_thread(std::function<void()> callback) {
  static std::mutex mutex;
  static Threads* threads = nullptr;  // never destroyed: its threads end with the process
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {  // a forked child has no thread but the caller
    threads = new Threads;
    owner = getpid();
  }
  threads->run(std::move(callback));
}

}  // namespace weft::shm
