// A thread's share of the elements, and its reads, sums and writes: 16 bytes at a time if addresses allow.
#pragma once
#include "elements.h"

namespace weft::cuda {

constexpr int most_ranks = 72;  // of one NVLink domain
constexpr int pack_bytes = 16;

template <class T>
constexpr int per_pack = pack_bytes / static_cast<int>(sizeof(T));

template <class T>
using Packed = Pack<T, per_pack<T>>;

WEFT_ON_DEVICE bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % pack_bytes == 0; }

// Loads a whole pack from an address aligned to 16 bytes.
template <class T>
WEFT_ON_DEVICE Packed<T> load_wide(const T* from) {
  return *reinterpret_cast<const Packed<T>*>(from);
}

// Loads the first `valid` elements from any address.
template <class T>
WEFT_ON_DEVICE Packed<T> load_narrow(const T* from, int valid) {
  Packed<T> pack{};
  WEFT_UNROLL
  for (int k = 0; k < per_pack<T>; ++k)
    if (k < valid) pack.values[k] = from[k];
  return pack;
}

// Loads the first `valid` elements, all at once if there are as many and the address is aligned.
template <class T>
WEFT_ON_DEVICE Packed<T> load(const T* from, int valid) {
  return is_aligned(from) && valid == per_pack<T> ? load_wide(from) : load_narrow(from, valid);
}

template <class T>
WEFT_ON_DEVICE void store(T* to, const Packed<T>& pack, int valid, bool wide) {
  if (wide && valid == per_pack<T>) {
    *reinterpret_cast<Packed<T>*>(to) = pack;
    return;
  }
  WEFT_UNROLL
  for (int k = 0; k < per_pack<T>; ++k)
    if (k < valid) to[k] = pack.values[k];
}

// A thread's share of a range of elements that is cut into packs. Pack i belongs to block (i / threads) % blocks,
// independent of addresses. So block b of every rank works on the same elements in every step, even if two ranks'
// memory is aligned differently.
template <class T, class Here>
struct Share {
  size_t count, first, stride;

  WEFT_ON_DEVICE Share(const Here& here, size_t count)
      : count(count),
        first((static_cast<size_t>(here.block()) * here.threads() + here.thread()) * per_pack<T>),
        stride(static_cast<size_t>(here.blocks()) * here.threads() * per_pack<T>) {}

  // Returns the number of the pack's elements in the range: all, some in the last pack, or none after it.
  WEFT_ON_DEVICE int valid(size_t at) const {
    if (at >= count) return 0;
    return count - at < static_cast<size_t>(per_pack<T>) ? static_cast<int>(count - at) : per_pack<T>;
  }
};

// Copies this thread's packs of `from`, four at a time: one alone would wait for memory most of the time.
template <class T, class Here>
WEFT_ON_DEVICE void copy_share(const Here& here, T* to, const T* from, size_t count) {
  constexpr int batch = 4;
  const Share<T, Here> share(here, count);
  size_t next = share.first;
  if (is_aligned(from) && is_aligned(to)) {
    for (; share.valid(next) == per_pack<T>; next += batch * share.stride) {
      Packed<T> packs[batch];
      WEFT_UNROLL
      for (int k = 0; k < batch; ++k)
        if (share.valid(next + k * share.stride) == per_pack<T>) packs[k] = load_wide(from + next + k * share.stride);
      WEFT_UNROLL
      for (int k = 0; k < batch; ++k)
        if (share.valid(next + k * share.stride) == per_pack<T>)
          store(to + next + k * share.stride, packs[k], per_pack<T>, true);
    }
    // The last pack is left if it is partial and belongs to this thread.
    next = count - count % per_pack<T>;
    if (next / per_pack<T> % (share.stride / per_pack<T>) != share.first / per_pack<T>) return;
  }
  for (; next < count; next += share.stride) {
    const int valid = share.valid(next);
    WEFT_ROLLED
    for (int k = 0; k < valid; ++k) to[next + k] = from[next + k];
  }
}

