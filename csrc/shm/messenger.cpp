#include "messenger.h"

#include <algorithm>

#include "bytes.h"
#include "errors.h"
#include "group.h"

namespace weft::shm {

namespace {

constexpr size_t largest_ring_bytes = 64 << 10;
constexpr size_t smallest_ring_bytes = 4 << 10;
constexpr size_t rings_together_bytes = 8 << 20;
constexpr auto sleep_slice = std::chrono::milliseconds(10);
constexpr auto spin_limit = std::chrono::microseconds(50);

size_t padded(size_t bytes) { return (bytes + line_bytes - 1) / line_bytes * line_bytes; }

size_t ring_bytes_for(int world) {
  const size_t share = rings_together_bytes / (static_cast<size_t>(world) * world);
  return std::clamp(share / line_bytes * line_bytes, smallest_ring_bytes, largest_ring_bytes);
}

std::string text_of(const MessageHeader& header) {
  return std::string(name_of(header.dtype)) + ", " + std::to_string(header.count) + " elements, tag " +
         std::to_string(header.tag);
}

template <class Error>
std::exception_ptr error(const std::string& text) {
  return std::make_exception_ptr(Error(text));
}

}  // namespace

struct Channel {
  alignas(64) std::atomic<uint64_t> written;  // by the sender
  alignas(64) std::atomic<uint64_t> read;     // by the receiver

  std::byte* ring() { return reinterpret_cast<std::byte*>(this + 1); }

  void put(uint64_t offset, const void* source, size_t bytes, size_t ring_bytes) {
    const size_t begin = offset % ring_bytes, first = std::min(bytes, ring_bytes - begin);
    copy_bytes(ring() + begin, source, first);
    copy_bytes(ring(), static_cast<const std::byte*>(source) + first, bytes - first);
  }
  void get(uint64_t offset, void* target, size_t bytes, size_t ring_bytes) {
    const size_t begin = offset % ring_bytes, first = std::min(bytes, ring_bytes - begin);
    copy_bytes(target, ring() + begin, first);
    copy_bytes(static_cast<std::byte*>(target) + first, ring(), bytes - first);
  }
};

size_t Messenger::segment_bytes(int world) {
  return world * sizeof(Flag) + static_cast<size_t>(world) * world * (sizeof(Channel) + ring_bytes_for(world));
}

Messenger::Messenger(Group& group, std::byte* memory)
    : group_(group),
      memory_(memory),
      ring_bytes_(ring_bytes_for(group.world())),
      sends_(group.world()),
      incoming_(group.world()) {}

void Messenger::close() {
  decltype(finished_) ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    const auto destroyed = error<CommError>("the group was destroyed before this message had gone through.");
    for (auto& queue : sends_) {
      for (Send& send : queue) ended.emplace_back(send.work, destroyed);
      queue.clear();
    }
    for (Receive& receive : receives_) ended.emplace_back(receive.work, destroyed);
    receives_.clear();
    for (Incoming& message : incoming_) message.active = false;
  }
  nudge(group_.rank());
  if (thread_.joinable()) thread_.join();
  for (auto& [work, failure] : ended) work->finish(failure);
}

void Messenger::abandon() {
  if (thread_.joinable()) thread_.detach();
}

Channel& Messenger::channel(int from, int to) const {
  std::byte* channels = memory_ + group_.world() * sizeof(Flag);
  const size_t index = static_cast<size_t>(from) * group_.world() + to;
  return *reinterpret_cast<Channel*>(channels + index * (sizeof(Channel) + ring_bytes_));
}

Flag& Messenger::bell(int rank) const { return reinterpret_cast<Flag*>(memory_)[rank]; }

void Messenger::nudge(int rank) { bell(rank).ring(); }

