// Queue of a group's calls. Its own thread runs them one after another while the caller computes. A thread that waits for
// one of them runs what has not begun, since it has nothing else to do and the queue's thread would have to wake up.
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

class Queue : public std::enable_shared_from_this<Queue> {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;
  ~Queue() { close(); }

  // The thread starts with the first call.
  std::shared_ptr<Work> submit(std::function<void()> call);
  bool idle() const;       // nothing is waiting or running
  bool on_thread() const;  // the caller runs inside one of the calls, on the queue's thread

  // Hands what interrupts this thread over to its wait, if it runs a call while it waits; the call gets another error.
  static bool hand_over(std::exception_ptr interruption);

  // Has `end` run once the call has ended that this thread runs while it waits. Returns false if there is none.
  bool postpone(std::function<void()> end);

  // Refuses later calls. Returns when all queued ones are done, but at once inside of one that this thread runs while it
  // waits (a signal's handler destroys the group).
  void close();

  // For a forked child: the thread runs in the parent, so the child cannot join it and must detach it.
  void abandon();

 private:
  void run();
  void help(Clock::duration patience);
  void run_next(std::unique_lock<std::mutex>& lock);
  bool busy() const { return running_ || finishing_; }

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a call came, or the queue closes
  std::condition_variable finished_;
  std::deque<std::pair<std::function<void()>, std::shared_ptr<Work>>> calls_;
  bool running_ = false;
  bool finishing_ = false;  // a call has run, and its work is about to be done; the next begins after that
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace weft::shm
