#include "group.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>

namespace weft::shm {

namespace {

constexpr auto spin_limit = std::chrono::microseconds(100);
constexpr auto sleep_slice = std::chrono::milliseconds(10);  // how soon a lost rank is noticed

constexpr const char* call_names[] = {"barrier", "all_reduce", "all_gather", "reduce_scatter", "broadcast"};
static_assert(std::size(call_names) == static_cast<size_t>(CallKind::count));

enum FailureKind : int { rank_lost = 1, timed_out, interrupted };

[[noreturn]] void raise_as(int kind, const std::string& text) {
  switch (kind) {
    case rank_lost:
      throw RankLostError(text);
    case timed_out:
      throw CollectiveTimeoutError(text);
    default:
      throw CommError(text);
  }
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// How often this process is a fork: a child has its parent's mappings but is no rank.
std::atomic<uint32_t> forks{0};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

struct Group::Control {
  Flag arrived;
  alignas(64) CallHeader headers[2];
  alignas(64) std::atomic<uint32_t> left{0};
};

// The first failure in a group is every rank's failure: a rank that raises will not answer again, so the others must
// not wait for it.
struct Group::Failure {
  alignas(64) std::atomic<uint32_t> state{0};  // 0 none, 1 being written, 2 readable
  int kind;
  char text[1008];
};

bool CallHeader::operator==(const CallHeader& other) const {
  return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && count == other.count &&
         layout == other.layout;
}

std::string CallHeader::text() const {
  std::string text = call_names[static_cast<size_t>(kind)];
  if (kind == CallKind::barrier) return text + "()";
  text += std::string("(") + name_of(dtype) + ", " + std::to_string(count) + " elements";
  if (kind == CallKind::all_reduce || kind == CallKind::reduce_scatter) text += std::string(", ") + name_of(op);
  if (kind == CallKind::broadcast) text += ", from rank " + std::to_string(root);
  if (layout != 0) {
    char hash[32];
    snprintf(hash, sizeof hash, ", split %08x", static_cast<unsigned>(layout ^ (layout >> 32)));
    text += hash;
  }
  return text + ")";
}

size_t Group::segment_bytes(int world, size_t staging_bytes) {
  return round_up(sizeof(Failure) + world * sizeof(Control), 4096) + 2 * world * staging_bytes;
}

Group::Control& Group::control(int rank) const {
  return reinterpret_cast<Control*>(segment_.data() + sizeof(Failure))[rank];
}

Group::Failure& Group::failure() const { return *reinterpret_cast<Failure*>(segment_.data()); }

std::byte* Group::staging(int rank, uint32_t step) const {
  const size_t control_bytes = round_up(sizeof(Failure) + world_ * sizeof(Control), 4096);
  return segment_.data() + control_bytes + (2 * rank + (step & 1)) * options_.staging_bytes;
}

Group::Group(std::string name, int rank, Segment segment, const std::vector<RankIdentity>& ranks, GroupOptions options)
    : name_(std::move(name)),
      rank_(rank),
      world_(static_cast<int>(ranks.size())),
      forks_(forks.load()),
      segment_(std::move(segment)),
      options_(std::move(options)) {
  // A new segment is all zeros, which is the initial state of every flag and of the failure record.
  for (int peer = 0; peer < world_; ++peer)
    peers_.push_back(peer == rank_ ? nullptr : std::make_unique<Peer>(ranks[peer].pid, ranks[peer].start_time));
  Call(*this, CallHeader{CallKind::barrier}).exchange();
  calls_ = 0;  // joining is not a call of the user's
  segment_.close_descriptor();
}

void Group::rename(std::string name) {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  name_ = std::move(name);
}

void Group::inject(const InjectedFaults& faults) {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  faults_ = faults;
  fault_points_ = 0;
}

void Group::fault_point() {
  if (faults_.longest_delay_us == 0 && faults_.die_at_point == 0) return;
  ++fault_points_;
  if (faults_.die_at_point == fault_points_) raise(SIGKILL);
  if (faults_.longest_delay_us == 0) return;
  faults_.seed = faults_.seed * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
  usleep(static_cast<useconds_t>((faults_.seed >> 33) % (faults_.longest_delay_us + 1)));
}

std::vector<int> Group::lost_ranks() const {
  std::vector<int> lost;
  for (int peer = 0; peer < world_; ++peer)
    if (peer != rank_ && (control(peer).left.load(std::memory_order_acquire) != 0 || !peers_[peer]->alive()))
      lost.push_back(peer);
  return lost;
}

void Group::leave() {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  if (left_) return;
  left_ = true;
  control(rank_).left.store(1, std::memory_order_release);
  control(rank_).arrived.nudge();
}

void Group::raise_recorded_failure() const {
  if (failure().state.load(std::memory_order_acquire) == 2) raise_as(failure().kind, failure().text);
}

void Group::fail(int kind, const std::string& text) {
  uint32_t none = 0;
  Failure& record = failure();
  if (record.state.compare_exchange_strong(none, 1)) {
    record.kind = kind;
    strncpy(record.text, text.c_str(), sizeof record.text - 1);
    record.state.store(2, std::memory_order_release);
    for (int peer = 0; peer < world_; ++peer) control(peer).arrived.nudge();
  }
  raise_as(kind, text);
}

// Raises where a rank that the call still waits for has died, has left, or was named by another rank's failure.
void Group::check_peers(const Call& call) {
  raise_recorded_failure();
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || control(peer).arrived.reached(step_)) continue;
    const bool left = control(peer).left.load(std::memory_order_acquire) != 0;
    if (!left && peers_[peer]->alive()) continue;
    if (control(peer).arrived.reached(step_)) continue;  // it did its part of this exchange before it went
    const std::string who = "rank " + std::to_string(peer) + " (pid " + std::to_string(peers_[peer]->pid()) + ")";
    const std::string what = call.text() + " while rank " + std::to_string(rank_) + " waited for it";
    if (left) fail(rank_lost, who + " left the group before " + what + ".");
    fail(rank_lost, who + " died in or before " + what + ". Its exit status: " + peers_[peer]->exit_status() + ".");
  }
}

void Group::wait_for(int peer, const Call& call) {
  Flag& flag = control(peer).arrived;
  if (spin(flag, step_, spin_limit, options_.oversubscribed)) return;
  const auto deadline = Clock::now() + options_.timeout;
  while (!flag.sleep(step_, sleep_slice)) {
    check_peers(call);
    try {
      if (options_.on_slice) options_.on_slice();
    } catch (...) {  // the caller is interrupted (Ctrl-C): it will not finish this call, and the others must know
      try {
        fail(interrupted, "rank " + std::to_string(rank_) + " was interrupted in " + call.text() + ".");
      } catch (const CommError&) {
      }
      throw;
    }
    if (Clock::now() < deadline || flag.reached(step_)) continue;
    std::vector<int> silent;
    for (int other = 0; other < world_; ++other)
      if (!control(other).arrived.reached(step_)) silent.push_back(other);
    const auto seconds = std::chrono::duration<double>(options_.timeout).count();
    char after[32];
    snprintf(after, sizeof after, "%.3g", seconds);
    fail(timed_out, list_of(silent) + " did not arrive in " + call.text() + " within " + after + " s (rank " +
                        std::to_string(rank_) + " waited; the process is alive but silent).");
  }
}

Call::Call(Group& group, const CallHeader& header)
    : group_(group), lock_(group.one_call_at_a_time_), header_(header) {
  if (group_.forks_ != forks.load(std::memory_order_relaxed))
    throw CommError("group \"" + group_.name_ + "\" belongs to the process that this one was forked from; " +
                    "a forked child cannot take part in its collectives.");
  if (group_.left_) throw CommError("group \"" + group_.name_ + "\" was destroyed; create it again to use it.");
  ++group_.calls_;
  group_.raise_recorded_failure();
}

std::string Call::text() const {
  return std::string(call_names[static_cast<size_t>(header_.kind)]) + " #" + std::to_string(group_.calls_) +
         " on group \"" + group_.name_ + "\"";
}

std::byte* Call::next_staging() { return group_.staging(group_.rank_, group_.step_ + 1); }

const std::byte* Call::staged(int rank) const { return group_.staging(rank, group_.step_); }

void Call::exchange() {
  Group::Control& mine = group_.control(group_.rank_);
  const uint32_t step = group_.step_ + 1;
  if (!compared_) mine.headers[step & 1] = header_;  // 1 write
  group_.fault_point();
  group_.step_ = step;
  mine.arrived.raise_to(step);  // 2 publish
  for (int peer = 0; peer < group_.world_; ++peer)  // 3 wait
    if (!group_.control(peer).arrived.reached(step)) group_.wait_for(peer, *this);
  group_.fault_point();
  if (!compared_) compare_headers();
  compared_ = true;
}

void Call::compare_headers() const {
  const auto header_of = [this](int rank) -> const CallHeader& {
    return group_.control(rank).headers[group_.step_ & 1];
  };
  bool same = true;
  for (int rank = 0; rank < group_.world_; ++rank) same = same && header_of(rank) == header_;
  if (same) return;
  // Every rank sees the same headers, so every rank raises the same words.
  std::string text = "call #" + std::to_string(group_.calls_) + " on group \"" + group_.name_ + "\": ";
  std::vector<bool> told(group_.world_, false);
  for (int rank = 0; rank < group_.world_; ++rank) {
    if (told[rank]) continue;
    std::vector<int> agreeing;
    for (int other = rank; other < group_.world_; ++other)
      if (header_of(other) == header_of(rank)) agreeing.push_back(other), told[other] = true;
    text += (rank > 0 ? ", " : "") + list_of(agreeing) + " called " + header_of(rank).text();
  }
  throw CollectiveMismatchError(text + ".");
}

}  // namespace weft::shm