std::shared_ptr<Work> Messenger::send(int destination, const void* data, const MessageHeader& header) {
  auto work = std::make_shared<Work>([this](Clock::duration patience) { help(patience); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    const auto now = Clock::now();
    sends_[destination].push_back({work, header, static_cast<const std::byte*>(data), 0, now, now + group_.timeout()});
  }
  post();
  return work;
}

std::shared_ptr<Work> Messenger::receive(int source, void* data, const MessageHeader& header, int* from) {
  auto work = std::make_shared<Work>([this](Clock::duration patience) { help(patience); });
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_open();
    const auto now = Clock::now();
    receives_.push_back(
        {work, header, static_cast<std::byte*>(data), source, from, false, now, now + group_.timeout()});
    const auto posted = std::prev(receives_.end());
    for (auto arrival = arrivals_.begin(); arrival != arrivals_.end(); ++arrival) {
      if (!arrival->whole || arrival->header.tag != header.tag) continue;
      if (source != any_rank && arrival->source != source) continue;
      if (arrival->header.bytes() == header.bytes()) copy_bytes(data, arrival->payload.data(), arrival->payload.size());
      deliver(posted, arrival->header, arrival->source);
      arrivals_.erase(arrival);
      break;
    }
  }
  post();
  return work;
}

std::optional<WaitingCall> Messenger::waiting() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::optional<WaitingCall> oldest;
  const auto now = Clock::now();
  const auto consider = [&](bool sent, int peer, const MessageHeader& header, Clock::time_point posted) {
    const double seconds = std::chrono::duration<double>(now - posted).count();
    if (oldest && oldest->seconds >= seconds) return;
    oldest = {(sent ? "send (" : "receive (") + text_of(header) + ") on group \"" + group_.name() + "\"", seconds, {}};
    for (int rank = 0; rank < group_.world(); ++rank)
      if (rank == peer || (peer == any_rank && rank != group_.rank())) oldest->missing.push_back(group_.label(rank));
  };
  for (int peer = 0; peer < group_.world(); ++peer)
    if (!sends_[peer].empty()) consider(true, peer, sends_[peer].front().header, sends_[peer].front().posted);
  if (!receives_.empty()) {
    const Receive& first = receives_.front();
    consider(false, first.source, first.header, first.posted);
  }
  return oldest;
}

void Messenger::check_open() const {
  if (closing_) throw CommError("the group was destroyed; create it again to use it.");
}

// Advances the posted operations as far as possible; the thread takes over the rest.
void Messenger::post() {
  decltype(finished_) finished;
  bool left = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    advance();
    finished.swap(finished_);
    left = busy();
    if (left && !thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  for (auto& [work, failure] : finished) work->finish(failure);
  if (left || !finished.empty()) nudge(group_.rank());
}

void Messenger::help(Clock::duration patience) {
  if (group_.forked()) throw CommError("a forked child cannot take part in its parent's messages.");
  Flag& local = bell(group_.rank());
  const uint32_t seen = local.value.load(std::memory_order_seq_cst);
  decltype(finished_) finished;
  bool moved = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    moved = advance();
    if (!moved) give_up_on_the_lost();
    finished.swap(finished_);
  }
  for (auto& [work, failure] : finished) work->finish(failure);
  if (!finished.empty()) nudge(group_.rank());  // a waiter for one of them may sleep at the bell
  if (moved || !finished.empty()) return;
  if (spin(local, seen + 1, spin_limit, group_.oversubscribed())) return;
  local.sleep(seen + 1, std::min<Clock::duration>(patience, sleep_slice));
}

void Messenger::run() {
  while (true) {
    const uint32_t seen = bell(group_.rank()).value.load(std::memory_order_seq_cst);
    decltype(finished_) finished;
    bool moved = false, waiting = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (closing_) return;
      moved = advance();
      if (!moved) give_up_on_the_lost();
      finished.swap(finished_);
      waiting = busy();
    }
    for (auto& [work, failure] : finished) work->finish(failure);
    if (!finished.empty()) nudge(group_.rank());  // a waiter for one of them may sleep at the bell
    if (moved || !finished.empty()) continue;
    // An idle thread sleeps until an operation is posted; a busy one also checks for lost ranks.
    bell(group_.rank()).sleep(seen + 1, waiting ? Clock::duration(sleep_slice) : std::chrono::seconds(1));
  }
}

