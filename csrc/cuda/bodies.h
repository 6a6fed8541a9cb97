// Collectives as each rank's threads run them: arguments, then numbered steps and the conditions that hold after each.
//
// With S bytes in the whole tensor and W ranks, a rank reads from its peers and writes to them:
//   all_reduce, low_latency  writes (W - 1) S                             no meeting (boxes.h)
//   all_reduce_rms_norm      writes (W - 1) S                             no meeting
//   all_reduce, one_shot     reads (W - 1) S                              two meetings
//   all_reduce, two_shot     reads (W - 1) S / W, writes (W - 1) S / W    two meetings
//   all_reduce, in place     reads (W - 1) S / W, writes (W - 1) S / W    three meetings, no staging
//   all_reduce, multimem     S / W through the switch each way            three meetings, no staging
//   reduce_scatter           reads (W - 1) S / W                          two meetings
//   all_gather               reads (W - 1) S / W                          two meetings
//   the same, in place       reads (W - 1) S / W                          three meetings, no staging
//   all_gather, by copies    copy engines read (W - 1) S / W              a barrier before, two meetings after
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
#include "boxes.h"

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

// A pack of each thread, through the boxes of one block to every rank, and the sum of the ranks' packs in their order.
template <class T, class Here>
class PackExchange {
 public:
  WEFT_ON_DEVICE PackExchange(Here& here, const Group& group, const Call& call, int block)
      : here_(here), group_(group), call_(call), boxes_(here, group, block), signature_(call.signature | 1) {}

  // 1. Writes the signature and this thread's pack to every peer.
  // 2. Clears the boxes of the call before. Nobody writes to them now.
  WEFT_ON_DEVICE void send(const Packed<T>& own, int valid) {
    const int number = here_.thread() + 1;
    if (here_.thread() == 0) boxes_.send(0, {{signature_, signature_, signature_, signature_}});
    if (valid > 0) {
      Line words;
      __builtin_memcpy(&words, &own, sizeof words);
      boxes_.send(number, words);
    }
    boxes_.clear(number);
    if (here_.thread() == 0) boxes_.clear(0);
  }

  // 3. Waits for the signature of every peer, each in another thread if there are as many.
  // 4. Waits for the packs of the peers, and adds them to `sums` in the order of ranks; this rank's own is read again.
  // Returns whether all have come.
  WEFT_ON_DEVICE bool receive(const T* own, int valid, Sums<T>& sums) {
    constexpr int batch = loads_at_a_time;
    const int number = here_.thread() + 1;
    bool going = true;
    WEFT_ROLLED
    for (int peer = here_.thread(); peer < group_.world && going; peer += here_.threads())
      if (peer != group_.rank) going = signature_comes(peer);
    for (int first = 0; first < group_.world && valid > 0 && going; first += batch) {
      Packed<T> packs[batch];
      Patience patience;
      int missing = 0;
      while (going && missing >= 0) {
        missing = -1;
        WEFT_UNROLL
        for (int k = 0; k < batch; ++k) {
          if (first + k >= group_.world) continue;
          Line words{};
          if (first + k != group_.rank && !boxes_.has_come(first + k, number, words)) missing = first + k;
          __builtin_memcpy(&packs[k], &words, sizeof words);
        }
        if (missing >= 0) going = may_wait(patience, missing);
      }
      const Packed<T> loaded = load(own, valid);
      WEFT_UNROLL
      for (int k = 0; k < batch; ++k) {
        if (first + k == group_.rank) packs[k] = loaded;
        if (first + k < group_.world) sums += packs[k];
      }
    }
    return going;
  }

  // 5. Ends the call, once all threads have received: nothing was staged, and this rank's words lie with its peers, who
  //    keep them for as long as they need them. For one thread.
  WEFT_ON_DEVICE void end() { boxes_.next_turn(); }

