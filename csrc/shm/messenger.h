// Messages between two ranks of a group, over one byte ring per direction. The receiver matches tags.
//
//   sender                                            receiver
//   1 copy header and payload into free space         1 see unread bytes
//   2 publish `written`, ring the receiver's bell     2 at a header, choose the first posted receive of that tag, or a
//   3 wait at its own bell for space                    new buffer that a later receive takes
//                                                     3 copy the payload out, publish `read`, ring the sender's bell
//
// A message without a posted receive does not block later ones, once anything is received from that rank at all. A send
// is done when its bytes are in the ring.
//
// The thread that posts an operation advances it as far as possible. A thread that waits for one keeps advancing all of
// them. The messenger's own thread does the rest while the caller computes.
#pragma once
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "types.h"
#include "work.h"

namespace weft::shm {

class Group;
struct Channel;  // in shared memory: the ring of one direction between two ranks

constexpr int any_rank = -1;

// Header before a payload. It fills a cache line, so it never wraps round the ring.
struct alignas(64) MessageHeader {
  uint64_t count;
  DType dtype;
  uint32_t tag;

  size_t bytes() const { return count * size_of(dtype); }
};

// A call or message that waits for other ranks.
struct WaitingCall {
  std::string call;
  double seconds;
  std::vector<int> missing;  // labels of the ranks that have not come
};

class Messenger {
 public:
  static size_t segment_bytes(int world);

  // `memory` is shared and zero at first. It holds a bell for each rank, then the channels in order of (from, to).
  Messenger(Group& group, std::byte* memory);
  ~Messenger() { close(); }

  // The data must stay in place until the work is done.
  std::shared_ptr<Work> send(int destination, const void* data, const MessageHeader& header);
  // `source` may be any_rank. `from` receives the source's rank, and must live until the work is done.
  std::shared_ptr<Work> receive(int source, void* data, const MessageHeader& header, int* from);

  std::optional<WaitingCall> waiting();  // the message posted first that has not gone through

  void nudge(int rank);  // wakes all waiters of that rank, so that they check the group again
  void close();          // ends operations under way with an error; refuses later ones
  void abandon();        // for a forked child

 private:
  struct Send {
    std::shared_ptr<Work> work;
    MessageHeader header;
    const std::byte* data;
    uint64_t position;  // in the header and padded payload
    Clock::time_point posted, deadline;
  };
  struct Receive {
    std::shared_ptr<Work> work;
    MessageHeader header;
    std::byte* data;
    int source;
    int* from;
    bool claimed;
    Clock::time_point posted, deadline;
  };
  struct Arrival {  // a message that came before its receive or does not fit it
    MessageHeader header;
    int source;
    std::vector<std::byte> payload;
    bool whole;
  };
  struct Incoming {  // the message being read from one rank
    bool active = false;
    MessageHeader header;
    uint64_t position;  // in the padded payload
    std::byte* target;
    std::list<Receive>::iterator receive;
    std::list<Arrival>::iterator arrival;
    bool expected;
  };

  Channel& channel(int from, int to) const;
  Flag& bell(int rank) const;
  void check_open() const;
  void post();
  void help(Clock::duration patience);
  void run();
  bool advance();
  bool advance_sends(int destination);
  bool advance_receives(int source);
  void start_message(int source);
  void finish_message(int source);
  void deliver(std::list<Receive>::iterator receive, const MessageHeader& header, int source);
  void record(bool sent, int peer, const MessageHeader& header, Clock::time_point posted);
  bool unread(int source) const;
  bool wanted(int source) const;
  bool busy() const;
  void give_up_on_the_lost();

  Group& group_;
  std::byte* memory_;
  const size_t ring_bytes_;
  std::mutex mutex_;
  std::vector<std::deque<Send>> sends_;  // by destination
  std::list<Receive> receives_;          // in the order posted
  std::vector<Incoming> incoming_;       // by source
  std::list<Arrival> arrivals_;          // in order of arrival
  std::vector<std::pair<std::shared_ptr<Work>, std::exception_ptr>> finished_;  // to finish without the lock
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace weft::shm