bool Messenger::busy() const {
  return !receives_.empty() ||
         std::any_of(sends_.begin(), sends_.end(), [](const auto& queue) { return !queue.empty(); });
}

bool Messenger::advance() {
  if (group_.recorded_failure()) return false;  // a message abandoned half-way leaves its ring unreadable
  bool moved = false;
  for (int rank = 0; rank < group_.world(); ++rank) {
    moved |= advance_sends(rank);
    moved |= advance_receives(rank);
  }
  return moved;
}

bool Messenger::advance_sends(int destination) {
  auto& queue = sends_[destination];
  if (queue.empty()) return false;
  Channel& out = channel(group_.rank(), destination);
  uint64_t written = out.written.load(std::memory_order_relaxed);
  bool moved = false;
  while (!queue.empty()) {
    Send& send = queue.front();
    const uint64_t end = sizeof(MessageHeader) + padded(send.header.bytes());
    const size_t space = ring_bytes_ - (written - out.read.load(std::memory_order_acquire));
    if (space == 0) break;
    size_t bytes = 0;
    if (send.position == 0) {
      out.put(written, &send.header, sizeof send.header, ring_bytes_);
      bytes = sizeof send.header;
    } else {
      const uint64_t offset = send.position - sizeof(MessageHeader);
      bytes = std::min<uint64_t>(space, end - send.position);
      out.put(written, send.data + offset, std::min<uint64_t>(bytes, send.header.bytes() - offset), ring_bytes_);
    }
    send.position += bytes;
    written += bytes;
    out.written.store(written, std::memory_order_release);
    moved = true;
    if (send.position == end) {
      record(true, destination, send.header, send.posted);
      finished_.emplace_back(send.work, nullptr);
      queue.pop_front();
    }
  }
  if (moved) nudge(destination);
  return moved;
}

// Whether bytes from a rank (or any rank) are unread. Its message can still be read after the rank is gone.
bool Messenger::unread(int source) const {
  for (int peer = 0; peer < group_.world(); ++peer) {
    const Channel& in = channel(peer, group_.rank());
    if ((source == any_rank || source == peer) && in.written.load(std::memory_order_acquire) != in.read.load())
      return true;
  }
  return false;
}

bool Messenger::wanted(int source) const {
  return std::any_of(receives_.begin(), receives_.end(), [source](const Receive& receive) {
    return !receive.claimed && (receive.source == any_rank || receive.source == source);
  });
}

bool Messenger::advance_receives(int source) {
  Incoming& message = incoming_[source];
  if (!message.active && !wanted(source)) return false;
  Channel& in = channel(source, group_.rank());
  uint64_t read = in.read.load(std::memory_order_relaxed);
  bool moved = false;
  while (true) {
    const uint64_t available = in.written.load(std::memory_order_acquire) - read;
    if (available == 0) break;
    size_t bytes = 0;
    if (!message.active) {
      if (!wanted(source)) break;
      in.get(read, &message.header, sizeof message.header, ring_bytes_);
      bytes = sizeof message.header;
      start_message(source);
    } else {
      const uint64_t payload = message.header.bytes();
      bytes = std::min<uint64_t>(available, padded(payload) - message.position);
      in.get(read, message.target + message.position, std::min<uint64_t>(bytes, payload - message.position),
             ring_bytes_);
      message.position += bytes;
    }
    read += bytes;
    in.read.store(read, std::memory_order_release);
    moved = true;
    if (message.position == padded(message.header.bytes())) finish_message(source);
  }
  if (moved) nudge(source);
  return moved;
}

void Messenger::start_message(int source) {
  Incoming& message = incoming_[source];
  message.active = true;
  message.position = 0;
  message.receive = std::find_if(receives_.begin(), receives_.end(), [&](const Receive& receive) {
    return !receive.claimed && receive.header.tag == message.header.tag &&
           (receive.source == any_rank || receive.source == source);
  });
  message.expected = message.receive != receives_.end();
  if (message.expected) {
    message.receive->claimed = true;
    message.receive->source = source;  // from here on the receive depends on that rank only
  }
  if (message.expected && message.receive->header.bytes() == message.header.bytes()) {
    message.target = message.receive->data;
    message.arrival = arrivals_.end();
    return;
  }
  arrivals_.push_back({message.header, source, std::vector<std::byte>(message.header.bytes()), false});
  message.arrival = std::prev(arrivals_.end());
  message.target = message.arrival->payload.data();
}