 private:
  WEFT_ON_DEVICE bool signature_comes(int peer) {
    Patience patience;
    Line words;
    while (!boxes_.has_come(peer, 0, words))
      if (!may_wait(patience, peer)) return false;
    if (words.values[0] == signature_) return true;
    give_up(here_, group_, call_, {Phase::staged, peer, nullptr, signature_}, mismatched, words.values[0]);
    return false;
  }
  WEFT_ON_DEVICE bool may_wait(Patience& patience, int peer) {
    const Why why = patience.ends(here_, group_);
    if (why != nothing) give_up(here_, group_, call_, {Phase::staged, peer, nullptr, signature_}, why, 0);
    return why == nothing;
  }

  Here& here_;
  const Group& group_;
  const Call& call_;
  Boxes<Here> boxes_;
  uint32_t signature_;
};

// Every rank writes its whole input to every rank. A thread has one pack. The source may be the destination.
template <class T>
struct AllReduceLowLatency {
  Group group;
  Call call;
  const T* source;  // [count]
  T* destination;   // [count]
  size_t count;     // at most a pack for each thread of small_blocks
  Epilogue epilogue;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    const Share<T, Here> share(here, count);
    const size_t at = share.first;
    const int valid = share.valid(at);
    PackExchange<T, Here> exchange(here, group, call, here.block());
    Sums<T> sums;
    bool going = here.all(is_intact(here, group));
    if (going) {
      const Packed<T> own = load(source + at, valid);
      exchange.send(own, valid);
      going = exchange.receive(source + at, valid, sums);
    }
    going = here.all(going);
    if (going && here.thread() == 0) exchange.end();
    if (going)
      store(destination + at, finished<T>(sums.at, epilogue), valid, is_aligned(destination));
    else
      spoil_share(here, destination, count);
  }
};

// Returns the number of blocks whose boxes a row takes: a pack for each thread.
template <class T>
WEFT_ON_BOTH int boxes_of_row(size_t hidden, int threads) {
  const size_t packs = (hidden + per_pack<T> - 1) / per_pack<T>;
  return static_cast<int>((packs + threads - 1) / threads);
}

// Returns the sum of the block's numbers, to all its threads: pairs, pairs of pairs, and so on. Once in a launch.
template <class Here>
WEFT_ON_DEVICE float sum_of_block(Here& here, float number) {
  float* const sums = here.shared_numbers();
  sums[here.thread()] = number;
  here.all(true);
  WEFT_ROLLED
  for (int left = here.threads(); left > 1;) {
    const int half = (left + 1) / 2;
    if (here.thread() + half < left) sums[here.thread()] = add(sums[here.thread()], sums[here.thread() + half]);
    left = half;
    here.all(true);
  }
  return sums[0];
}

