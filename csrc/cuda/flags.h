// Flags between ranks. Block b of one rank meets block b of every other rank, or gives up after a bounded wait.
//
// A signal pad holds one word for each block, meeting of a call, and rank. Rank r sets its word in a rank's pad by a
// store. The pad's owner waits for that and takes the word back to 0. So pads are zero whenever the ranks are idle, and
// no counter differs from call to call: a CUDA graph can replay the calls.
//
// A rank sets a word without a look at it: the word is 0, because every call has two meetings or more. Between two uses
// of a word the rank passes another meeting, and a peer comes to that only after it took all flags of the one before.
// So nothing crosses the link but stores, and no atomic does: links without native atomics (PCIe) will do.
//
// The value of a flag is the signature of the call. Its last two bits are the number of the meeting within the call.
// Ranks that make different calls notice at their first flag.
//
// After a meeting, a block sees everything that the same block of every other rank wrote before it. The setter's store
// releases and the taker's load acquires, both at system scope. A barrier of the block stands before and after.
//
// Every wait is bounded. A block that gives up marks its rank as broken, in words of its own pad that no peer uses (see
// mark). If it is the first, it writes the reason to the record. Later launches see the mark before they touch a flag
// or staging memory. They set no flag any more, so no peer mistakes stale data for new.
#pragma once
#include "pieces.h"

namespace weft::cuda {

// Parameters of every launch; the same from call to call.
struct Group {
  int rank, world, blocks;  // blocks: the largest number in a launch
  int small_blocks;         // the same for small tensors, which have boxes
  uint32_t* pads[most_ranks];
  char* workspace[most_ranks];
  int64_t* record;  // in host memory: see RecordField
  uint64_t timeout_ns;
};

// Codes in records; codes of the Triton kernels begin at 100.
enum class Operation : int {
  barrier = 1,
  all_reduce_one_shot,
  all_reduce_two_shot,
  all_reduce_in_place,
  all_reduce_multimem,
  reduce_scatter,
  all_gather,
  reduce_scatter_in_place,
  all_gather_in_place,
  all_gather_by_copies,
  all_reduce_low_latency,
  all_reduce_rms_norm,
};

// Events that a rank waits for.
enum class Phase : int { arrived = 21, staged, reduced, read, confirmed };

struct WaitName {
  int code;
  const char* name;
};

constexpr WaitName wait_names[] = {
    {static_cast<int>(Operation::barrier), "barrier"},
    {static_cast<int>(Operation::all_reduce_one_shot), "all_reduce (one_shot)"},
    {static_cast<int>(Operation::all_reduce_two_shot), "all_reduce (two_shot)"},
    {static_cast<int>(Operation::all_reduce_in_place), "all_reduce (in place)"},
    {static_cast<int>(Operation::all_reduce_multimem), "all_reduce (multimem)"},
    {static_cast<int>(Operation::reduce_scatter), "reduce_scatter"},
    {static_cast<int>(Operation::all_gather), "all_gather"},
    {static_cast<int>(Operation::reduce_scatter_in_place), "reduce_scatter (in place)"},
    {static_cast<int>(Operation::all_gather_in_place), "all_gather (in place)"},
    {static_cast<int>(Operation::all_gather_by_copies), "all_gather (by copies)"},
    {static_cast<int>(Operation::all_reduce_low_latency), "all_reduce (low_latency)"},
    {static_cast<int>(Operation::all_reduce_rms_norm), "all_reduce_rms_norm"},
    {static_cast<int>(Phase::arrived), "arrived"},
    {static_cast<int>(Phase::staged), "staged"},
    {static_cast<int>(Phase::reduced), "reduced"},
    {static_cast<int>(Phase::read), "read"},
    {static_cast<int>(Phase::confirmed), "confirmed"},
};

struct Call {
  Operation operation;
  uint32_t signature;  // its last two bits are zero; flags put the meeting there, from 1 on
};

// The record, which the Triton kernels write too. Python takes the fields and states from here (module.cpp), and checks
// that those of kernels/signal.py are the same.
struct RecordField {
  enum { state, rank, operation, phase, peer, block, seen, expected, claimed, count };
};
constexpr const char* record_fields[] = {"state", "rank", "operation", "phase",  "peer",
                                         "block", "seen", "expected",  "claimed"};
constexpr int record_words = 16;
static_assert(sizeof record_fields / sizeof *record_fields == RecordField::count && RecordField::count <= record_words);

// The reason of a failed wait, in the field `state`.
enum Why : int64_t { nothing, timed_out, mismatched, stopped_by_host };
constexpr const char* record_states[] = {"idle", "timed_out", "mismatched", "stopped"};

constexpr int most_meetings = 3;  // of a call, which has two or more
constexpr uint32_t broken = 1;
constexpr uint64_t look_every_ns = 100'000;  // between reads of the record: each takes longer than a whole meeting

WEFT_ON_BOTH constexpr size_t word_number(int world, int block, int meeting, int setter) {
  return (static_cast<size_t>(block) * most_meetings + meeting - 1) * world + setter;
}

WEFT_ON_BOTH uint32_t* word(const Group& group, int owner, int block, int meeting, int setter) {
  return group.pads[owner] + word_number(group.world, block, meeting, setter);
}

// Not 0 once this rank is broken.
WEFT_ON_BOTH uint32_t* mark(const Group& group, int block) { return word(group, group.rank, block, 1, group.rank); }

// Whether this block may begin. Threads may get different answers if another block gives up at the same time; the first
// meeting makes them agree.
template <class Here>
WEFT_ON_DEVICE bool is_intact(const Here& here, const Group& group) {
  return here.read(mark(group, here.block())) == 0;
}

// A wait for a peer's flag.
struct Wait {
  Phase phase;
  int peer;
  uint32_t* flag;
  uint32_t expected;
};

template <class Here>
WEFT_ON_DEVICE void give_up(Here& here, const Group& group, const Call& call, const Wait& wait, Why why,
                            uint32_t seen) {
  WEFT_ROLLED
  for (int block = 0; block < group.blocks; ++block) here.write(mark(group, block), broken);
  // One thread writes the fields, and the state after them. A state that the host set stays.
  if (here.read(group.record + RecordField::state) != nothing || !here.claim(group.record + RecordField::claimed)) return;
  here.write(group.record + RecordField::rank, group.rank);
  here.write(group.record + RecordField::operation, static_cast<int>(call.operation));
  here.write(group.record + RecordField::phase, static_cast<int>(wait.phase));
  here.write(group.record + RecordField::peer, wait.peer);
  here.write(group.record + RecordField::block, here.block());
  here.write(group.record + RecordField::seen, seen);
  here.write(group.record + RecordField::expected, wait.expected);
  if (here.read(group.record + RecordField::state) == nothing) here.publish(group.record + RecordField::state, why);
}

// The bound of a wait, from the first time that it is asked.
struct Patience {
  uint64_t start = 0, look = 0;

