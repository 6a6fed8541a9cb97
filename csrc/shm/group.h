// Group of ranks over one shared segment, and the exchange, the primitive of every collective.
//
//   segment   [failure record][control of rank 0 .. W-1][staging of rank 0, even][rank 0, odd][rank 1, even] ...
//
// Exchange number s of a rank:
//   1 write    its staging buffer of parity s, and its call header of parity s in a call's first exchange
//   2 publish  raise its flag to s
//   3 wait     until every rank's flag has reached s
//   4 read     any rank's staging buffer of parity s
// Invariant: a rank writes parity s only after it has seen every flag at s-1. A rank raises its flag to s-1 only after
// it has read all that it needs from s-2, the last use of that parity. So two buffers suffice, no collective ends with
// a barrier, and no flag is ever reset.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <forward_list>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bytes.h"
#include "errors.h"
#include "liveness.h"
#include "messenger.h"
#include "queue.h"
#include "segment.h"
#include "threads.h"
#include "types.h"
#include "wait.h"

namespace weft::shm {

enum class CallKind : uint32_t {
  barrier, all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all,
  count
};

inline constexpr const char* call_names[] = {"barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                             "reduce",  "gather",     "scatter",    "all_to_all"};
static_assert(std::size(call_names) == static_cast<size_t>(CallKind::count));
inline const char* name_of(CallKind kind) { return call_names[static_cast<size_t>(kind)]; }

// Further steps of an all_reduce of floating-point numbers, in the same pass over the data.
struct Fusion {
  bool used = false;
  DType wire = DType::float32;  // the type that travels: inputs and the result are rounded to it
  double scale = 1;             // factor on the result before it is rounded
  bool measured = false;        // the call computes the squared norm of the result

  bool operator==(const Fusion& other) const {
    return used == other.used && wire == other.wire && scale == other.scale && measured == other.measured;
  }
};

// What a thread's calls are made for, where its caller's own code has no collective in it ("weft.full_state_dict").
struct Purpose {
  uint64_t hash = 0;  // of the text; 0 if there is none
  char text[184];

  Purpose() { text[0] = 0; }  // a call costs half a microsecond, and has no time to write all of it
  explicit Purpose(const std::string& text);
  Purpose(const Purpose& other) : Purpose() { *this = other; }
  Purpose& operator=(const Purpose& other) {
    hash = other.hash;
    if (hash != 0) memcpy(text, other.text, sizeof text);
    return *this;
  }

  static Purpose& of_this_thread();
};

// Sets the purpose of a thread's calls while it lives.
class PurposeOfThread {
 public:
  explicit PurposeOfThread(const Purpose& purpose) : before_(Purpose::of_this_thread()) {
    Purpose::of_this_thread() = purpose;
  }
  PurposeOfThread(const PurposeOfThread&) = delete;
  ~PurposeOfThread() { Purpose::of_this_thread() = before_; }

 private:
  const Purpose before_;
};

class Group;

// Description of a rank's call. Ranks compare all fields except the place before any data moves.
struct CallHeader {
  CallKind kind;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  uint32_t root = 0;
  uint64_t count = 0;   // elements
  uint64_t layout = 0;  // hash of the split over ranks; 0 if there is none
  uint64_t place = 0;   // place of the data in symmetric memory; 0 if it lies elsewhere
  Fusion fusion = {};   // for all_reduce
  Purpose purpose = {};

  bool operator==(const CallHeader& other) const;
  std::string text(const Group& group) const;  // with the root's name in errors
};

// One of a group's last calls. Times are in nanoseconds of the steady clock, and 0 for what has not happened.
struct CallRecord {
  uint64_t number;
  CallKind kind;
  DType dtype;
  uint64_t count;
  int64_t submitted_ns;  // of a call beside the program
  int64_t begun_ns;
  int64_t met_ns = 0;  // every rank has come
  int64_t ended_ns = 0;
};

// A message that has been sent or received whole. Times are as in CallRecord.
struct MessageRecord {
  bool sent;
  int peer;
  uint64_t bytes;
  uint32_t tag;
  int64_t posted_ns, ended_ns;
};

enum class FailureKind : int { rank_lost = 1, timed_out, mismatched, interrupted };

// Symmetric memory: one part of the same size per rank of a group, mapped by all ranks.
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
  pid_t pid;  // for errors; it means nothing in another process namespace
  uint64_t key;  // of its process (handover.h)
};

struct GroupOptions {
  size_t staging_bytes = 0;        // per buffer; a multiple of 4096
  Clock::duration timeout{};       // limit of one wait
  bool oversubscribed = false;     // more ranks on this machine than cores: do not spin
  std::function<void()> on_slice;  // called from time to time during long waits; may throw to interrupt
  std::vector<int> labels = {};    // names of the ranks in errors; empty means their numbers
  bool single_copy = true;         // if the system lets every rank read the memory of every other
  int threads = 1;                 // that share this rank's copies and sums
  size_t shared_from = 64 << 10;   // bytes of one thread's part: copying them takes longer than waking it
};

// Injected faults for tests: random delays at every point where ranks meet, and death at the n-th such point.
struct InjectedFaults {
  uint64_t seed = 0;
  uint32_t longest_delay_us = 0;
  uint64_t die_at_point = 0;    // 1 is the first point; 0 means never
  bool wait_for_death = false;  // in the messenger, between its checks for messages and for lost ranks
};

class Group {
 public:
  static size_t segment_bytes(int world, size_t staging_bytes);
  // Reserves a rank's own part of the segment. Each rank does so before it makes the group.
  static void reserve(Segment& segment, int rank, int world, size_t staging_bytes);

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
  bool single_copy() const { return options_.single_copy; }  // the same on every rank
  const std::function<void()>& on_slice() const { return options_.on_slice; }
  void inject(const InjectedFaults& faults);
  void wait_for_death() const;  // returns at once unless that fault is injected
  uint64_t calls() const { return calls_; }  // number of the last call in errors
  // Keeps records of the last `kept` calls and messages from now on; forgets older ones. Returns the number before.
  size_t record_calls(size_t kept);
  bool records() const { return kept_.load(std::memory_order_relaxed) != 0; }
  void record(const MessageRecord& message);
  std::vector<CallRecord> last_calls() const;  // oldest first
  std::vector<MessageRecord> last_messages() const;
  std::optional<WaitingCall> waiting() const;  // may be asked by any thread