// The sum over ranks, the residual added to it, and the RMS norm of that:
//   total       = residual + partial[0] + partial[1] + ...
//   normalised  = total / sqrt(mean(total^2) + eps) * weight, over each row
// The sum over ranks is rounded, then its sum with the residual: the bits of AllReduceLowLatency and an addition. The
// norm is in fp32 and rounded once. The order of its sum of squares depends only on `hidden` and the type.
// A block has one row, and the boxes of as many blocks as the row has packs for. Results may lie where inputs do.
template <class T>
struct AllReduceRmsNorm {
  Group group;
  Call call;
  const T* partial;   // [rows, hidden]: a block for each row
  const T* residual;  // [rows, hidden]
  const T* weight;    // [hidden]
  T* normalised;      // [rows, hidden]
  T* total;           // [rows, hidden]
  int hidden;
  float eps;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    const int boxes = boxes_of_row<T>(hidden, here.threads()), first_box = here.block() * boxes;
    const size_t row = static_cast<size_t>(here.block()) * hidden;
    const int first = here.thread() * per_pack<T>, stride = here.threads() * per_pack<T>;  // of this thread's packs
    const auto valid_at = [&](int at) {
      return at >= hidden ? 0 : hidden - at < per_pack<T> ? hidden - at : per_pack<T>;
    };
    const auto exchange = [&](int box) { return PackExchange<T, Here>(here, group, call, first_box + box); };
    bool going = here.all(is_intact(here, group));
    // 1. and 2. Send the row. What is read later comes from memory while this rank waits.
    WEFT_ROLLED
    for (int box = 0; box < boxes && going; ++box) {
      const int at = first + box * stride, valid = valid_at(at);
      exchange(box).send(load(partial + row + at, valid), valid);
      if (valid > 0) here.prefetch(residual + row + at), here.prefetch(weight + at);
    }
    // 3. and 4. Receive the ranks' rows, and add the residual to their sum.
    float squares = 0.0f;
    WEFT_ROLLED
    for (int box = 0; box < boxes && going; ++box) {
      const int at = first + box * stride, valid = valid_at(at);
      Sums<T> sums;
      going = exchange(box).receive(partial + row + at, valid, sums);
      const Packed<T> reduced = finished<T>(sums.at, {1.0f, 1.0f});
      Packed<T> values = load(residual + row + at, valid);
      WEFT_UNROLL
      for (int k = 0; k < per_pack<T>; ++k) {
        T& value = values.values[k];
        value = Convert<T>::from_float(add(Convert<T>::to_float(value), Convert<T>::to_float(reduced.values[k])));
        const float rounded = Convert<T>::to_float(value);
        squares = add(squares, multiply(rounded, rounded));  // beyond the row's end are zeros
      }
      store(total + row + at, values, valid, is_aligned(total + row));
    }
    going = here.all(going);
    // 5. End the call.
    for (int box = 0; box < boxes && going && here.thread() == 0; ++box) exchange(box).end();
    // 6. Normalise. A thread reads only elements of the total that it wrote itself.
    const float mean = divide(sum_of_block(here, squares), static_cast<float>(hidden));
    const float factor = divide(1.0f, square_root(add(mean, eps)));
    WEFT_ROLLED
    for (int at = first; at < hidden; at += stride) {
      const int valid = valid_at(at);
      Packed<T> result = spoiled<T>();
      if (going) {
        const Packed<T> values = load(total + row + at, valid), weights = load(weight + at, valid);
        WEFT_UNROLL
        for (int k = 0; k < per_pack<T>; ++k) {
          const float scaled = multiply(Convert<T>::to_float(values.values[k]), factor);
          result.values[k] = Convert<T>::from_float(multiply(scaled, Convert<T>::to_float(weights.values[k])));
        }
      } else {
        store(total + row + at, result, valid, is_aligned(total + row));
      }
      store(normalised + row + at, result, valid, is_aligned(normalised + row));
    }
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
      for (size_t at = share.first; at < slice.count; at += share.stride)
        here.store_to_all(multicast + slice.begin + at, spoiled<T>());
    }
  }
};

// Where a rank's source lies in symmetric memory. Each rank has an offset of its own, and puts it into its staging memory,
// a copy for each block. Symmetric memory belongs to the user, so these calls meet a third time.
struct Window {
  const char* parts[most_ranks];  // the symmetric memory of each rank, as mapped here; all null if the source is elsewhere
  size_t offset;                  // of this rank's source, in bytes

  WEFT_ON_DEVICE bool is_used() const { return parts[0] != nullptr; }

  template <class Here>
  WEFT_ON_DEVICE void share_offset(const Here& here, const Group& group) const {
    if (here.thread() == 0) staging<size_t>(group, group.rank)[here.block()] = offset;
  }
  // Returns where every rank's source begins, there or in its staging memory, in memory that the block's threads share.
  // For after a meeting.
  template <class T, class Here>
  WEFT_ON_DEVICE const T* const* sources(Here& here, const Group& group) const {
    const T** found = reinterpret_cast<const T**>(here.shared());
    for (int rank = here.thread(); rank < group.world; rank += here.threads()) {
      const size_t* const place = staging<size_t>(group, rank) + here.block();
      found[rank] = is_used() ? reinterpret_cast<const T*>(parts[rank] + *place) : staging<const T>(group, rank);
    }
    here.all(true);
    return found;
  }
};

// Ends a call that reads peers' memory. Returns whether the results are right.
template <class Here>
WEFT_ON_DEVICE bool has_been_read(Here& here, const Group& group, const Call& call, const Window& window, bool going) {
  // Every peer has read this rank's staging memory: the rule holds.
  going = meet(here, group, call, 2, Phase::read, going);
  // Every rank has passed that: none has given up earlier and changed its symmetric memory while others read it.
  return window.is_used() ? meet(here, group, call, 3, Phase::confirmed, going) : going;
}