void Messenger::finish_message(int source) {
  Incoming& message = incoming_[source];
  message.active = false;
  if (message.expected) {
    deliver(message.receive, message.header, source);
    if (message.arrival != arrivals_.end()) arrivals_.erase(message.arrival);  // did not fit; the receive failed
    return;
  }
  message.arrival->whole = true;
  // A receive may have been posted while the message was arriving.
  const auto receive = std::find_if(receives_.begin(), receives_.end(), [&](const Receive& posted) {
    return !posted.claimed && posted.header.tag == message.header.tag &&
           (posted.source == any_rank || posted.source == source);
  });
  if (receive == receives_.end()) return;
  if (receive->header.bytes() == message.header.bytes())
    copy_bytes(receive->data, message.arrival->payload.data(), message.arrival->payload.size());
  deliver(receive, message.header, source);
  arrivals_.erase(message.arrival);
}

// Completes a receive. The payload is in place, or does not fit, which is an error.
void Messenger::deliver(std::list<Receive>::iterator receive, const MessageHeader& header, int source) {
  if (receive->from != nullptr) *receive->from = source;
  std::exception_ptr failure;
  if (header.dtype != receive->header.dtype || header.count != receive->header.count) {
    const std::string text = "rank " + std::to_string(group_.label(source)) + " sent (" + text_of(header) +
                             ") to rank " + std::to_string(group_.label(group_.rank())) + " on group \"" +
                             group_.name() + "\", which receives (" + text_of(receive->header) + ").";
    failure = group_.record_failure(FailureKind::mismatched, text);
  } else {
    record(false, source, header, receive->posted);
  }
  finished_.emplace_back(receive->work, failure);
  receives_.erase(receive);
}

void Messenger::record(bool sent, int peer, const MessageHeader& header, Clock::time_point posted) {
  if (!group_.records()) return;
  group_.record({sent, peer, header.bytes(), header.tag, nanoseconds(posted), nanoseconds(Clock::now())});
}

// Ends operations that cannot complete: the peer is gone, the group has failed, or the time is over.
void Messenger::give_up_on_the_lost() {
  group_.wait_for_death();
  const std::exception_ptr failed = group_.recorded_failure();
  const auto now = Clock::now();
  const auto verdict = [&](int peer, bool sending, Clock::time_point deadline) -> std::exception_ptr {
    if (failed) return failed;
    const std::string name = peer == any_rank ? "every other rank" : "rank " + std::to_string(group_.label(peer));
    const std::string call = std::string(sending ? "a send to" : "a receive from") + " it by rank " +
                             std::to_string(group_.label(group_.rank())) + " on group \"" + group_.name() +
                             "\"";
    if (group_.lost(peer) && !(!sending && unread(peer)))
      return group_.record_failure(FailureKind::rank_lost, name + group_.how_it_ended(peer) + " before " + call + ".");
    if (now >= deadline)
      return group_.record_failure(FailureKind::timed_out, name + " did not take part in " + call + " in time.");
    return nullptr;
  };
  for (int peer = 0; peer < group_.world(); ++peer) {
    auto& queue = sends_[peer];
    while (!queue.empty()) {
      const std::exception_ptr end = verdict(peer, true, queue.front().deadline);
      if (!end) break;
      finished_.emplace_back(queue.front().work, end);
      queue.pop_front();
    }
  }
  for (auto receive = receives_.begin(); receive != receives_.end();) {
    const std::exception_ptr end = verdict(receive->source, false, receive->deadline);
    const auto next = std::next(receive);
    if (end) {
      for (Incoming& message : incoming_)
        if (message.active && message.expected && message.receive == receive) message.active = false;
      finished_.emplace_back(receive->work, end);
      receives_.erase(receive);
    }
    receive = next;
  }
}

}  // namespace weft::shm
