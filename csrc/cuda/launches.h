// Host side of the collectives: checks arguments that could corrupt memory, cuts into pieces, signs and launches.
//
// A Machine has the types float16 and bfloat16, `threads` per block, and
//   launch(operation, body, blocks, stream)    puts body(here) for each thread of the blocks on the stream
//   load<Body>(operation)                      loads a body's code or throws; returns its architecture (90: sm_90)
//   copy(operation, to, from, bytes, stream)   puts a copy by a copy engine on the stream
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "bodies.h"
#include "collectives.h"

namespace weft::cuda {

inline std::string name_of(Operation operation) {
  for (const WaitName& known : wait_names)
    if (known.code == static_cast<int>(operation)) return known.name;
  return "?";
}

inline void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::invalid_argument(otherwise);
}

inline void require_memory(const std::string& what, uintptr_t address, size_t count, size_t alignment) {
  require(count == 0 || (address != 0 && address % alignment == 0),
          what + " must be aligned to " + std::to_string(alignment) + " bytes and not null, got address " +
              std::to_string(address));
}

inline void require_one_for_each_rank(const std::string& what, size_t got, int world) {
  require(got == static_cast<size_t>(world),
          what + ": expected one for each of " + std::to_string(world) + " ranks, got " + std::to_string(got));
}

inline uint64_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Calls `then` with a zero of the element's type and a number that identifies the type.
template <class Machine, class Then>
void with_element(const std::string& operation, const std::string& dtype, Then then) {
  if (dtype == "float32")
    then(float{}, 1);
  else if (dtype == "float16")
    then(typename Machine::float16{}, 2);
  else if (dtype == "bfloat16")
    then(typename Machine::bfloat16{}, 3);
  else
    throw std::invalid_argument(operation + " takes float32, float16 and bfloat16, got " + dtype);
}

// Calls `then` with a zero of the widest unsigned type whose size divides the value.
template <class Then>
void with_width(uint64_t value, Then then) {
  if (value % sizeof(uint32_t) == 0)
    then(uint32_t{});
  else if (value % sizeof(uint16_t) == 0)
    then(uint16_t{});
  else
    then(uint8_t{});
}

// Calls `then` with begin and length of each piece. A count of 0 has one empty piece, so that the ranks still meet.
template <class Then>
void in_pieces(size_t count, size_t most, Then then) {
  size_t begin = 0;
  do {
    then(begin, std::min(most, count - begin));
    begin += most;
  } while (begin < count);
}

constexpr int first_with_multimem = 90;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Machine>
Ranks<Machine>::Ranks(int rank, const std::vector<uintptr_t>& pads, size_t pad_words,
                      const std::vector<uintptr_t>& workspace, size_t workspace_bytes, uintptr_t record,
                      double timeout_s, int blocks)
    : group_(new Group{}), workspace_bytes_(workspace_bytes / pack_bytes * pack_bytes) {
  const size_t world = pads.size();
  require(world >= 1 && world <= most_ranks, "Ranks takes 1 to " + std::to_string(most_ranks) +
                                                 " signal pads, one for each rank; got " + std::to_string(world));
  require_one_for_each_rank("workspaces of Ranks", workspace.size(), static_cast<int>(world));
  require(rank >= 0 && static_cast<size_t>(rank) < world,
          "rank must be 0 to " + std::to_string(world - 1) + ", got " + std::to_string(rank));
  require(blocks >= 1, "blocks must be 1 or more, got " + std::to_string(blocks));
  const size_t words = word_number(static_cast<int>(world), blocks, 1, 0);
  require(words <= pad_words,
          std::to_string(blocks) + " blocks * " + std::to_string(most_meetings) + " meetings * " +
              std::to_string(world) + " ranks = " + std::to_string(words) + " flags do not fit into a signal pad of " +
              std::to_string(pad_words) + " words; use at most " + std::to_string(pad_words / world / most_meetings) +
              " blocks");
  require(timeout_s > 0 && timeout_s <= 1e9, "timeout_s must be more than 0 and at most 1e9 (it is the bound of every "
                                             "wait), got " + std::to_string(timeout_s));
  require(workspace_bytes_ >= world * pack_bytes,
          "a workspace for " + std::to_string(world) + " ranks needs " + std::to_string(world * pack_bytes) +
              " bytes or more, got " + std::to_string(workspace_bytes));
  require(workspace_bytes_ >= blocks * sizeof(size_t),
          "a workspace for " + std::to_string(blocks) + " blocks needs " + std::to_string(blocks * sizeof(size_t)) +
              " bytes or more, got " + std::to_string(workspace_bytes_));
  require_memory("the record", record, 1, sizeof(int64_t));
  Group& group = *group_;
  group.rank = rank;
  group.world = static_cast<int>(world);
  group.blocks = blocks;
  group.record = pointer<int64_t>(record);
  const size_t first = first_box_word(group.world, blocks);
  const size_t fitting = pad_words < first ? 0 : (pad_words - first) / box_words(group.world, Machine::threads);
  group.small_blocks = std::min({blocks, most_small_blocks, static_cast<int>(fitting)});
  group.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
  for (size_t r = 0; r < world; ++r) {
    require_memory("the signal pad of rank " + std::to_string(r), pads[r], 1, pack_bytes);
    require_memory("the workspace of rank " + std::to_string(r), workspace[r], 1, pack_bytes);
    group.pads[r] = pointer<uint32_t>(pads[r]);
    group.workspace[r] = pointer<char>(workspace[r]);
  }
}