// Returns a pack with ones in all bits, which is NaN in every floating-point type.
template <class T>
WEFT_ON_DEVICE Packed<T> spoiled() {
  Packed<T> ones;
  __builtin_memset(&ones, 0xff, sizeof ones);
  return ones;
}

// Spoils the share.
template <class T, class Here>
WEFT_ON_DEVICE void spoil_share(const Here& here, T* to, size_t count) {
  const Share<T, Here> share(here, count);
  for (size_t at = share.first; at < count; at += share.stride)
    store(to + at, spoiled<T>(), share.valid(at), is_aligned(to));
}

// What follows a sum in fp32: an average's division by the number of ranks, then the scale. These are the steps of the
// CPU's engine (csrc/shm/reduce_kernels.h), so both give the same bits.
struct Epilogue {
  float divisor, scale;
};

template <class T>
WEFT_ON_DEVICE Packed<T> finished(const float (&sums)[per_pack<T>], const Epilogue& epilogue) {
  Packed<T> result;
  WEFT_UNROLL
  for (int k = 0; k < per_pack<T>; ++k) {
    const float quotient = epilogue.divisor == 1.0f ? sums[k] : divide(sums[k], epilogue.divisor);
    result.values[k] = Convert<T>::from_float(multiply(quotient, epilogue.scale));
  }
  return result;
}

// Sums of one pack's elements, in fp32, in the order in which packs are added.
template <class T>
struct Sums {
  float at[per_pack<T>];

  WEFT_ON_DEVICE Sums() {
    WEFT_UNROLL
    for (int k = 0; k < per_pack<T>; ++k) at[k] = -0.0f;  // -0 + x is x for every x, also for -0
  }
  WEFT_ON_DEVICE void operator+=(const Packed<T>& pack) {
    WEFT_UNROLL
    for (int k = 0; k < per_pack<T>; ++k) at[k] = add(at[k], Convert<T>::to_float(pack.values[k]));
  }
};

constexpr int loads_at_a_time = 8;  // of packs from different ranks: each takes a round trip to a peer

// Returns one pack of part(0) + part(1) + ..., summed in fp32 in this order, with the epilogue, rounded once.
template <class T, class PartOf>
WEFT_ON_DEVICE Packed<T> sum_in_rank_order(PartOf part, int world, int valid, bool wide, const Epilogue& epilogue) {
  constexpr int batch = loads_at_a_time;
  Sums<T> sums;
  if (wide && valid == per_pack<T>) {
    for (int first = 0; first < world; first += batch) {
      Packed<T> packs[batch];
      WEFT_UNROLL
      for (int k = 0; k < batch; ++k)
        if (first + k < world) packs[k] = load_wide(part(first + k));
      WEFT_UNROLL
      for (int k = 0; k < batch; ++k)
        if (first + k < world) sums += packs[k];
    }
  } else {
    WEFT_ROLLED
    for (int rank = 0; rank < world; ++rank) sums += load_narrow(part(rank), valid);
  }
  return finished<T>(sums.at, epilogue);
}

// The part of a range that one rank reduces. Packs are cut evenly, so every slice begins at a pack of the whole range.
// The last slices may be empty.
struct Slice {
  size_t begin, count;
};

template <class T>
WEFT_ON_BOTH size_t slice_elements(size_t count, int world) {
  const size_t packs = (count + per_pack<T> - 1) / per_pack<T>;
  return (packs + world - 1) / world * per_pack<T>;
}

template <class T>
WEFT_ON_DEVICE Slice slice_of(size_t count, int world, int rank) {
  const size_t length = slice_elements<T>(count, world);
  const size_t begin = rank * length < count ? rank * length : count;
  return {begin, count - begin < length ? count - begin : length};
}

}  // namespace weft::cuda
