// Collectives as each rank's threads run them: arguments, then numbered steps and the conditions that hold after each.
//
// With S bytes in the whole tensor and W ranks, a rank reads from its peers and writes to them:
//   all_reduce, one_shot     reads (W - 1) S                              two meetings
//   all_reduce, two_shot     reads (W - 1) S / W, writes (W - 1) S / W    two meetings
//   all_reduce, in place     reads (W - 1) S / W, writes (W - 1) S / W    three meetings, no staging
//   all_reduce, multimem     S / W through the switch each way            three meetings, no staging
//   reduce_scatter           reads (W - 1) S / W                          two meetings
//   all_gather               reads (W - 1) S / W                          two meetings
//
// Staging memory (a rank's workspace) is reused from call to call. One rule makes that safe for every next call,
// and for ranks far ahead or behind:
//   once a rank's launch has ended, no peer touches its staging memory until it has met the rank in the next launch.
// A launch first stages into its own memory only, so no rank writes memory that a peer may still read. Each body states
// how it keeps the rule at its end. Blocks with the same number meet, and a launch ends when all its blocks have ended.
// So a condition that holds between equal blocks of two ranks holds between the ranks.
//
// A rank that has given up stages nothing any more, so its staged data stays valid while others still read it. The user
// owns symmetric memory, and may change it as soon as the launch has ended, even if it gave up. A late peer could then
// sum new values and write the sum to all ranks. So all ranks meet a third time there, except a rank that gave up
// before. After an error the contents of symmetric memory are undefined: a late peer's sums may still arrive there.
//
// tests/cuda_on_threads runs these bodies on CPU threads, and also with each meeting left out in turn.
#pragma once
#include "flags.h"

namespace weft::cuda {

template <class T>
struct Addresses {
  T* at[most_ranks];
};

template <class T>
WEFT_ON_DEVICE T* staging(const Group& group, int rank) {
  return reinterpret_cast<T*>(group.workspace[rank]);
}

// Work after the barrier on any rank's stream sees everything written before it on every rank's stream.
struct Barrier {
  Group group;
  Call call;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    const bool going = meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
    meet(here, group, call, 2, Phase::confirmed, going);  // for the flags alone: see flags.h
  }
};

// Every rank reads the whole input of every rank. The source may be the destination.
template <class T>
struct AllReduceOneShot {
  Group group;
  Call call;
  const T* source;  // [count]
  T* destination;   // [count]
  size_t count;
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage the input, so that peers can read it.
    bool going = is_intact(here, group);
    if (going) copy_share(here, staging<T>(group, group.rank), source, count);
    // 2. Meet. This block's share of every rank's input is staged.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Reduce. A thread writes only elements that it staged itself, so the source may be overwritten.
    if (going) {
      const Share<T, Here> share(here, count);
      for (size_t at = share.first; at < count; at += share.stride) {
        const auto part = [&](int rank) { return staging<T>(group, rank) + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, epilogue);
        store(destination + at, sum, share.valid(at), is_aligned(destination));
      }
    }
    // 4. Meet. Every peer has read this rank's staging memory: the rule holds.
    if (!meet(here, group, call, 2, Phase::read, going)) spoil_share(here, destination, count);
  }
};

// Each rank reduces one slice and writes it to all ranks. The source may be the destination.
template <class T>
struct AllReduceTwoShot {
  Group group;
  Call call;
  const T* source;  // [count]
  T* destination;   // [count]
  size_t count;
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage.
    bool going = is_intact(here, group);
    for (int rank = 0; rank < group.world && going; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      copy_share(here, staging<T>(group, group.rank) + slice.begin, source + slice.begin, slice.count);
    }
    // 2. Meet. This block's share of every slice is staged on every rank.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Reduce this rank's slice into the staging memory of all ranks, over the inputs. No other rank reads this slice
    //    of them, and a thread overwrites only elements that it has read itself.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const auto part = [&](int rank) { return staging<T>(group, rank) + slice.begin + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, epilogue);
        for (int rank = 0; rank < group.world; ++rank) store(part(rank), sum, share.valid(at), true);
      }
    }
    // 4. Meet. Every peer has done all its reads and writes in this rank's staging memory, so the rule holds. Step 5
    //    reads only this rank's memory, so no third meeting is needed.
    going = meet(here, group, call, 2, Phase::reduced, going);
    // 5. Copy to the destination.
    for (int rank = 0; rank < group.world; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      if (going)
        copy_share(here, destination + slice.begin, staging<T>(group, group.rank) + slice.begin, slice.count);
      else
        spoil_share(here, destination + slice.begin, slice.count);
    }
  }
};