template <class Machine>
Ranks<Machine>::~Ranks() = default;

template <class Machine>
Call Ranks<Machine>::sign(Operation operation, std::vector<uint64_t> agreed, const std::vector<size_t>& counts) const {
  agreed.insert(agreed.end(), counts.begin(), counts.end());
  agreed.insert(agreed.end(), {static_cast<uint64_t>(operation), static_cast<uint64_t>(group_->world),
                               static_cast<uint64_t>(group_->blocks), static_cast<uint64_t>(workspace_bytes_)});
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, by words
  for (const uint64_t value : agreed) {
    hash = (hash ^ value) * 0x100000001b3u;
    hash ^= hash >> 32;
  }
  return {operation, static_cast<uint32_t>(hash & 0x1fffffff) << 2};
}

template <class Machine>
Epilogue Ranks<Machine>::epilogue(bool average, float scale) const {
  return {average ? static_cast<float>(group_->world) : 1.0f, scale};
}

template <class Machine>
template <class T, class Body>
void Ranks<Machine>::launch(const Body& body, size_t count, uintptr_t stream) const {
  const size_t packs = (count + per_pack<T> - 1) / per_pack<T>, busy = (packs + Machine::threads - 1) / Machine::threads;
  const size_t blocks = std::clamp(busy, size_t{1}, static_cast<size_t>(group_->blocks));
  Machine::launch(name_of(body.call.operation), body, static_cast<int>(blocks), stream);
}

template <class Machine>
size_t Ranks<Machine>::low_latency_bytes() const {
  return static_cast<size_t>(group_->small_blocks) * Machine::threads * pack_bytes;
}

template <class Machine>
size_t Ranks<Machine>::rms_norm_rows(size_t hidden, const std::string& dtype) const {
  size_t rows = 0;
  with_element<Machine>("all_reduce_rms_norm", dtype, [&](auto zero, uint64_t) {
    using T = decltype(zero);
    if (hidden > 0 && hidden <= low_latency_bytes() / sizeof(T))
      rows = group_->small_blocks / boxes_of_row<T>(hidden, Machine::threads);
  });
  return rows;
}

template <class Machine>
std::vector<size_t> Ranks<Machine>::marks() const {
  std::vector<size_t> numbers;
  for (int block = 0; block < group_->blocks; ++block)
    numbers.push_back(static_cast<size_t>(mark(*group_, block) - group_->pads[group_->rank]));
  return numbers;
}

