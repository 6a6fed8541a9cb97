// Queue of a group's calls. Its own thread runs them one after another while the caller computes.
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
  bool on_thread() const;  // the caller runs inside one of the calls

  void close();  // returns when all queued calls are done; refuses later ones

  // For a forked child: the thread runs in the parent, so the child cannot join it and must detach it.
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