// Rank r gets the sum over ranks of part r. The destination may be this rank's part of the source.
template <class T>
struct ReduceScatter {
  Group group;
  Call call;
  Addresses<const T> parts;  // [counts[r]]: the part for rank r, side by side if the window is used
  size_t counts[most_ranks];
  size_t part_elements;  // distance between parts in staging memory, a multiple of 16 bytes
  T* destination;        // [counts[rank]]
  Epilogue epilogue;
  Window window;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage each part at the place where its reader expects it, or share the offset.
    bool going = is_intact(here, group);
    if (going && window.is_used()) window.share_offset(here, group);
    for (int rank = 0; rank < group.world && going && !window.is_used(); ++rank)
      copy_share(here, staging<T>(group, group.rank) + rank * part_elements, parts.at[rank], counts[rank]);
    // 2. Meet. This block's share of every part can be read on every rank.
    going = meet(here, group, call, 1, window.is_used() ? Phase::arrived : Phase::staged, going);
    // 3. Reduce this rank's part. A thread overwrites only elements that it has read itself.
    const size_t count = counts[group.rank];
    if (going) {
      const size_t begin = window.is_used() ? parts.at[group.rank] - parts.at[0] : group.rank * part_elements;
      const T* const* sources = window.sources<T>(here, group);
      bool wide = true;
      for (int rank = 0; rank < group.world; ++rank) wide = wide && is_aligned(sources[rank] + begin);
      const Share<T, Here> share(here, count);
      for (size_t at = share.first; at < count; at += share.stride) {
        const auto part = [&](int rank) { return sources[rank] + begin + at; };
        const auto sum = sum_in_rank_order<T>(part, group.world, share.valid(at), wide, epilogue);
        store(destination + at, sum, share.valid(at), is_aligned(destination));
      }
    }
    // 4. Meet.
    if (!has_been_read(here, group, call, window, going)) spoil_share(here, destination, count);
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
  Window window;

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    // 1. Stage or share the offset, and copy this rank's own part, which needs no other rank.
    bool going = is_intact(here, group);
    if (going) {
      if (window.is_used())
        window.share_offset(here, group);
      else
        copy_share(here, staging<T>(group, group.rank), source, counts[group.rank]);
      if (source != destinations.at[group.rank])
        copy_share(here, destinations.at[group.rank], source, counts[group.rank]);
    }
    // 2. Meet. This block's share of every rank's part can be read.
    going = meet(here, group, call, 1, window.is_used() ? Phase::arrived : Phase::staged, going);
    // 3. Gather. Each rank starts at the next rank, so that not all read from the same rank at once.
    if (going) {
      const T* const* sources = window.sources<T>(here, group);
      for (int step = 1; step < group.world; ++step) {
        const int rank = (group.rank + step) % group.world;
        copy_share(here, destinations.at[rank], sources[rank], counts[rank]);
      }
    }
    // 4. Meet.
    if (has_been_read(here, group, call, window, going)) return;
    for (int rank = 0; rank < group.world; ++rank)
      if (destinations.at[rank] != source) spoil_share(here, destinations.at[rank], counts[rank]);
  }
};

// The end of a gathering by copy engines, which began with a barrier: every rank's copies have ended.
struct AfterCopies {
  Group group;
  Call call;
  Addresses<uint8_t> destinations;  // [counts[r]] each
  size_t counts[most_ranks];

  template <class Here>
  WEFT_ON_DEVICE void operator()(Here& here) const {
    bool going = meet(here, group, call, 1, Phase::read, is_intact(here, group));
    going = meet(here, group, call, 2, Phase::confirmed, going);  // as in calls with a window
    for (int rank = 0; rank < group.world && !going; ++rank)
      if (rank != group.rank) spoil_share(here, destinations.at[rank], counts[rank]);
  }
};

}  // namespace weft::cuda
