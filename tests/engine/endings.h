// Groups that fail on purpose. The cause must be every rank's error, and nothing may be left behind.
#pragma once
#include <typeinfo>

#include "session.h"

enum class Ending { abort, leave, silence, interruption, message_mismatch, death };

struct Interrupted {};

class Failing {
 public:
  Failing(Team& team, int rank, Ending ending, int victim)
      : team_(team), ending_(ending), victim_(victim), is_victim_(rank == victim), plan_(team.seed),
        group_(join(team, rank, plan_(), [this] { if (interrupted_) throw Interrupted(); })),
        session_(std::make_unique<Session>(team, *group_, plan_(), false)) {
    const InjectedFaults death{plan_(), 20, plan_.one_in(2) ? 1 + plan_.below(80) : 0};
    if (is_victim_ && ending == Ending::death) group_->inject(death);
  }

  void run() {
    try {
      work();
      fail("the group still works");
    } catch (const CommError& error) {
      check(error);
    } catch (const Interrupted&) {
      if (!group_->recorded_failure()) group_->abort();  // the call was done at that very moment
    }
    session_->finish_after_failure();
    if (cause_.joinable()) cause_.join();
    bool refused = false;
    try {
      group_->run([&] { barrier(*group_); });
    } catch (const CommError&) {
      refused = true;
    }
    expect(refused, "a call after the failure is not refused");
    session_.reset();
    group_.reset();
  }

 private:
  void work() {
    constexpr auto patience = std::chrono::milliseconds(200);
    const uint64_t steps = plan_.below(14);
    for (uint64_t number = 0; number < steps; ++number) session_->step(number);
    const bool quietly = plan_.one_in(2);
    if (quietly) session_->finish();
    if (is_victim_) cause(quietly);
    if (ending_ == Ending::message_mismatch) send_what_does_not_fit();
    if (ending_ == Ending::silence) {
      group_->set_timeout(patience);
      group_->run([&] { barrier(*group_); });
    }
    for (uint64_t number = steps; number < 1000; ++number) {
      if (ending_ == Ending::interruption && !is_victim_) usleep(20'000);
      session_->step(number);
    }
  }

  // What the victim does to its group: at once, or on another thread while it works on.
  void cause(bool quietly) {
    const auto act = [this] {
      if (ending_ == Ending::abort) group_->abort();
      if (ending_ == Ending::leave) group_->leave();
    };
    if (ending_ == Ending::death) raise(SIGKILL);
    while (ending_ == Ending::silence && !group_->recorded_failure()) usleep(10'000);
    if (ending_ == Ending::interruption) interrupted_ = true;
    if (quietly) return act();
    cause_ = std::thread([act, delay_us = plan_.below(3000)] { usleep(delay_us), act(); });
  }

  void send_what_does_not_fit() {
    const int receiver = (victim_ + 1) % team_.world;
    float data[2] = {};
    int from = any_rank;
    Messenger& messenger = group_->messenger();
    std::shared_ptr<Work> sent, received;
    if (is_victim_) sent = messenger.send(receiver, data, {2, DType::float32, 5000});
    if (group_->rank() == receiver) received = messenger.receive(victim_, data, {1, DType::float32, 5000}, &from);
    if (sent) sent->wait(std::nullopt, nullptr);
    if (received) received->wait(std::nullopt, nullptr);
  }

  void check(const CommError& error) const {
    const std::string name = "rank " + std::to_string(victim_), text = error.what();
    const auto is = [&](const std::type_info& type, const std::string& words) {
      return typeid(error) == type && text.find(words) != std::string::npos;
    };
    // What a receive from any rank says, where there is but one.
    const bool is_lost_of_two = team_.world == 2 && is(typeid(RankLostError), "every other rank has ended");
    bool right = false;
    switch (ending_) {
      case Ending::abort: right = is(typeid(CommError), name + " aborted"); break;
      case Ending::leave:  // which aborts what is under way
        right = is(typeid(RankLostError), name + " left the group") || is(typeid(CommError), name + " aborted") ||
                (is_victim_ && is(typeid(CommError), "was destroyed")) || is_lost_of_two;
        break;
      case Ending::silence: right = is(typeid(CollectiveTimeoutError), ""); break;
      case Ending::interruption: 
        right = is(typeid(CommError), name + " was interrupted") || is(typeid(CommError), name + " aborted");
        break;
      case Ending::message_mismatch: right = is(typeid(CollectiveMismatchError), name + " sent (float32, 2"); break;
      default: right = is(typeid(RankLostError), name + " (pid") || is_lost_of_two; break;
    }
    expect(right, "ending " + std::to_string(static_cast<int>(ending_)) + " of " + name + " gives: " + text);
  }

  Team& team_;
  const Ending ending_;
  const int victim_;
  const bool is_victim_;
  Random plan_;
  std::atomic<bool> interrupted_{false};
  std::unique_ptr<Group> group_;
  std::unique_ptr<Session> session_;
  std::thread cause_;
};