// In symmetric memory: each rank reduces one slice in place and writes it to all ranks. Nothing is staged.
template <class T>
struct AllReduceInPlace {
  Group group;
  Call call;
  Addresses<T> parts;  // [count] on each rank, as mapped here
  size_t count;
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Meet. Every rank's input is ready, and no rank's earlier work still uses it.
    bool going = meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
    // 2. Reduce this rank's slice, which no other rank reads or writes.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      bool wide = true;
      for (int rank = 0; rank < group.world; ++rank) wide = wide && is_aligned(parts.at[rank]);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const auto part = [&](int rank) { return parts.at[rank] + slice.begin + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), wide, epilogue);
        for (int rank = 0; rank < group.world; ++rank) store(part(rank), sum, share.valid(at), wide);
      }
    }
    // 3. Meet. Every slice of this rank's memory has been read and written.
    going = meet(here, group, call, 2, Phase::reduced, going);
    // 4. Meet. Every rank has passed step 3: none has given up earlier and changed its memory while others read it.
    if (meet(here, group, call, 3, Phase::confirmed, going)) return;
    for (int rank = 0; rank < group.world; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      spoil_share(here, parts.at[group.rank] + slice.begin, slice.count);
    }
  }
};

// In symmetric memory with a multicast address: the switch sums, in its own order and not in rank order. The switch
// rounds a 16-bit sum. If there is an average or a scale, the result is rounded once more.
template <class T>
struct AllReduceMultimem {
  Group group;
  Call call;
  T* multicast;  // [count], aligned to 16 bytes; its size is a multiple of 16 bytes
  T* own;        // this rank's memory by its own address, or nullptr
  size_t count;
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    if (!Here::has_multimem) return;  // code for earlier devices, which is never launched
    // 1. Meet. Every rank's input is ready.
    bool going = meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
    here.between_aliases();
    // 2. Reduce this rank's slice on all ranks.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const Packed<T> loaded = here.load_sum(multicast + slice.begin + at);
        float sums[per_pack<T>];
        WEFT_UNROLL
        for (int k = 0; k < per_pack<T>; ++k) sums[k] = Convert<T>::to_float(loaded.values[k]);
        here.store_to_all(multicast + slice.begin + at, finished<T>(sums, epilogue));
      }
    }
    here.between_aliases();
    // 3. and 4. Meet twice, as in AllReduceInPlace.
    going = meet(here, group, call, 2, Phase::reduced, going);
    if (meet(here, group, call, 3, Phase::confirmed, going)) return;
    for (int rank = 0; rank < group.world; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      if (own != nullptr) {
        spoil_share(here, own + slice.begin, slice.count);
        continue;
      }
      // Without its own address, a rank can only spoil the memory of all ranks. The call has failed on all of them.
      const Share<T, Here> share(here, slice.count);
      Packed<T> ones;
      __builtin_memset(&ones, 0xff, sizeof ones);
      for (size_t at = share.first; at < slice.count; at += share.stride)
        here.store_to_all(multicast + slice.begin + at, ones);
    }
  }
};

// Rank r gets the sum over ranks of part r. The destination may be this rank's part of the source.
template <class T>
struct ReduceScatter {
  Group group;
  Call call;
  Addresses<const T> parts;  // [counts[r]]: the part for rank r
  size_t counts[most_ranks];
  size_t part_elements;  // distance between parts in staging memory, a multiple of 16 bytes
  T* destination;        // [counts[rank]]
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage each part at the place where its reader expects it.
    bool going = is_intact(here, group);
    for (int rank = 0; rank < group.world && going; ++rank)
      copy_share(here, staging<T>(group, group.rank) + rank * part_elements, parts.at[rank], counts[rank]);
    // 2. Meet. This block's share of every part is staged on every rank.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Reduce this rank's part.
    const size_t count = counts[group.rank];
    if (going) {
      const Share<T, Here> share(here, count);
      for (size_t at = share.first; at < count; at += share.stride) {
        const auto part = [&](int rank) { return staging<T>(group, rank) + group.rank * part_elements + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, epilogue);
        store(destination + at, sum, share.valid(at), is_aligned(destination));
      }
    }
    // 4. Meet. Every peer has read this rank's staging memory: the rule holds.
    if (!meet(here, group, call, 2, Phase::read, going)) spoil_share(here, destination, count);
  }
};

// Every rank gets every rank's part. The source may be this rank's destination. T only gives the width of an element.
template <class T>
struct AllGather {
  Group group;
  Call call;
  const T* source;            // [counts[rank]]
  Addresses<T> destinations;  // [counts[r]] each
  size_t counts[most_ranks];

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage, and copy this rank's own part, which needs no other rank.
    bool going = is_intact(here, group);
    if (going) {
      copy_share(here, staging<T>(group, group.rank), source, counts[group.rank]);
      if (source != destinations.at[group.rank])
        copy_share(here, destinations.at[group.rank], source, counts[group.rank]);
    }
    // 2. Meet. This block's share of every rank's part is staged.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Gather. Each rank starts at the next rank, so that not all read from the same rank at once.
    if (going) {
      for (int step = 1; step < group.world; ++step) {
        const int rank = (group.rank + step) % group.world;
        copy_share(here, destinations.at[rank], staging<T>(group, rank), counts[rank]);
      }
    }
    // 4. Meet. Every peer has read this rank's staging memory: the rule holds.
    if (meet(here, group, call, 2, Phase::read, going)) return;
    for (int rank = 0; rank < group.world; ++rank)
      if (destinations.at[rank] != source) spoil_share(here, destinations.at[rank], counts[rank]);
  }
};

}  // namespace weft::cuda