// A device without its own code in this build runs the code of an earlier one, which may have no multimem.
template <class Machine>
bool Ranks<Machine>::load() const {
  Machine::template load<Barrier>(name_of(Operation::barrier));
  Machine::template load<AllGather<uint32_t>>(name_of(Operation::all_gather));
  Machine::template load<AllGather<uint16_t>>(name_of(Operation::all_gather));
  Machine::template load<AllGather<uint8_t>>(name_of(Operation::all_gather));
  Machine::template load<AfterCopies>(name_of(Operation::all_gather_by_copies));
  bool multimem = true;
  for (const char* dtype : {"float32", "float16", "bfloat16"})
    with_element<Machine>("load", dtype, [&](auto zero, uint64_t) {
      using T = decltype(zero);
      Machine::template load<AllReduceLowLatency<T>>(name_of(Operation::all_reduce_low_latency));
      Machine::template load<AllReduceRmsNorm<T>>(name_of(Operation::all_reduce_rms_norm));
      Machine::template load<AllReduceOneShot<T>>(name_of(Operation::all_reduce_one_shot));
      Machine::template load<AllReduceTwoShot<T>>(name_of(Operation::all_reduce_two_shot));
      Machine::template load<AllReduceInPlace<T>>(name_of(Operation::all_reduce_in_place));
      Machine::template load<ReduceScatter<T>>(name_of(Operation::reduce_scatter));
      const int code = Machine::template load<AllReduceMultimem<T>>(name_of(Operation::all_reduce_multimem));
      multimem = multimem && code >= first_with_multimem;
    });
  return multimem;
}

template <class Machine>
void Ranks<Machine>::barrier(uintptr_t stream) const {
  launch<uint8_t>(Barrier{*group_, sign(Operation::barrier, {})}, 0, stream);
}

template <class Machine>
void Ranks<Machine>::all_reduce(uintptr_t source, uintptr_t destination, size_t count, const std::string& dtype,
                                bool average, float scale, const std::string& algorithm, uintptr_t stream) const {
  const bool one_shot = algorithm == "one_shot", low_latency = algorithm == "low_latency";
  require(one_shot || low_latency || algorithm == "two_shot",
          "the algorithms of all_reduce are \"low_latency\", \"one_shot\" and \"two_shot\", got \"" + algorithm + "\"");
  const Operation operation = low_latency ? Operation::all_reduce_low_latency
                              : one_shot  ? Operation::all_reduce_one_shot
                                          : Operation::all_reduce_two_shot;
  with_element<Machine>("all_reduce", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    require_memory("the source of all_reduce", source, count, sizeof(T));
    require_memory("the destination of all_reduce", destination, count, sizeof(T));
    const size_t most = (low_latency ? low_latency_bytes() : workspace_bytes_) / sizeof(T);
    require(!low_latency || count <= most, "low_latency takes at most " + std::to_string(low_latency_bytes()) +
                                               " bytes here, got " + std::to_string(count * sizeof(T)));
    in_pieces(count, most, [&](size_t begin, size_t length) {
      const Call call = sign(operation, {type, average, bits_of(scale), count, begin});
      const T* from = pointer<T>(source) + begin;
      T* to = pointer<T>(destination) + begin;
      const Epilogue end = epilogue(average, scale);
      if (low_latency)
        launch<T>(AllReduceLowLatency<T>{*group_, call, from, to, length, end}, length, stream);
      else if (one_shot)
        launch<T>(AllReduceOneShot<T>{*group_, call, from, to, length, end}, length, stream);
      else
        launch<T>(AllReduceTwoShot<T>{*group_, call, from, to, length, end}, slice_elements<T>(length, group_->world),
                  stream);
    });
  });
}

