// A group of ranks over one shared segment, and the one primitive that every collective is made of: the exchange.
//
//   segment   [failure record][control of rank 0 .. W-1][staging of rank 0, even][rank 0, odd][rank 1, even] ...
//
// Exchange number s of a rank:
//   1 write    its staging buffer of parity s (and, in a call's first exchange, its call header of parity s)
//   2 publish  raise its flag to s
//   3 wait     until every rank's flag has reached s
//   4 read     any rank's staging buffer of parity s
// Invariant: a rank writes parity s only after it has seen every flag at s-1, and a rank raises its flag to s-1 only
// after it has read what it needed of s-2, the last use of that parity. So two buffers suffice, no barrier trails a
// collective, and no flag is ever reset.
#pragma once
#include <atomic>
#include <forward_list>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "errors.h"
#include "liveness.h"
#include "messenger.h"
#include "queue.h"
#include "segment.h"
#include "types.h"
#include "wait.h"

namespace weft::shm {

enum class CallKind : uint32_t {
  barrier, all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all,
  count
};

// What an all_reduce of floating-point numbers does in the same pass, besides.
struct Fusion {
  bool used = false;
  DType wire = DType::float32;  // the type that travels: inputs are rounded to it, and so is the result
  double scale = 1;             // of the result, before it is rounded
  bool measured = false;        // the squared norm of the result is wanted

  bool operator==(const Fusion& other) const {
    return used == other.used && wire == other.wire && scale == other.scale && measured == other.measured;
  }
};

// What a rank believes it is calling. Ranks compare all of it but the place before any data moves.
struct CallHeader {
  CallKind kind;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  uint32_t root = 0;
  uint64_t count = 0;   // elements
  uint64_t layout = 0;  // hash of the split over ranks; 0 where there is none
  uint64_t place = 0;   // of the data in symmetric memory; 0 elsewhere
  Fusion fusion = {};   // of an all_reduce

  bool operator==(const CallHeader& other) const;
  std::string text() const;
};

enum class FailureKind : int { rank_lost = 1, timed_out, mismatched, interrupted };

// Memory of which every rank of a group has a part of the same size, mapped by all.
struct Region {
  Region(Segment mapped, size_t part_bytes, int own_rank, uint64_t place)
      : segment(std::move(mapped)), bytes(part_bytes), rank(own_rank), first_place(place) {}

  std::byte* part(int of_rank) const { return segment.data() + of_rank * bytes; }

  Segment segment;
  const size_t bytes;
  const int rank;
  const uint64_t first_place;  // the same on every rank; no two regions of a group overlap
};

struct RankIdentity {
  pid_t pid;
  uint64_t start_time;
};

struct GroupOptions {
  size_t staging_bytes = 0;        // of one buffer; a multiple of 4096
  Clock::duration timeout{};       // of one wait
  bool oversubscribed = false;     // more ranks on this machine than cores: do not spin
  std::function<void()> on_slice;  // called now and then during long waits; may throw to interrupt
  std::vector<int> labels = {};    // what errors call the ranks; empty: their numbers
};

// Faults on purpose, for tests: random delays wherever ranks meet, and death at the n-th such point.
struct InjectedFaults {
  uint64_t seed = 0;
  uint32_t longest_delay_us = 0;
  uint64_t die_at_point = 0;    // 1 is the first; 0 never
  bool wait_for_death = false;  // the messenger, between looking for messages and looking for lost ranks
};

class Group {
 public:
  static size_t segment_bytes(int world, size_t staging_bytes);

  Group(std::string name, int rank, Segment segment, const std::vector<RankIdentity>& ranks, GroupOptions options);

  ~Group();

  int rank() const { return rank_; }
  int world() const { return world_; }
  size_t staging_bytes() const { return options_.staging_bytes; }
  const std::string& name() const { return *name_.load(); }
  int label(int rank) const { return options_.labels.empty() ? rank : options_.labels[rank]; }
  void rename(std::string name);
  Clock::duration timeout() const { return timeout_.load(); }
  void set_timeout(Clock::duration timeout) { timeout_.store(timeout); }
  bool oversubscribed() const { return options_.oversubscribed; }
  const std::function<void()>& on_slice() const { return options_.on_slice; }
  void inject(const InjectedFaults& faults);
  void wait_for_death() const;  // where that is injected
  uint64_t calls() const { return calls_; }  // the number that errors give the last call

