// The collectives as each rank's threads run them: arguments, then numbered steps with what holds after each.
//
// With S bytes in the whole tensor and W ranks, a rank reads from its peers and writes to them:
//   all_reduce, one_shot     reads (W - 1) S                              two meetings
//   all_reduce, two_shot     reads (W - 1) S / W, writes (W - 1) S / W    two meetings
//   all_reduce, in place     reads (W - 1) S / W, writes (W - 1) S / W    three meetings, nothing is staged
//   all_reduce, multimem     S / W through the switch each way            three meetings, nothing is staged
//   reduce_scatter           reads (W - 1) S / W                          two meetings
//   all_gather               reads (W - 1) S / W                          two meetings
//
// Staging memory (a rank's workspace) is reused from call to call. What makes that right, whatever call comes next and
// however far ahead or behind a rank is:
//   when a rank's launch has ended, no peer touches its staging memory, until it has met the rank in the next one.
// A launch begins by staging into its own memory only, so no rank ever writes what a peer may still read. Each body
// says how it leaves the rule true at its end. Blocks with the same number meet, and a launch ends when all its blocks
// have, so what each block knows of its peers' blocks of its number, the rank knows of its peers.
//
// Once a rank has given up, it stages nothing any more, so what it staged stays what it was while others still read it.
// Symmetric memory is the user's, who may change it as soon as the launch has ended, also if it gave up: a late peer
// could sum new values and hand that out. So there all ranks meet a third time, which a rank that gave up before does
// not. After an error the contents of symmetric memory are undefined: a late peer's sums may still arrive there.
//
// tests/cuda_on_threads runs these bodies on CPU threads, with each meeting left out in turn.
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

// Everything that was written on any rank's stream before is seen by what comes after on every rank's.
struct Barrier {
  Group group;
  Call call;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
  }
};

// Every rank reads everything. The source may be the destination.
template <class T>
struct AllReduceOneShot {
  Group group;
  Call call;
  const T* source;  // [count]
  T* destination;   // [count]
  size_t count;
  float scale;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage: the input goes where peers can read it.
    bool going = is_intact(here, group);
    if (going) copy_share(here, staging<T>(group, group.rank), source, count);
    // 2. Meet. This block's share of every rank's input is staged.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Reduce. A thread writes what it alone has staged, so the source may go.
    if (going) {
      const Share<T, Here> share(here, count);
      for (size_t at = share.first; at < count; at += share.stride) {
        const auto part = [&](int rank) { return staging<T>(group, rank) + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, scale);
        store(destination + at, sum, share.valid(at), is_aligned(destination));
      }
    }
    // 4. Meet. Every peer has read this rank's staging memory: the rule holds.
    if (!meet(here, group, call, 2, Phase::read, going)) spoil_share(here, destination, count);
  }
};

// Each rank reduces one slice and hands it to all. The source may be the destination.
template <class T>
struct AllReduceTwoShot {
  Group group;
  Call call;
  const T* source;  // [count]
  T* destination;   // [count]
  size_t count;
  float scale;

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
    // 3. Reduce this rank's slice into everybody's staging memory, over the inputs: nobody else reads this slice of
    //    them, and the thread that overwrites an element is the one that has read it.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const auto part = [&](int rank) { return staging<T>(group, rank) + slice.begin + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, scale);
        for (int rank = 0; rank < group.world; ++rank) store(part(rank), sum, share.valid(at), true);
      }
    }
    // 4. Meet. Every peer has read and written all it ever will in this rank's staging memory: the rule holds, and
    //    step 5 reads what is this rank's alone. So no third meeting is needed.
    going = meet(here, group, call, 2, Phase::reduced, going);
    // 5. Hand out.
    for (int rank = 0; rank < group.world; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      if (going)
        copy_share(here, destination + slice.begin, staging<T>(group, group.rank) + slice.begin, slice.count);
      else
        spoil_share(here, destination + slice.begin, slice.count);
    }
  }
};