  // Runs a call (a function of collectives.h) after all calls submitted earlier, and waits for it.
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

  // Creates memory of `bytes` per rank that all ranks reach. It makes several collective calls, so pass it to `run`.
  std::shared_ptr<Region> create_region(size_t bytes);
  // Returns the place of `data` in symmetric memory and sets the region; returns 0 if `data` lies elsewhere.
  uint64_t place_of(const void* data, size_t bytes, std::shared_ptr<Region>* region) const;
  bool has_had_regions() const { return next_place_ > 1; }  // the same on every rank

  std::vector<int> lost_ranks() const;
  bool lost(int peer) const;  // whether the peer has died or left; for any_rank, whether every other rank has
  std::string how_it_ended(int peer) const;
  std::exception_ptr recorded_failure() const;
  // Returns the group's first failure, which every rank raises; that is this one if there is none yet.
  std::exception_ptr record_failure(FailureKind kind, const std::string& text);

  bool forked() const;  // this process is a child of the one that joined, and is not a rank

  // Ends every call under way, on every rank.
  void abort();
  // Leaves the group. A rank that waits for this one from now on fails at once. Refuses later calls here.
  void leave();
  // As Queue::postpone: for a group that is let go of inside of one of its calls.
  bool postpone(std::function<void()> end) { return queue_->postpone(std::move(end)); }

 private:
  friend class Call;
  struct Control;
  struct Failure;

  Control& control(int rank) const;
  Failure& failure() const;
  std::byte* staging(int rank, uint32_t step) const;