  // Runs a call (a function of collectives.h) after those submitted before it, and waits for it.
  template <class Function>
  void run(Function&& call) {
    check_usable();
    if (queue_->idle())
      call();
    else
      run_behind_the_queue(std::forward<Function>(call));
  }
  std::shared_ptr<Work> submit(std::function<void()> call);
  Messenger& messenger();

  // Memory for `bytes` a rank that all ranks reach; a collective call, made of several, so to be given to `run`.
  std::shared_ptr<Region> create_region(size_t bytes);
  // The place of memory in symmetric memory, and the region; 0 where it is elsewhere.
  uint64_t place_of(const void* data, size_t bytes, std::shared_ptr<Region>* region) const;
  bool has_had_regions() const { return next_place_ > 1; }  // the same on every rank

  std::vector<int> lost_ranks() const;
  bool lost(int peer) const;  // has died or left; of any_rank: every other rank has
  std::string how_it_ended(int peer) const;
  std::exception_ptr recorded_failure() const;
  // The first failure of the group is every rank's; returns it.
  std::exception_ptr record_failure(FailureKind kind, const std::string& text);

  bool forked() const;  // this process is a child of the one that joined, and has no place in the group

  // Ends every call that is under way, on every rank.
  void abort();
  // Says good-bye: who waits for this rank from now on is told at once. Later calls here are refused.
  void leave();

 private:
  friend class Call;
  struct Control;
  struct Failure;

  Control& control(int rank) const;
  Failure& failure() const;
  std::byte* staging(int rank, uint32_t step) const;

  void check_usable() const;
  void run_behind_the_queue(std::function<void()> call);
  void wait_for(int peer, const class Call& call);
  void check_peers(const class Call& call);
  void fault_point();

  std::forward_list<std::string> names_;  // the newest first; another thread may still read an older one
  std::atomic<const std::string*> name_;
  const int rank_;
  const int world_;
  const uint32_t forks_;  // of the process that joined
  Segment segment_;
  std::byte* staging_ = nullptr;  // in the segment
  GroupOptions options_;
  std::atomic<Clock::duration> timeout_;
  std::vector<std::unique_ptr<Peer>> peers_;  // none at this rank's own place
  std::mutex one_call_at_a_time_;
  uint32_t step_ = 0;
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> left_{false};
  InjectedFaults faults_;
  uint64_t fault_points_ = 0;
  mutable std::mutex regions_mutex_;
  std::vector<std::weak_ptr<Region>> regions_;
  std::atomic<uint64_t> next_place_{1};
  // Last, so that their threads end before what they use.
  std::unique_ptr<Queue> queue_;
  std::unique_ptr<Messenger> messenger_;
};

// One collective in progress. Collectives are written against this class alone.
class Call {
 public:
  Call(Group& group, const CallHeader& header);

  int rank() const { return group_.rank_; }
  int world() const { return group_.world_; }
  size_t staging_bytes() const { return group_.staging_bytes(); }

  std::byte* next_staging();                 // this rank's buffer for the coming exchange
  const std::byte* staged(int rank) const;   // what a rank wrote before the last exchange
  void exchange();
  bool same_place() const;  // after an exchange: every rank's data is at this rank's place, in symmetric memory

  std::string text() const;  // all_reduce #17 on group "tp"

 private:
  friend class Group;
  const CallHeader& header_of(int rank) const;  // valid until the second exchange after the first
  void compare_headers() const;

  Group& group_;
  std::unique_lock<std::mutex> lock_;
  const CallHeader header_;
  uint32_t announced_ = 0;  // the exchange that carried the headers
  bool announced_known_ = false;
};

}  // namespace weft::shm
