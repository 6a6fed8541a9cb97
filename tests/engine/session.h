// Random work of one rank on one group: collectives now or submitted, messages, one-sided reads, new symmetric memory.
#pragma once
#include <future>

#include "messages.h"

template <class Item>
Item take_last(std::vector<Item>& items) {
  Item last = std::move(items.back());
  items.pop_back();
  return last;
}

class Session {
 public:
  Session(Team& team, Group& group, uint64_t key, bool may_mismatch)
      : team_(team), group_(group), key_(key), own_(key_of(key, group.rank() + 1)), may_mismatch_(may_mismatch) {}

  // All ranks take the same step number. Errors of the group pass through; submitted calls may still be under way.
  void step(uint64_t number) {
    Random plan(key_of(key_, number));
    const uint64_t key = plan();
    if (group_.rank() == 0) ++team_.calls;
    switch (plan.below(10)) {
      case 0:
      case 1: return exchange_messages(key);
      case 2: return finish();
      case 3:
        if (region_ == nullptr || plan.one_in(4)) return create_region();
        return read_from_all(key);
      case 4:  // as its owner may at any time
        group_.set_timeout(std::chrono::seconds(90 + own_.below(10)));
        if (own_.one_in(4)) group_.rename("renamed " + std::to_string(own_()));
        expect(group_.lost_ranks().empty() || !may_mismatch_, "a rank is taken for lost");
        if (group_.calls() > 1'000'000) fail("more calls than were made");
        [[fallthrough]];
      default: return collective(key);
    }
  }

  // Waits for all that is under way and checks it.
  void finish() {
    while (!messages_.empty()) take_last(messages_).get();
    while (!submitted_.empty()) {
      const Submitted last = take_last(submitted_);
      check(*last.trial, [&] { last.work->wait(std::nullopt, nullptr); });
    }
    slots_used_ = 0;
    while (*callbacks_ < callbacks_expected_) usleep(50);
  }

  // The same, where the group has failed: what was done before is right, the rest ends with an error.
  void finish_after_failure() {
    while (!messages_.empty() || !submitted_.empty()) {
      try {
        finish();
      } catch (const CommError&) {
      }
    }
  }

 private:
  struct Submitted {
    std::shared_ptr<Work> work;
    std::shared_ptr<Trial> trial;
  };

  void check(const Trial& trial, const std::function<void()>& finished) {
    try {
      finished();
    } catch (const CollectiveMismatchError&) {
      if (!trial.mismatched()) throw;
      return;
    }
    expect(!trial.mismatched(), "ranks called different things, and no error was raised");
    trial.check();
  }

  void collective(uint64_t key) {
    constexpr size_t slots = 4;
    std::byte* scratch = nullptr;
    if (region_ != nullptr && slots_used_ < slots) scratch = own_part() + slots_used_++ * (region_->bytes / slots);
    const size_t scratch_bytes = scratch == nullptr ? 0 : region_->bytes / slots;
    const auto trial = std::make_shared<Trial>(group_, key, may_mismatch_, scratch, scratch_bytes);
    if (own_.one_in(2)) return check(*trial, [&] { group_.run([&] { trial->call(); }); });
    submitted_.push_back({group_.submit([trial] { trial->call(); }), trial});
    if (!own_.one_in(3)) return;
    // What a callback holds may start callbacks of its own when it goes.
    const std::shared_ptr<void> held(nullptr, [count = callbacks_](void*) {
      Work other;
      other.then([count](const std::exception_ptr&) { ++*count; });
      other.finish(nullptr);
    });
    callbacks_expected_ += 2;
    submitted_.back().work->then([count = callbacks_, held](const std::exception_ptr&) { ++*count; });
  }

  // On this thread or on another one, while collectives go on.
  void exchange_messages(uint64_t key) {
    const auto batch = std::make_shared<Batch>(group_, key);
    batch->post(team_);
    const auto when = own_.one_in(2) ? std::launch::async : std::launch::deferred;
    messages_.push_back(std::async(when, [batch] { batch->finish(); }));
  }

  void create_region() {
    finish();  // the trials' memory may be in the old one
    group_.run([&] { region_ = group_.create_region(400'000); });
  }

  void read_from_all(uint64_t key) {
    finish();
    const size_t count = 1 + key % 5000;
    const auto part_of = [&](int rank) { return elements(DType::int64, count, key_of(key, rank)); };
    const Bytes own = part_of(group_.rank());
    memcpy(own_part(), own.data(), own.size());
    group_.run([&] { barrier(group_); });
    for (int rank = 0; rank < group_.world(); ++rank)
      expect(memcmp(region_->part(rank), part_of(rank).data(), own.size()) == 0, "what a rank wrote is not seen");
    group_.run([&] { barrier(group_); });  // before anything else is written there
  }

  std::byte* own_part() const { return region_->part(group_.rank()); }

  Team& team_;
  Group& group_;
  const uint64_t key_;
  Random own_;
  const bool may_mismatch_;
  std::shared_ptr<Region> region_;
  size_t slots_used_ = 0;
  std::vector<Submitted> submitted_;
  std::vector<std::future<void>> messages_;
  const std::shared_ptr<std::atomic<size_t>> callbacks_ = std::make_shared<std::atomic<size_t>>(0);
  size_t callbacks_expected_ = 0;
};
