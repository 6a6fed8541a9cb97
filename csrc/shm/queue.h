// Runs a group's calls one after another on a thread of its own, so that they go on while the caller computes.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "work.h"

namespace weft::shm {

class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  ~Queue() { close(); }

  // The thread starts with the first call.
  std::shared_ptr<Work> submit(std::function<void()> call);
  bool idle() const;       // nothing is waiting or running
  bool on_thread() const;  // the caller is one of the calls

  void close();  // returns when the calls that are in it are done; later ones are refused

  // After a fork the thread is in the parent; the child must let go of what it cannot join.
  void abandon();

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<std::function<void()>, std::shared_ptr<Work>>> calls_;
  bool running_ = false;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace weft::shm
