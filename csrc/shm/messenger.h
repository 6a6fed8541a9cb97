// Messages between two ranks of a group: one byte ring a direction, tags matched by the receiver.
//
//   sender                                            receiver
//   1 copy header and payload into free space         1 see bytes it has not read
//   2 publish `written`, ring the receiver's bell     2 at a header: the first posted receive of that tag, or else a
//   3 wait at its own bell for space                    buffer of its own, which a later receive takes
//                                                     3 copy the payload out, publish `read`, ring the sender's bell
//
// A message whose receive is not posted yet does not keep back those behind it, once anything is received from that
// rank at all. A send is done when its bytes are in the ring.
//
// Whoever posts an operation moves it on as far as it goes; whoever waits for one goes on moving; a thread of its own
// does the rest while the caller computes.
#pragma once
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "types.h"
#include "work.h"

namespace weft::shm {

class Group;
struct Channel;  // shared: the ring of one direction between two ranks

constexpr int any_rank = -1;

// What travels before a payload; a line of its own, so that a header never wraps round the ring.
struct alignas(64) MessageHeader {
  uint64_t count;
  DType dtype;
  uint32_t tag;

  size_t bytes() const { return count * size_of(dtype); }
};

class Messenger {
 public:
  static size_t segment_bytes(int world);

  // `memory` (shared, zero at first): a bell for each rank, then the channels in order of (from, to).
  Messenger(Group& group, std::byte* memory);
  ~Messenger() { close(); }

  // Data must stay where it is until the work is done.
  std::shared_ptr<Work> send(int destination, const void* data, const MessageHeader& header);
  // `source` may be any_rank; `from`, which names the source in the end, must live until then.
  std::shared_ptr<Work> receive(int source, void* data, const MessageHeader& header, int* from);

  void nudge(int rank);  // makes whoever waits at that rank look at the group again
  void close();          // what is not done ends with an error; later operations are refused
  void abandon();        // after a fork

 private:
  struct Send {
    std::shared_ptr<Work> work;
    MessageHeader header;
    const std::byte* data;
    uint64_t position;  // in header and padded payload
    Clock::time_point deadline;
  };
  struct Receive {
    std::shared_ptr<Work> work;
    MessageHeader header;
    std::byte* data;
    int source;
    int* from;
    bool claimed;
    Clock::time_point deadline;
  };
  struct Arrival {  // a message that came before its receive, or one that fits no receive
    MessageHeader header;
    int source;
    std::vector<std::byte> payload;
    bool whole;
  };
  struct Incoming {  // the message that is being read from one rank
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
  std::list<Arrival> arrivals_;          // in the order they came
  std::vector<std::pair<std::shared_ptr<Work>, std::exception_ptr>> finished_;  // to be told once the lock is free
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace weft::shm