template <class Machine>
void Ranks<Machine>::all_reduce_rms_norm(uintptr_t partial, uintptr_t residual, uintptr_t weight, uintptr_t normalised,
                                         uintptr_t total, size_t rows, size_t hidden, const std::string& dtype,
                                         float eps, uintptr_t stream) const {
  constexpr Operation operation = Operation::all_reduce_rms_norm;
  const size_t most = rms_norm_rows(hidden, dtype);
  require(rows >= 1 && rows <= most, "all_reduce_rms_norm takes 1 to " + std::to_string(most) + " rows of " +
                                         std::to_string(hidden) + " " + dtype + " elements here, got " +
                                         std::to_string(rows));
  with_element<Machine>("all_reduce_rms_norm", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    for (const uintptr_t address : {partial, residual, weight, normalised, total})
      require_memory("a tensor of all_reduce_rms_norm", address, hidden, sizeof(T));
    const AllReduceRmsNorm<T> body{*group_,
                                   sign(operation, {type, rows, hidden, bits_of(eps)}),
                                   pointer<T>(partial),
                                   pointer<T>(residual),
                                   pointer<T>(weight),
                                   pointer<T>(normalised),
                                   pointer<T>(total),
                                   static_cast<int>(hidden),
                                   eps};
    Machine::launch(name_of(operation), body, static_cast<int>(rows), stream);
  });
}

template <class Machine>
void Ranks<Machine>::all_reduce_in_place(const std::vector<uintptr_t>& addresses, size_t count,
                                         const std::string& dtype, bool average, float scale, uintptr_t stream,
                                         size_t offset) const {
  constexpr Operation operation = Operation::all_reduce_in_place;
  require_one_for_each_rank("addresses of all_reduce_in_place", addresses.size(), group_->world);
  with_element<Machine>("all_reduce_in_place", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    const Call call = sign(operation, {type, average, bits_of(scale), count, offset});
    AllReduceInPlace<T> body{*group_, call, {}, count, epilogue(average, scale)};
    for (int rank = 0; rank < group_->world; ++rank) {
      require_memory("the memory of rank " + std::to_string(rank) + " in all_reduce_in_place", addresses[rank], count,
                     sizeof(T));
      body.parts.at[rank] = pointer<T>(addresses[rank]);
    }
    launch<T>(body, slice_elements<T>(count, group_->world), stream);
  });
}

template <class Machine>
void Ranks<Machine>::all_reduce_multimem(uintptr_t multicast, size_t count, const std::string& dtype, bool average,
                                         float scale, uintptr_t stream, size_t offset, uintptr_t own) const {
  constexpr Operation operation = Operation::all_reduce_multimem;
  with_element<Machine>("all_reduce_multimem", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    require_memory("the multicast address of all_reduce_multimem", multicast, 1, pack_bytes);
    require(own % pack_bytes == 0, "the own address of all_reduce_multimem must be aligned to 16 bytes, got " +
                                       std::to_string(own));
    require(count % per_pack<T> == 0, "all_reduce_multimem takes whole vectors of 16 bytes, so a multiple of " +
                                          std::to_string(per_pack<T>) + " " + dtype + " elements; got " +
                                          std::to_string(count));
    const Call call = sign(operation, {type, average, bits_of(scale), count, offset});
    const AllReduceMultimem<T> body{*group_, call, pointer<T>(multicast), own == 0 ? nullptr : pointer<T>(own), count,
                                    epilogue(average, scale)};
    const int code = Machine::template load<AllReduceMultimem<T>>(name_of(operation));
    if (code < first_with_multimem)
      throw std::runtime_error(name_of(operation) + ": cudaErrorNotSupported (multimem instructions need code for "
                               "sm_90 or later; this device runs code for sm_" + std::to_string(code) + ")");
    launch<T>(body, slice_elements<T>(count, group_->world), stream);
  });
}

