#include "group.h"

#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <system_error>

#include "collectives.h"
#include "handover.h"
#include "reduce.h"

namespace weft::shm {

namespace {

constexpr auto spin_limit = std::chrono::microseconds(100);
constexpr auto sleep_slice = std::chrono::milliseconds(10);  // a lost rank is noticed after at most this time
constexpr size_t page_bytes = 4096;

// Number of forks between the first process and this one. A child has its parent's mappings but is no rank.
std::atomic<uint32_t> forks{0};
const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

std::exception_ptr failure_of(FailureKind kind, const std::string& text) {
  switch (kind) {
    case FailureKind::rank_lost:
      return std::make_exception_ptr(RankLostError(text));
    case FailureKind::timed_out:
      return std::make_exception_ptr(CollectiveTimeoutError(text));
    case FailureKind::mismatched:
      return std::make_exception_ptr(CollectiveMismatchError(text));
    default:
      return std::make_exception_ptr(CommError(text));
  }
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// The time at which the call that this thread runs was submitted, if it runs beside the program; else 0.
thread_local int64_t submitted_ns = 0;

struct Submitted {
  explicit Submitted(int64_t time) { submitted_ns = time; }
  ~Submitted() { submitted_ns = 0; }
};

template <class Record>
void keep(std::deque<Record>& last_ones, const Record& record, size_t kept) {
  last_ones.push_back(record);
  while (last_ones.size() > kept) last_ones.pop_front();
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Copies from the memory of another process. Returns an errno; 0 is success.
int read_process(pid_t pid, void* destination, uint64_t address, size_t bytes) {
  auto* to = static_cast<std::byte*>(destination);
  while (bytes > 0) {
    const iovec here{to, bytes}, there{reinterpret_cast<void*>(address), bytes};
    const ssize_t copied = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (copied < 0 && errno == EINTR) continue;
    if (copied <= 0) return copied < 0 ? errno : EFAULT;
    to += copied;
    address += static_cast<uint64_t>(copied);
    bytes -= static_cast<size_t>(copied);
  }
  return 0;
}

}  // namespace

struct Group::Control {
  Flag arrived;
  alignas(64) CallHeader headers[2];
  alignas(64) std::atomic<uint32_t> left;
};

// Record of the group's first failure, which every rank raises. A rank that raises does not answer again, so the others
// must not wait for it.
struct Group::Failure {
  alignas(64) std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
  FailureKind kind;
  char text[1008];
};

bool CallHeader::operator==(const CallHeader& other) const {
  return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && count == other.count &&
         layout == other.layout && fusion == other.fusion && purpose.hash == other.purpose.hash;
}

Purpose::Purpose(const std::string& whole) : hash(whole.empty() ? 0 : std::hash<std::string>()(whole) | 1) {
  snprintf(text, sizeof text, "%s", whole.c_str());
}

Purpose& Purpose::of_this_thread() {
  thread_local Purpose purpose;
  return purpose;
}

std::string CallHeader::text(const Group& group) const {
  std::string text = name_of(kind);
  const std::string end = purpose.hash == 0 ? ")" : std::string(") for ") + purpose.text;
  if (kind == CallKind::barrier) return text + "(" + end;
  text += std::string("(") + name_of(dtype);
  if (kind == CallKind::all_to_all) return text + end;
  text += ", " + std::to_string(count) + " elements";
  if (kind == CallKind::all_reduce || kind == CallKind::reduce_scatter || kind == CallKind::reduce)
    text += std::string(", ") + name_of(op);
  const bool from_root = kind == CallKind::broadcast || kind == CallKind::scatter;
  if (from_root || kind == CallKind::reduce || kind == CallKind::gather)
    text += (from_root ? ", from rank " : ", to rank ") + std::to_string(group.label(root));
  if (fusion.used) {
    char fused[64];
    snprintf(fused, sizeof fused, ", as %s, scaled by %.6g%s", name_of(fusion.wire), fusion.scale,
             fusion.measured ? ", measured" : "");
    text += fused;
  }
  if (layout != 0) {
    char hash[32];
    snprintf(hash, sizeof hash, ", split %08x", static_cast<unsigned>(layout ^ (layout >> 32)));
    text += hash;
  }
  return text + end;
}

// The segment holds the failure record and controls, the messenger's part, and the staging buffers, each on its own
// pages. A new segment is all zeros, which is the initial state of all of them.
size_t Group::segment_bytes(int world, size_t staging_bytes) {
  return round_up(sizeof(Failure) + world * sizeof(Control), page_bytes) +
         round_up(Messenger::segment_bytes(world), page_bytes) + 2 * world * staging_bytes;
}

void Group::reserve(Segment& segment, int rank, int world, size_t staging_bytes) {
  const size_t head_bytes = segment_bytes(world, 0);
  if (rank == 0) segment.reserve(0, head_bytes);
  segment.reserve(head_bytes + 2 * rank * staging_bytes, 2 * staging_bytes);
}

Group::Control& Group::control(int rank) const {
  return reinterpret_cast<Control*>(segment_.data() + sizeof(Failure))[rank];
}

Group::Failure& Group::failure() const { return *reinterpret_cast<Failure*>(segment_.data()); }

std::byte* Group::staging(int rank, uint32_t step) const { return staging_ + (2 * rank + (step & 1)) * staging_bytes(); }

Group::Group(std::string name, int rank, Segment segment, const std::vector<RankIdentity>& ranks, GroupOptions options)
    : names_{std::move(name)},
      name_(&names_.front()),
      rank_(rank),
      world_(static_cast<int>(ranks.size())),
      forks_(forks.load()),
      segment_(std::move(segment)),
      options_(std::move(options)),
      timeout_(options_.timeout),
      threads_(options_.threads),
      queue_(std::make_shared<Queue>()) {
  if (options_.staging_bytes % page_bytes != 0 || options_.staging_bytes < 64 * static_cast<size_t>(world_))
    throw std::invalid_argument("staging buffers of " + std::to_string(options_.staging_bytes) +
                                " bytes: they must be a multiple of 4096 and at least 64 a rank");
  std::byte* messages = segment_.data() + round_up(sizeof(Failure) + world_ * sizeof(Control), page_bytes);
  staging_ = messages + round_up(Messenger::segment_bytes(world_), page_bytes);
  messenger_ = std::make_unique<Messenger>(*this, messages);
  int peer = 0;
  try {
    reduce_table();  // throws for a WEFT_ISA that does not run here
    for (; peer < world_; ++peer)
      peers_.push_back(peer == rank_ ? nullptr : Peer::of(ranks[peer].key));
  } catch (const std::exception& error) {  // the other ranks have the segment already and wait for this one
    const auto* refused = dynamic_cast<const std::system_error*>(&error);
    const bool peer_has_gone = refused != nullptr && refused->code().value() == ESRCH;
    const std::string joining = " group \"" + this->name() + "\"";
    if (peer_has_gone)
      record_failure(FailureKind::rank_lost, "rank " + std::to_string(label(peer)) + " (pid " +
                                                 std::to_string(ranks[peer].pid) + ") died before it joined" + joining +
                                                 " (rank " + std::to_string(label(rank_)) + " waited).");
    else
      record_failure(FailureKind::interrupted,
                     "rank " + std::to_string(label(rank_)) + " could not join" + joining + ": " + error.what());
    throw;
  }
  options_.single_copy = reads_all_peers();
  calls_ = 0;  // joining does not count as a call of the user
  segment_.close_descriptor();
}

Group::~Group() {
  if (forked()) {  // the threads and the membership belong to the parent
    queue_->abandon();
    messenger_->abandon();
    threads_.abandon();
    new std::shared_ptr<Queue>(std::move(queue_));  // never destroyed
    messenger_.release();
    return;
  }
  leave();
  queue_->close();  // if it was left inside of one of its calls
}

void Group::rename(std::string name) {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  names_.push_front(std::move(name));
  name_.store(&names_.front());
}

void Group::inject(const InjectedFaults& faults) {
  const std::lock_guard<std::mutex> lock(one_call_at_a_time_);
  faults_ = faults;
  fault_points_ = 0;
}

void Group::fault_point() {
  if (faults_.longest_delay_us == 0 && faults_.die_at_point == 0) return;
  if (Threads::on_one_of_them()) return;
  ++fault_points_;
  if (faults_.die_at_point == fault_points_) raise(SIGKILL);
  if (faults_.longest_delay_us == 0) return;
  faults_.seed = faults_.seed * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
  usleep(static_cast<useconds_t>((faults_.seed >> 33) % (faults_.longest_delay_us + 1)));
}

void Group::wait_for_death() const {
  if (!faults_.wait_for_death) return;
  const auto deadline = Clock::now() + options_.timeout;
  while (lost_ranks().empty() && Clock::now() < deadline) usleep(1000);
}

void Group::check_usable() const {
  if (forked())
    throw CommError("group \"" + name() +
                    "\" belongs to the process that this one was forked from; a forked child cannot take part in its "
                    "collectives.");
  if (left_.load()) throw CommError("group \"" + name() + "\" was destroyed; create it again to use it.");
  check_recorded();
}

void Group::check_recorded() const {
  if (const std::exception_ptr failed = recorded_failure()) std::rethrow_exception(failed);
}

std::shared_ptr<Work> Group::submit(std::function<void()> call) {
  check_usable();
  const int64_t now = records() ? nanoseconds(Clock::now()) : 0;
  return queue_->submit([call = std::move(call), purpose = Purpose::of_this_thread(), now] {
    const PurposeOfThread meanwhile(purpose);  // a thread that waits may run it, and has a purpose of its own
    const Submitted here(now);
    call();
  });
}

Messenger& Group::messenger() {
  check_usable();
  return *messenger_;
}

void Group::run_behind_the_queue(std::function<void()> call) {
  const std::shared_ptr<Work> work = submit([call = std::move(call)] {
    const Submitted waited(0);
    call();
  });
  try {
    work->wait(std::nullopt, options_.on_slice);
  } catch (...) {
    if (!work->done()) {  // interrupted: the call must end before its memory is freed
      record_failure(FailureKind::interrupted,
                     "rank " + std::to_string(label(rank_)) + " was interrupted in a call on group \"" + name() +
                         "\".");
      try {
        work->wait(std::nullopt, nullptr);
      } catch (const std::exception&) {
      }
    }
    throw;
  }
}

bool Group::lost(int peer) const {
  if (peer == any_rank) return lost_ranks().size() + 1 == static_cast<size_t>(world_);
  if (peer == rank_) return false;
  return control(peer).left.load(std::memory_order_acquire) != 0 || !peers_[peer]->alive();
}

std::string Group::how_it_ended(int peer) const {
  if (peer == any_rank) return " has ended";
  if (control(peer).left.load(std::memory_order_acquire) != 0) return " left the group";
  const pid_t pid = peers_[peer]->pid();
  const std::string process = pid == 0 ? "in another process namespace" : "pid " + std::to_string(pid);
  return " (" + process + ", exit status: " + peers_[peer]->exit_status() + ") died";
}

std::vector<int> Group::lost_ranks() const {
  std::vector<int> lost_ones;
  for (int peer = 0; peer < world_; ++peer)
    if (lost(peer)) lost_ones.push_back(peer);
  return lost_ones;
}

std::exception_ptr Group::recorded_failure() const {
  const Failure& record = failure();
  if (record.state.load(std::memory_order_acquire) != 2) return nullptr;
  return failure_of(record.kind, record.text);
}

std::exception_ptr Group::record_failure(FailureKind kind, const std::string& text) {
  uint32_t none = 0;
  Failure& record = failure();
  if (record.state.compare_exchange_strong(none, 1)) {
    record.kind = kind;
    strncpy(record.text, text.c_str(), sizeof record.text - 1);
    record.state.store(2, std::memory_order_release);
    for (int peer = 0; peer < world_; ++peer) {
      control(peer).arrived.nudge();
      messenger_->nudge(peer);
    }
    return failure_of(kind, text);
  }
  // Another rank was first. Its record is readable soon, unless the writer died while writing.
  for (int tries = 0; tries < 1000; ++tries) {
    if (const std::exception_ptr first = recorded_failure()) return first;
    usleep(10);
  }
  return failure_of(kind, text);
}

bool Group::forked() const { return forks_ != forks.load(std::memory_order_relaxed); }

void Group::abort() {
  if (forked()) return;
  record_failure(FailureKind::interrupted,
                 "rank " + std::to_string(label(rank_)) + " aborted group \"" + name() + "\".");
}

void Group::leave() {
  if (forked() || left_.exchange(true)) return;
  if (!one_call_at_a_time_.try_lock())
    abort();  // a call is under way
  else
    one_call_at_a_time_.unlock();
  if (!queue_->idle()) abort();
  control(rank_).left.store(1, std::memory_order_release);
  control(rank_).arrived.nudge();
  for (int peer = 0; peer < world_; ++peer) messenger_->nudge(peer);
  queue_->close();  // does not wait long: a call under way was aborted
  messenger_->close();
}

// Returns whether every rank can read the memory of every other: Yama, a seccomp filter or a user namespace may forbid it.
bool Group::reads_all_peers() {
  const uint64_t secret = static_cast<uint64_t>(Clock::now().time_since_epoch().count());
  struct Trial {
    uint64_t secret, address;
  };
  Call call(*this, CallHeader{CallKind::barrier});
  *reinterpret_cast<Trial*>(call.next_staging()) = {secret, reinterpret_cast<uint64_t>(&secret)};
  call.exchange();
  uint64_t reads_all = options_.single_copy;
  for (int peer = 0; peer < world_ && reads_all != 0; ++peer) {
    const auto* trial = reinterpret_cast<const Trial*>(call.staged(peer));
    uint64_t found = 0;
    if (peer != rank_ && (read_process(peers_[peer]->pid(), &found, trial->address, sizeof found) != 0 ||
                          found != trial->secret))
      reads_all = 0;
  }
  memcpy(call.next_staging(), &reads_all, sizeof reads_all);
  call.exchange();
  for (int peer = 0; peer < world_; ++peer) {
    uint64_t theirs;
    memcpy(&theirs, call.staged(peer), sizeof theirs);
    reads_all &= theirs;
  }
  return reads_all != 0;
}

// Raises if the group has failed, or if a rank that the call still waits for has died or left.
void Group::check_peers(const Call& call) {
  check_recorded();
  for (int peer = 0; peer < world_; ++peer) {
    if (control(peer).arrived.reached(step_) || !lost(peer)) continue;
    if (control(peer).arrived.reached(step_)) continue;  // it completed its part of this exchange before it ended
    const std::string text = "rank " + std::to_string(label(peer)) + how_it_ended(peer) + " in or before " +
                             call.text() + " while rank " + std::to_string(label(rank_)) + " waited for it.";
    std::rethrow_exception(record_failure(FailureKind::rank_lost, text));
  }
}

void Group::wait_for(int peer, const Call& call) {
  Flag& flag = control(peer).arrived;
  const bool in_background = queue_->on_thread();  // the caller computes on this core, so do not spin
  if (!spin(flag, step_, spin_limit, options_.oversubscribed || in_background)) sleep_for(flag, call, in_background);
}

void Group::sleep_for(Flag& flag, const Call& call, bool in_background) {
  const auto deadline = Clock::now() + timeout();
  struct Shown {  // to `waiting`, which is asked by another thread
    Group& group;
    explicit Shown(Group& shown, const Call& call) : group(shown) {
      const std::lock_guard<std::mutex> lock(group.waiting_mutex_);
      group.waiting_ = &call, group.waiting_since_ = Clock::now();
    }
    ~Shown() {
      const std::lock_guard<std::mutex> lock(group.waiting_mutex_);
      group.waiting_ = nullptr;
    }
  };
  std::optional<Shown> shown;
  while (!flag.sleep(step_, sleep_slice)) {
    if (!shown) shown.emplace(*this, call);
    check_peers(call);
    try {
      if (options_.on_slice && !in_background) options_.on_slice();
    } catch (...) {  // the caller is interrupted (Ctrl-C) and will not finish this call; the others must know
      const std::exception_ptr failed = record_failure(
          FailureKind::interrupted, "rank " + std::to_string(label(rank_)) + " was interrupted in " + call.text() + ".");
      if (Queue::hand_over(std::current_exception())) std::rethrow_exception(failed);
      throw;
    }
    if (Clock::now() < deadline || flag.reached(step_)) continue;
    std::vector<int> silent;
    for (int other = 0; other < world_; ++other)
      if (!control(other).arrived.reached(step_)) silent.push_back(label(other));
    char after[32];
    snprintf(after, sizeof after, "%.3g", std::chrono::duration<double>(timeout()).count());
    std::rethrow_exception(record_failure(
        FailureKind::timed_out, list_of(silent) + " did not arrive in " + call.text() + " within the timeout of " + after +
                                    " s (rank " + std::to_string(label(rank_)) + " waited; the process is alive but silent)."));
  }
}

uint64_t Group::place_of(const void* data, size_t bytes, std::shared_ptr<Region>* region) const {
  const auto* address = static_cast<const std::byte*>(data);
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  for (const std::weak_ptr<Region>& known : regions_) {
    std::shared_ptr<Region> candidate = known.lock();
    if (!candidate) continue;
    const std::byte* local = candidate->part(rank_);
    if (address < local || address + bytes > local + candidate->bytes) continue;
    *region = candidate;
    return candidate->first_place + (address - local);
  }
  return 0;
}

std::shared_ptr<Region> Group::create_region(size_t bytes) {
  struct Offer {
    uint64_t creator = 0;
    int64_t descriptor = -1;
    int64_t bytes = 0;
    int64_t error = 0;
  } offer;
  const size_t part_bytes = round_up(std::max<size_t>(bytes, 1), page_bytes);
  std::unique_ptr<Segment> segment;
  std::string reason;
  // 1 every rank asks for the same size; 2 rank 0 makes it; 3 the others map it; 4 all ranks exchange their errors.
  int64_t wanted = static_cast<int64_t>(bytes);
  std::vector<int64_t> all(world_);
  std::vector<void*> places;
  for (int64_t& answer : all) places.push_back(&answer);
  const std::vector<size_t> ones(world_, 1);
  shm::all_gather(*this, &wanted, places, ones, DType::int64);
  for (int peer = 0; peer < world_; ++peer)
    if (all[peer] != all[0])
      throw CollectiveMismatchError("empty_symmetric on group \"" + name() + "\": rank 0 asks for " +
                                    std::to_string(all[0]) + " bytes, rank " + std::to_string(peer) + " for " +
                                    std::to_string(all[peer]) + ".");
  if (bytes > SIZE_MAX / 2 / world_ - page_bytes)  // the total size would overflow
    throw_errno(ENOMEM, "no machine has " + std::to_string(bytes) + " bytes of symmetric memory for each of " +
                            std::to_string(world_) + " ranks");
  if (rank_ == 0) {
    try {
      segment = std::make_unique<Segment>(Segment::create(part_bytes * world_));
      offer = {process_key(), segment->descriptor(), static_cast<int64_t>(part_bytes), 0};
    } catch (const std::system_error& error) {
      offer.error = error.code().value();
      reason = error.what();
    }
  }
  shm::broadcast(*this, &offer, sizeof offer, DType::uint8, 0);
  int64_t error = offer.error;
  if (error == 0 && rank_ != 0) {
    try {
      segment = std::make_unique<Segment>(
          Segment::open(offer.creator, static_cast<int>(offer.descriptor), part_bytes * world_));
    } catch (const std::system_error& failed) {
      error = failed.code().value();
      reason = failed.what();
    }
  }
  if (error == 0) {
    try {
      segment->reserve(part_bytes * rank_, part_bytes);
    } catch (const std::system_error& failed) {
      error = failed.code().value();
      reason = failed.what();
    }
  }
  shm::all_gather(*this, &error, places, ones, DType::int64);
  for (int peer = 0; peer < world_; ++peer)
    if (all[peer] != 0)
      throw_errno(static_cast<int>(all[peer]), "rank " + std::to_string(label(peer)) + " could not get " +
                                                   std::to_string(part_bytes * world_) +
                                                   " bytes of symmetric memory on group \"" + name() + "\" " + reason);
  segment->close_descriptor();
  auto region = std::make_shared<Region>(std::move(*segment), part_bytes, rank_, next_place_);
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  next_place_ += part_bytes;
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [](const auto& known) { return known.expired(); }),
                 regions_.end());
  regions_.push_back(region);
  return region;
}

Call::Call(Group& group, const CallHeader& header) : group_(group), header_(header) {
  header_.purpose = Purpose::of_this_thread();
  group_.check_usable();  // before the lock: in a forked child no thread may be left to release it
  lock_ = std::unique_lock<std::mutex>(group_.one_call_at_a_time_);
  group_.check_usable();  // again, because the group may have been left while this call waited for the lock
  const uint64_t number = ++group_.calls_;
  if (!group_.records()) return;
  recorded_ = true;
  const CallRecord record{number, header.kind, header.dtype, header.count, submitted_ns, nanoseconds(Clock::now())};
  const std::lock_guard<std::mutex> lock(group_.records_mutex_);
  keep(group_.last_calls_, record, group_.kept_);
}

Call::~Call() {
  if (recorded_ && std::uncaught_exceptions() <= exceptions_) group_.record_time(&CallRecord::ended_ns);
}

void Call::record_count(uint64_t elements) {
  if (!recorded_) return;
  const std::lock_guard<std::mutex> lock(group_.records_mutex_);
  if (!group_.last_calls_.empty() && group_.last_calls_.back().number == group_.calls_)
    group_.last_calls_.back().count = elements;
}

size_t Group::record_calls(size_t kept) {
  const std::lock_guard<std::mutex> lock(records_mutex_);
  last_calls_.clear();
  last_messages_.clear();
  return kept_.exchange(kept);
}

void Group::record_time(int64_t CallRecord::*moment) {
  const int64_t now = nanoseconds(Clock::now());
  const std::lock_guard<std::mutex> lock(records_mutex_);
  if (!last_calls_.empty() && last_calls_.back().number == calls_) last_calls_.back().*moment = now;
}

void Group::record(const MessageRecord& message) {
  const std::lock_guard<std::mutex> lock(records_mutex_);
  keep(last_messages_, message, kept_);
}

std::optional<WaitingCall> Group::waiting() const {
  const std::lock_guard<std::mutex> lock(waiting_mutex_);
  if (waiting_ == nullptr) return messenger_->waiting();
  WaitingCall found{waiting_->text(), std::chrono::duration<double>(Clock::now() - waiting_since_).count(), {}};
  for (int peer = 0; peer < world_; ++peer)  // the step does not change while the call waits
    if (!control(peer).arrived.reached(step_)) found.missing.push_back(label(peer));
  return found;
}

std::vector<CallRecord> Group::last_calls() const {
  const std::lock_guard<std::mutex> lock(records_mutex_);
  return {last_calls_.begin(), last_calls_.end()};
}

std::vector<MessageRecord> Group::last_messages() const {
  const std::lock_guard<std::mutex> lock(records_mutex_);
  return {last_messages_.begin(), last_messages_.end()};
}

std::string Call::text() const {
  return std::string(name_of(header_.kind)) + " #" + std::to_string(group_.calls_) +
         " on group \"" + group_.name() + "\"" + (header_.purpose.hash == 0 ? "" : " for ") + header_.purpose.text;
}

std::byte* Call::next_staging() { return group_.staging(group_.rank_, group_.step_ + 1); }

const std::byte* Call::staged(int rank) const { return group_.staging(rank, group_.step_); }

const CallHeader& Call::header_of(int rank) const { return group_.control(rank).headers[announced_ & 1]; }

void Call::exchange() {
  Group::Control& local = group_.control(group_.rank_);
  const uint32_t step = group_.step_ + 1;
  const bool first = !announced_known_;
  if (first) {
    local.headers[step & 1] = header_;  // 1 write
    announced_ = step;
    announced_known_ = true;
  }
  group_.fault_point();
  group_.step_ = step;
  local.arrived.raise_to(step);                     // 2 publish
  for (int peer = 0; peer < group_.world_; ++peer)  // 3 wait
    if (!group_.control(peer).arrived.reached(step)) group_.wait_for(peer, *this);
  if (first && recorded_) group_.record_time(&CallRecord::met_ns);
  group_.fault_point();
  if (reads_in_place_) group_.check_recorded();
  if (first) compare_headers();
}

bool Call::same_place() const {
  for (int rank = 0; rank < group_.world_; ++rank)
    if (header_of(rank).place != header_.place) return false;
  return header_.place != 0;
}

void Call::read_memory(int rank, void* destination, uint64_t address, size_t bytes) const {
  group_.fault_point();
  const int error = read_process(group_.peers_[rank]->pid(), destination, address, bytes);
  if (error == 0) return;
  group_.check_recorded();
  // A process that ends has no memory a little before it is seen to have ended.
  for (int ms = 0; error == ESRCH && ms < 1000 && !group_.lost(rank); ++ms) usleep(1000);
  const bool lost = group_.lost(rank);
  const std::string what = lost ? group_.how_it_ended(rank)
                                : std::string(": its memory could not be read (") + strerror(error) + ")";
  std::rethrow_exception(group_.record_failure(
      lost ? FailureKind::rank_lost : FailureKind::interrupted,
      "rank " + std::to_string(group_.label(rank)) + what + " in " + text() + " while rank " +
          std::to_string(group_.label(group_.rank_)) + " copied from it."));
}

void Call::compare_headers() const {
  bool same = true;
  for (int rank = 0; rank < group_.world_; ++rank) same = same && header_of(rank) == header_;
  if (same) return;
  // Every rank sees the same headers, so every rank raises the same text.
  std::string text = "call #" + std::to_string(group_.calls_) + " on group \"" + group_.name() + "\": ";
  std::vector<bool> named(group_.world_, false);
  for (int rank = 0; rank < group_.world_; ++rank) {
    if (named[rank]) continue;
    std::vector<int> agreeing;
    for (int other = rank; other < group_.world_; ++other)
      if (header_of(other) == header_of(rank)) agreeing.push_back(group_.label(other)), named[other] = true;
    text += (rank > 0 ? ", " : "") + list_of(agreeing) + " called " + header_of(rank).text(group_);
  }
  throw CollectiveMismatchError(text + ".");
}

}  // namespace weft::shm