// In symmetric memory: each rank reduces one slice where it lies and writes it to all. Staging memory is not touched.
template <class T>
struct AllReduceInPlace {
  Group group;
  Call call;
  Addresses<T> parts;  // [count] on each rank, as mapped here
  size_t count;
  float scale;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Meet. Every rank's input is there, and no rank's earlier work still uses it.
    bool going = meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
    // 2. Reduce this rank's slice. It is read and written by this rank alone.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      bool wide = true;
      for (int rank = 0; rank < group.world; ++rank) wide = wide && is_aligned(parts.at[rank]);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const auto part = [&](int rank) { return parts.at[rank] + slice.begin + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), wide, scale);
        for (int rank = 0; rank < group.world; ++rank) store(part(rank), sum, share.valid(at), wide);
      }
    }
    // 3. Meet. Every slice of this rank's memory has been read and written.
    going = meet(here, group, call, 2, Phase::reduced, going);
    // 4. Meet. That is so for every rank: none has given up before and changed its memory while others still read it.
    if (meet(here, group, call, 3, Phase::confirmed, going)) return;
    for (int rank = 0; rank < group.world; ++rank) {
      const Slice slice = slice_of<T>(count, group.world, rank);
      spoil_share(here, parts.at[group.rank] + slice.begin, slice.count);
    }
  }
};

// In symmetric memory with a multicast address: the switch sums, in an order of its own and not in rank order. A
// 16-bit sum is rounded by the switch and, where the scale is not 1, once more after the multiplication.
template <class T>
struct AllReduceMultimem {
  Group group;
  Call call;
  T* multicast;  // [count], aligned to 16 bytes and a multiple of them
  T* own;        // the same memory of this rank by its own address, or nullptr
  size_t count;
  float scale;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    if (!Here::has_multimem) return;  // the code for earlier devices, which is never launched: see need_multimem
    // 1. Meet. Every rank's input is there.
    bool going = meet(here, group, call, 1, Phase::arrived, is_intact(here, group));
    here.between_aliases();
    // 2. Reduce this rank's slice for all.
    if (going) {
      const Slice slice = slice_of<T>(count, group.world, group.rank);
      const Share<T, Here> share(here, slice.count);
      for (size_t at = share.first; at < slice.count; at += share.stride) {
        const Packed<T> loaded = here.load_sum(multicast + slice.begin + at);
        float sums[per_pack<T>];
        WEFT_UNROLL
        for (int k = 0; k < per_pack<T>; ++k) sums[k] = Convert<T>::to_float(loaded.values[k]);
        here.store_to_all(multicast + slice.begin + at, scaled<T>(sums, scale));
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
      // Without an address of its own, a rank can only spoil everybody's memory. All ranks have lost this call.
      const Share<T, Here> share(here, slice.count);
      Packed<T> ones;
      __builtin_memset(&ones, 0xff, sizeof ones);
      for (size_t at = share.first; at < slice.count; at += share.stride)
        here.store_to_all(multicast + slice.begin + at, ones);
    }
  }
};

// Rank r gets the sum of the parts for it. The destination may be this rank's part of the source.
template <class T>
struct ReduceScatter {
  Group group;
  Call call;
  Addresses<const T> parts;  // [counts[r]] each: what is for rank r
  size_t counts[most_ranks];
  size_t part_elements;  // from one part to the next in staging memory, a multiple of 16 bytes
  T* destination;        // [counts[rank]]
  float scale;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage, each part where its reader expects it.
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
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), true, scale);
        store(destination + at, sum, share.valid(at), is_aligned(destination));
      }
    }
    // 4. Meet. Every peer has read this rank's staging memory: the rule holds.
    if (!meet(here, group, call, 2, Phase::read, going)) spoil_share(here, destination, count);
  }
};

// Every rank gets every rank's part. The source may be this rank's destination. T is only how wide an element is.
template <class T>
struct AllGather {
  Group group;
  Call call;
  const T* source;            // [counts[rank]]
  Addresses<T> destinations;  // [counts[r]] each
  size_t counts[most_ranks];

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage; this rank's own part needs no other rank.
    bool going = is_intact(here, group);
    if (going) {
      copy_share(here, staging<T>(group, group.rank), source, counts[group.rank]);
      if (source != destinations.at[group.rank])
        copy_share(here, destinations.at[group.rank], source, counts[group.rank]);
    }
    // 2. Meet. This block's share of every rank's part is staged.
    going = meet(here, group, call, 1, Phase::staged, going);
    // 3. Gather, each rank from the next one on, so that not all read from the same at a time.
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