template <class Machine>
void Ranks<Machine>::reduce_scatter(uintptr_t source, uintptr_t destination, const std::vector<size_t>& counts,
                                    const std::string& dtype, bool average, float scale, uintptr_t stream) const {
  constexpr Operation operation = Operation::reduce_scatter;
  require_one_for_each_rank("counts of reduce_scatter", counts.size(), group_->world);
  with_element<Machine>("reduce_scatter", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    const size_t longest = *std::max_element(counts.begin(), counts.end());
    require_memory("the source of reduce_scatter", source, longest, sizeof(T));
    require_memory("the destination of reduce_scatter", destination, counts[group_->rank], sizeof(T));
    const size_t most = workspace_bytes_ / group_->world / pack_bytes * per_pack<T>;
    in_pieces(longest, most, [&](size_t begin, size_t length) {
      const Call call = sign(operation, {type, average, bits_of(scale), begin}, counts);
      ReduceScatter<T> body{*group_, call, {}, {}, most, nullptr, epilogue(average, scale), {}};
      const T* part = pointer<T>(source);
      for (int rank = 0; rank < group_->world; ++rank) {
        const size_t done = std::min(begin, counts[rank]);
        body.parts.at[rank] = part + done;
        body.counts[rank] = std::min(length, counts[rank] - done);
        part += counts[rank];
      }
      body.destination = pointer<T>(destination) + std::min(begin, counts[group_->rank]);
      launch<T>(body, length, stream);
    });
  });
}

template <class Machine>
void Ranks<Machine>::reduce_scatter_in_place(const std::vector<uintptr_t>& window, size_t offset, uintptr_t destination,
                                             const std::vector<size_t>& counts, const std::string& dtype, bool average,
                                             float scale, uintptr_t stream, size_t number) const {
  constexpr Operation operation = Operation::reduce_scatter_in_place;
  require_one_for_each_rank("counts of reduce_scatter_in_place", counts.size(), group_->world);
  with_element<Machine>("reduce_scatter_in_place", dtype, [&](auto zero, uint64_t type) {
    using T = decltype(zero);
    const size_t longest = *std::max_element(counts.begin(), counts.end());
    const Call call = sign(operation, {type, average, bits_of(scale), number}, counts);
    ReduceScatter<T> body{*group_, call, {}, {}, 0, pointer<T>(destination), epilogue(average, scale),
                          window_at(window, offset, sizeof(T))};
    require_memory("the destination of reduce_scatter_in_place", destination, counts[group_->rank], sizeof(T));
    const T* part = pointer<T>(window[group_->rank] + offset);
    for (int rank = 0; rank < group_->world; part += counts[rank++]) {
      body.parts.at[rank] = part;
      body.counts[rank] = counts[rank];
    }
    launch<T>(body, longest, stream);
  });
}

template <class Machine>
Window Ranks<Machine>::window_at(const std::vector<uintptr_t>& window, size_t offset, size_t alignment) const {
  require_one_for_each_rank("parts of a window", window.size(), group_->world);
  Window found{{}, offset};
  for (int rank = 0; rank < group_->world; ++rank) {
    require_memory("the window of rank " + std::to_string(rank), window[rank], 1, alignment);
    found.parts[rank] = pointer<const char>(window[rank]);
  }
  require(offset % alignment == 0, "an offset in a window must be a multiple of " + std::to_string(alignment) +
                                       " bytes, got " + std::to_string(offset));
  return found;
}

template <class Machine>
void Ranks<Machine>::all_gather(uintptr_t source, const std::vector<uintptr_t>& destinations,
                                const std::vector<size_t>& bytes, uintptr_t stream) const {
  constexpr Operation operation = Operation::all_gather;
  require_one_for_each_rank("destinations of all_gather", destinations.size(), group_->world);
  require_one_for_each_rank("bytes of all_gather", bytes.size(), group_->world);
  require_memory("the source of all_gather", source, bytes[group_->rank], 1);
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  uintptr_t together = bytes[group_->rank] > 0 ? source : 0;
  for (int rank = 0; rank < group_->world; ++rank) {
    require_memory("the memory for rank " + std::to_string(rank) + " in all_gather", destinations[rank], bytes[rank],
                   1);
    if (bytes[rank] > 0) together |= destinations[rank] | bytes[rank];
  }
  // Uses the widest element that divides all addresses and sizes here. Ranks may use different ones; their packs agree.
  with_width(together, [&](auto zero) {
    using T = decltype(zero);
    in_pieces(longest / sizeof(T), workspace_bytes_ / sizeof(T), [&](size_t begin, size_t length) {
      AllGather<T> body{*group_, sign(operation, {begin * sizeof(T)}, bytes), nullptr, {}, {}, {}};
      for (int rank = 0; rank < group_->world; ++rank) {
        const size_t count = bytes[rank] / sizeof(T), done = std::min(begin, count);
        body.destinations.at[rank] = pointer<T>(destinations[rank]) + done;
        body.counts[rank] = std::min(length, count - done);
      }
      body.source = pointer<T>(source) + std::min(begin, bytes[group_->rank] / sizeof(T));
      launch<T>(body, length, stream);
    });
  });
}