  // Returns the reason to give up, or nothing.
  template <class Here>
  WEFT_ON_DEVICE Why ends(Here& here, const Group& group) {
    const uint64_t now = here.now_ns();
    if (start == 0) start = now, look = now + look_every_ns;
    if (now - start > group.timeout_ns) return timed_out;
    if (now <= look) return nothing;
    look = now + look_every_ns;
    return here.read(group.record + RecordField::state) != nothing ? stopped_by_host : nothing;  // or another failed wait
  }
};

// Takes the flag back to 0 once it has the expected value; returns false if it has not in time.
template <class Here>
WEFT_ON_DEVICE bool comes_in_time(Here& here, const Group& group, const Call& call, const Wait& wait) {
  Patience patience;
  while (true) {
    const uint32_t seen = here.take(wait.flag, wait.expected);
    if (seen == wait.expected) return true;
    const Why why = seen != 0 ? mismatched : patience.ends(here, group);
    if (why != nothing) {
      give_up(here, group, call, wait, why, seen);
      return false;
    }
  }
}

// Returns once this block and the same block of every other rank have arrived. True for all threads; false for all if
// that did not happen, or if `going` was false for any thread.
template <class Here>
WEFT_ON_DEVICE bool meet(Here& here, const Group& group, const Call& call, int meeting, Phase phase, bool going) {
  if (!here.all(going)) return false;
  const uint32_t flag = call.signature | meeting;
  // 1. Set a flag at every peer.
  WEFT_ROLLED
  for (int peer = here.thread(); peer < group.world; peer += here.threads())
    if (peer != group.rank) here.set(word(group, peer, here.block(), meeting, group.rank), flag);
  // 2. Take every peer's flag, which leaves the word zero for the next call.
  WEFT_ROLLED
  for (int peer = here.thread(); peer < group.world; peer += here.threads()) {
    if (peer == group.rank || !going) continue;
    const Wait wait{phase, peer, word(group, group.rank, here.block(), meeting, peer), flag};
    going = comes_in_time(here, group, call, wait);
  }
  return here.all(going);
}

}  // namespace weft::cuda
