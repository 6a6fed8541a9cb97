#include "threads.h"

#include <chrono>
#include <exception>
#include <new>
#include <system_error>
#include <vector>

namespace weft::shm {

namespace {

constexpr auto spin_limit = std::chrono::microseconds(50);
constexpr auto sleep_limit = std::chrono::hours(1);

thread_local bool helps = false;

void wait(Flag& flag, uint32_t turn) {
  if (spin(flag, turn, spin_limit, false)) return;
  while (!flag.sleep(turn, sleep_limit)) {
  }
}

}  // namespace

bool Threads::on_one_of_them() { return helps; }

Threads::~Threads() {
  part_ = nullptr;
  for (Helper& helper : helpers_) {
    helper.wanted.raise_to(++helper.turn);
    helper.thread.join();
  }
}

void Threads::abandon() { new std::list<Helper>(std::move(helpers_)); }

void Threads::live(Helper& helper, int number) {
  helps = true;
  for (uint32_t turn = 1;; ++turn) {
    wait(helper.wanted, turn);
    if (!part_) return;
    part_(number);
    helper.done.raise_to(turn);
  }
}

void Threads::run(int parts, const std::function<void(int)>& part) {
  std::vector<std::exception_ptr> failed(static_cast<size_t>(parts));
  const auto guarded = [&](int number) {
    try {
      part(number);
    } catch (...) {
      failed[static_cast<size_t>(number)] = std::current_exception();
    }
  };
  part_ = guarded;
  int number = 1;
  for (auto helper = helpers_.begin(); number < parts; ++number, ++helper) {
    if (helper == helpers_.end()) {
      helper = helpers_.emplace(helper);
      try {
        helper->thread = std::thread(&Threads::live, this, std::ref(*helper), number);
      } catch (const std::system_error&) {  // no thread is to be had
        helpers_.erase(helper);
        count_ = number;
        break;
      }
    }
    helper->wanted.raise_to(++helper->turn);
  }
  const int shared = number;
  for (; number < parts; ++number) guarded(number);
  guarded(0);
  number = 1;
  for (auto helper = helpers_.begin(); number < shared; ++number, ++helper) wait(helper->done, helper->turn);
  for (const std::exception_ptr& failure : failed)
    if (failure != nullptr) std::rethrow_exception(failure);
}

}  // namespace weft::shm