template <class Machine>
void Ranks<Machine>::all_gather_in_place(const std::vector<uintptr_t>& window, size_t offset,
                                         const std::vector<uintptr_t>& destinations, const std::vector<size_t>& bytes,
                                         size_t unit, uintptr_t stream, size_t number) const {
  constexpr Operation operation = Operation::all_gather_in_place;
  require_one_for_each_rank("destinations of all_gather_in_place", destinations.size(), group_->world);
  require_one_for_each_rank("bytes of all_gather_in_place", bytes.size(), group_->world);
  // Elements of peers may begin at any multiple of the unit.
  with_width(unit, [&](auto zero) {
    using T = decltype(zero);
    const Call call = sign(operation, {sizeof(T), number}, bytes);
    AllGather<T> body{*group_, call, nullptr, {}, {}, window_at(window, offset, sizeof(T))};
    body.source = pointer<T>(window[group_->rank] + offset);
    for (int rank = 0; rank < group_->world; ++rank) {
      require_memory("the memory for rank " + std::to_string(rank) + " in all_gather_in_place", destinations[rank],
                     bytes[rank], sizeof(T));
      require(bytes[rank] % sizeof(T) == 0, "all_gather_in_place takes whole elements of " + std::to_string(unit) +
                                                " bytes, got " + std::to_string(bytes[rank]) + " bytes of rank " +
                                                std::to_string(rank));
      body.destinations.at[rank] = pointer<T>(destinations[rank]);
      body.counts[rank] = bytes[rank] / sizeof(T);
    }
    const size_t longest = *std::max_element(bytes.begin(), bytes.end()) / sizeof(T);
    launch<T>(body, longest, stream);
  });
}

template <class Machine>
void Ranks<Machine>::all_gather_by_copies(const std::vector<uintptr_t>& sources,
                                          const std::vector<uintptr_t>& destinations, const std::vector<size_t>& bytes,
                                          uintptr_t stream, size_t number) const {
  constexpr Operation operation = Operation::all_gather_by_copies;
  require_one_for_each_rank("sources of all_gather_by_copies", sources.size(), group_->world);
  require_one_for_each_rank("destinations of all_gather_by_copies", destinations.size(), group_->world);
  require_one_for_each_rank("bytes of all_gather_by_copies", bytes.size(), group_->world);
  const Call call = sign(operation, {number}, bytes);
  AfterCopies body{*group_, call, {}, {}};
  for (int rank = 0; rank < group_->world; ++rank) {
    const std::string whose = "the memory of rank " + std::to_string(rank) + " in all_gather_by_copies";
    require_memory(whose, sources[rank], bytes[rank], 1);
    require_memory(whose, destinations[rank], bytes[rank], 1);
    body.destinations.at[rank] = pointer<uint8_t>(destinations[rank]);
    body.counts[rank] = bytes[rank];
  }
  launch<uint8_t>(Barrier{*group_, call}, 0, stream);
  for (int step = 0; step < group_->world; ++step) {
    const int rank = (group_->rank + step) % group_->world;
    if (bytes[rank] > 0 && sources[rank] != destinations[rank])
      Machine::copy(name_of(operation), destinations[rank], sources[rank], bytes[rank], stream);
  }
  const size_t longest = *std::max_element(bytes.begin(), bytes.end());
  launch<uint8_t>(body, longest, stream);
}

}  // namespace weft::cuda