  void check_usable() const;
  void check_recorded() const;  // throws the group's failure, if it has one
  void run_behind_the_queue(std::function<void()> call);
  bool reads_all_peers();
  void wait_for(int peer, const class Call& call);
  void sleep_for(Flag& flag, const class Call& call, bool in_background);
  void check_peers(const class Call& call);
  void fault_point();
  void record_time(int64_t CallRecord::*moment);  // of the call under way

  std::forward_list<std::string> names_;  // newest first; another thread may still read an older name
  std::atomic<const std::string*> name_;
  const int rank_;
  const int world_;
  const uint32_t forks_;  // fork count of the process that joined
  Segment segment_;
  std::byte* staging_ = nullptr;  // in the segment
  GroupOptions options_;
  std::atomic<Clock::duration> timeout_;
  std::vector<std::shared_ptr<const Peer>> peers_;  // null for this rank itself
  std::mutex one_call_at_a_time_;
  uint32_t step_ = 0;
  std::atomic<uint64_t> calls_{0};
  mutable std::mutex records_mutex_;
  std::deque<CallRecord> last_calls_;
  std::deque<MessageRecord> last_messages_;
  std::atomic<size_t> kept_{0};
  mutable std::mutex waiting_mutex_;
  const Call* waiting_ = nullptr;
  Clock::time_point waiting_since_;
  std::atomic<bool> left_{false};
  Threads threads_;
  InjectedFaults faults_;
  uint64_t fault_points_ = 0;
  mutable std::mutex regions_mutex_;
  std::vector<std::weak_ptr<Region>> regions_;
  std::atomic<uint64_t> next_place_{1};
  // Last, so that their threads end before the members that they use.
  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Messenger> messenger_;
};

// One collective in progress; the only interface that collectives use.
class Call {
 public:
  Call(Group& group, const CallHeader& header);
  ~Call();

  int rank() const { return group_.rank_; }
  int world() const { return group_.world_; }
  size_t staging_bytes() const { return group_.staging_bytes(); }
  bool single_copy() const { return group_.single_copy(); }
  bool may_go_direct() const { return group_.single_copy() || group_.has_had_regions(); }

  std::byte* next_staging();                 // this rank's buffer for the coming exchange
  const std::byte* staged(int rank) const;   // data that a rank wrote before the last exchange
  // Runs work(begin, end) on parts of `bytes` bytes that are cut at whole lines: on several threads if there are many.
  template <class Work>
  void share(size_t bytes, const Work& work) const {
    const int parts = static_cast<int>(std::min<size_t>(bytes / group_.options_.shared_from, threads()));
    if (parts < 2) return work(size_t{0}, bytes);
    const size_t part_bytes = (bytes / parts / line_bytes + 1) * line_bytes;
    group_.threads_.run(parts, [&](int number) {
      const size_t begin = std::min(bytes, number * part_bytes);
      work(begin, std::min(bytes, begin + part_bytes));
    });
  }
  int threads() const { return group_.threads_.count(); }
  void exchange();
  bool same_place() const;  // after an exchange: whether all ranks' data is at the same place in symmetric memory
  // From here on this rank reads memory of other ranks that they may free if they fail: an exchange after that checks.
  void read_in_place() { reads_in_place_ = true; }
  // Copies from the memory of a rank that is in this call. Throws what became of the rank if that fails.
  void read_memory(int rank, void* destination, uint64_t address, size_t bytes) const;

  std::string text() const;  // all_reduce #17 on group "tp"
  void record_count(uint64_t elements);  // of a call whose header has none, because ranks may send different numbers

 private:
  friend class Group;
  const CallHeader& header_of(int rank) const;  // valid until the second exchange after the first
  void compare_headers() const;

  Group& group_;
  std::unique_lock<std::mutex> lock_;
  CallHeader header_;
  const int exceptions_ = std::uncaught_exceptions();  // a call that ends with more of them has failed
  bool recorded_ = false;
  uint32_t announced_ = 0;  // the exchange that carried the headers
  bool announced_known_ = false;
  bool reads_in_place_ = false;
};

}  // namespace weft::shm
