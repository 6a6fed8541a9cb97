#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "reduce.h"

namespace weft::shm {

namespace {

constexpr size_t line_bytes = 64;

const std::byte* at(const void* data, size_t offset_bytes) { return static_cast<const std::byte*>(data) + offset_bytes; }
std::byte* at(void* data, size_t offset_bytes) { return static_cast<std::byte*>(data) + offset_bytes; }

void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes > 0 && destination != source) memcpy(destination, source, bytes);
}

// Never 0, which stands for "no split".
uint64_t hash_of(const std::vector<size_t>& counts) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (const size_t count : counts) hash = (hash ^ count) * 0x100000001b3u;
  return hash | 1;
}

size_t total(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

size_t most(const std::vector<size_t>& counts) { return *std::max_element(counts.begin(), counts.end()); }

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && at(a, 0) < at(b, b_bytes) && at(b, 0) < at(a, a_bytes);
}

// What is left of `bytes` from `offset` on, at most `limit`.
size_t piece(size_t bytes, size_t offset, size_t limit) { return offset < bytes ? std::min(limit, bytes - offset) : 0; }

// Of one rank, where a staging buffer holds a piece for each.
size_t share_of_staging(const Call& call) { return call.staging_bytes() / call.world() / line_bytes * line_bytes; }

// How an all_reduce treats elements on their way: as they are, or with a fusion.
class Pass {
 public:
  Pass(DType dtype, ReduceOp op) : element_bytes(size_of(dtype)), wire_bytes(element_bytes) {
    plain_ = reduce_function(reduce_table(), dtype, op);
  }
  Pass(DType dtype, ReduceOp op, DType wire, double scale, double* squared_norm)
      : element_bytes(size_of(dtype)), wire_bytes(size_of(wire)), fused_(true), squared_norm_(squared_norm) {
    if (op != ReduceOp::sum && op != ReduceOp::average)
      throw std::invalid_argument(std::string("a wire type, a scale and a norm go with sums and averages, not with \"") +
                                  name_of(op) + "\"");
    epilogue_ = {op == ReduceOp::average, scale, squared_norm == nullptr ? nullptr : &partial_norm_};
    to_wire_ = sum_function(reduce_table(), wire, wire);
    to_output_ = sum_function(reduce_table(), wire, dtype);
    if (wire == dtype) return;
    narrow_ = convert_function(reduce_table(), dtype, wire);
    widen_ = convert_function(reduce_table(), wire, dtype);
  }

  Pass(const Pass&) = delete;  // the epilogue points into it

  bool converts() const { return narrow_ != nullptr; }
  bool measures() const { return squared_norm_ != nullptr; }

  void to_wire(void* staging, const void* input, size_t count) const {
    if (narrow_ != nullptr)
      narrow_(input, staging, count);
    else
      copy_bytes(staging, input, count * element_bytes);
  }
  void from_wire(void* output, const void* staging, size_t count) const {
    if (widen_ != nullptr)
      widen_(staging, output, count);
    else
      copy_bytes(output, staging, count * element_bytes);
  }
  void reduce_to_wire(const std::vector<const void*>& sources, void* staging, size_t count) const {
    fused_ ? to_wire_(sources.data(), sources.size(), staging, count, epilogue_)
           : plain_(sources.data(), sources.size(), staging, count);
  }
  void reduce_to_output(const std::vector<const void*>& sources, void* output, size_t count) const {
    fused_ ? to_output_(sources.data(), sources.size(), output, count, epilogue_)
           : plain_(sources.data(), sources.size(), output, count);
  }

  // The norm, where every rank has reduced every element.
  void norm_is_whole() const {
    if (measures()) *squared_norm_ = partial_norm_;
  }
  // The norm, where every rank has reduced its slice: it is staged before an exchange and added up after it.
  void stage_norm(Call& call) const {
    if (measures()) memcpy(call.next_staging(), &partial_norm_, sizeof partial_norm_);
  }
  void add_staged_norms(const Call& call) const {
    if (!measures()) return;
    *squared_norm_ = 0;
    for (int rank = 0; rank < call.world(); ++rank) {
      double part;
      memcpy(&part, call.staged(rank), sizeof part);
      *squared_norm_ += part;
    }
  }

  const size_t element_bytes, wire_bytes;

 private:
  ReduceFunction plain_ = nullptr;
  bool fused_ = false;
  SumFunction to_wire_ = nullptr, to_output_ = nullptr;
  ConvertFunction narrow_ = nullptr, widen_ = nullptr;
  Epilogue epilogue_;
  double partial_norm_ = 0;
  double* squared_norm_ = nullptr;
};

// One exchange a chunk: every rank stages its chunk and reduces everybody's. Each byte is read world times.
void all_reduce_one_shot(Call& call, const void* input, void* output, size_t count, const Pass& pass) {
  const size_t chunk = call.staging_bytes() / pass.wire_bytes;
  std::vector<const void*> sources(call.world());
  size_t begin = 0;
  do {
    const size_t n = piece(count, begin, chunk), offset = begin * pass.element_bytes;
    pass.to_wire(call.next_staging(), at(input, offset), n);
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank);
    if (!pass.converts()) sources[call.rank()] = at(input, offset);
    pass.reduce_to_output(sources, at(output, offset), n);
    begin += n;
  } while (begin < count);
  pass.norm_is_whole();
}

// Two exchanges a chunk: every rank stages its chunk, reduces its own slice of it, and copies the slices of the others.
void all_reduce_two_shot(Call& call, const void* input, void* output, size_t count, const Pass& pass) {
  const size_t chunk = call.staging_bytes() / pass.wire_bytes, line = line_bytes / pass.wire_bytes;
  const int world = call.world();
  std::vector<const void*> sources(world);
  for (size_t begin = 0; begin < count; begin += chunk) {
    const size_t n = piece(count, begin, chunk), offset = begin * pass.element_bytes;
    const size_t slice = (n / world + line) / line * line;
    const size_t mine = std::min(n, slice * call.rank());

    pass.to_wire(call.next_staging(), at(input, offset), n);
    call.exchange();
    for (int rank = 0; rank < world; ++rank) sources[rank] = call.staged(rank) + mine * pass.wire_bytes;
    pass.reduce_to_wire(sources, call.next_staging() + mine * pass.wire_bytes, piece(n, mine, slice));
    call.exchange();
    for (int rank = 0; rank < world; ++rank) {
      const size_t theirs = std::min(n, slice * rank);
      pass.from_wire(at(output, offset + theirs * pass.element_bytes), call.staged(rank) + theirs * pass.wire_bytes,
                     piece(n, theirs, slice));
    }
  }
  if (!pass.measures()) return;
  pass.stage_norm(call);
  call.exchange();
  pass.add_staged_norms(call);
}

// Two exchanges in all, in symmetric memory: every rank reduces its own slice straight from the ranks' memory and writes
// the result to all of them. Each rank reads and writes every byte once, which is the least there is.
void all_reduce_in_place(Call& call, const Region& region, size_t offset, size_t count, const Pass& pass) {
  constexpr size_t block_bytes = 16 << 10;  // a reduced block is copied out while it is in the first-level cache
  const int world = call.world();
  const size_t bytes = count * pass.element_bytes;
  const size_t slice_bytes = (bytes / world + line_bytes) / line_bytes * line_bytes;
  const size_t begin = std::min(bytes, slice_bytes * call.rank());
  const size_t end = begin + piece(bytes, begin, slice_bytes);
  std::vector<const void*> sources(world);
  for (size_t block = begin; block < end; block += block_bytes) {
    const size_t n = std::min(block_bytes, end - block);
    for (int rank = 0; rank < world; ++rank) sources[rank] = region.part(rank) + offset + block;
    std::byte* mine = region.part(call.rank()) + offset + block;
    pass.reduce_to_output(sources, mine, n / pass.element_bytes);
    for (int rank = 0; rank < world; ++rank) copy_bytes(region.part(rank) + offset + block, mine, n);
  }
  pass.stage_norm(call);
  call.exchange();  // every slice is written everywhere
  pass.add_staged_norms(call);
}

void all_reduce(Group& group, const void* input, void* output, size_t count, CallHeader header, const Pass& pass) {
  const size_t bytes = count * pass.element_bytes;
  // Two exchanges pay once the extra reads of one-shot cost more than the second meeting of the ranks.
  constexpr size_t two_shot_from_bytes = 32 << 10;
  // Below, the copy to a staging buffer costs less than the exchange that zero copy has to spend on agreeing.
  constexpr size_t zero_copy_from_bytes = 64 << 10;
  // What travels in another type is staged in any case.
  const bool large =
      bytes >= zero_copy_from_bytes && group.has_had_regions() && group.world() > 1 && !pass.converts();
  std::shared_ptr<Region> region;
  if (large && input == output) header.place = group.place_of(output, bytes, &region);
  Call call(group, header);
  if (large) {
    call.exchange();
    if (call.same_place()) return all_reduce_in_place(call, *region, header.place - region->first_place, count, pass);
  }
  if (group.world() > 2 && bytes >= two_shot_from_bytes)
    all_reduce_two_shot(call, input, output, count, pass);
  else
    all_reduce_one_shot(call, input, output, count, pass);
}

}  // namespace

void barrier(Group& group) { Call(group, CallHeader{CallKind::barrier}).exchange(); }

void all_reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
  all_reduce(group, input, output, count, CallHeader{CallKind::all_reduce, dtype, op, 0, count}, Pass(dtype, op));
}

void all_reduce_fused(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op, DType wire,
                      double scale, double* squared_norm) {
  CallHeader header{CallKind::all_reduce, dtype, op, 0, count};
  header.fusion = {true, wire, scale, squared_norm != nullptr};
  all_reduce(group, input, output, count, header, Pass(dtype, op, wire, scale, squared_norm));
}

void all_gather(Group& group, const void* input, const std::vector<void*>& outputs, const std::vector<size_t>& counts,
                DType dtype) {
  const size_t unit = size_of(dtype), own_bytes = counts[group.rank()] * unit;
  std::vector<std::byte> saved;  // of an input that lies in another rank's output, and would be overwritten
  for (int rank = 0; rank < group.world(); ++rank) {
    if (rank == group.rank() || !overlap(input, own_bytes, outputs[rank], counts[rank] * unit)) continue;
    saved.assign(at(input, 0), at(input, own_bytes));
    input = saved.data();
    break;
  }
  Call call(group, CallHeader{CallKind::all_gather, dtype, ReduceOp::sum, 0, total(counts), hash_of(counts)});
  const size_t chunk_bytes = call.staging_bytes(), longest = most(counts) * unit;
  size_t offset = 0;
  do {
    copy_bytes(call.next_staging(), at(input, offset), piece(counts[call.rank()] * unit, offset, chunk_bytes));
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) {
      const void* source = rank == call.rank() ? at(input, offset) : call.staged(rank);
      copy_bytes(at(outputs[rank], offset), source, piece(counts[rank] * unit, offset, chunk_bytes));
    }
    offset += chunk_bytes;
  } while (offset < longest);
}

void reduce_scatter(Group& group, const std::vector<const void*>& inputs, void* output,
                    const std::vector<size_t>& counts, DType dtype, ReduceOp op) {
  const ReduceFunction reduce = reduce_function(reduce_table(), dtype, op);
  Call call(group, CallHeader{CallKind::reduce_scatter, dtype, op, 0, total(counts), hash_of(counts)});
  const size_t unit = size_of(dtype), longest = most(counts) * unit;
  const size_t chunk_bytes = share_of_staging(call);
  std::vector<const void*> sources(call.world());
  size_t offset = 0;
  do {
    for (int rank = 0; rank < call.world(); ++rank)
      if (rank != call.rank())
        copy_bytes(call.next_staging() + rank * chunk_bytes, at(inputs[rank], offset),
             piece(counts[rank] * unit, offset, chunk_bytes));
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank) + call.rank() * chunk_bytes;
    sources[call.rank()] = at(inputs[call.rank()], offset);
    reduce(sources.data(), sources.size(), at(output, offset),
           piece(counts[call.rank()] * unit, offset, chunk_bytes) / unit);
    offset += chunk_bytes;
  } while (offset < longest);
}

void broadcast(Group& group, void* data, size_t count, DType dtype, int root) {
  Call call(group, CallHeader{CallKind::broadcast, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count});
  const size_t bytes = count * size_of(dtype), chunk_bytes = call.staging_bytes();
  size_t offset = 0;
  do {
    const size_t n = piece(bytes, offset, chunk_bytes);
    if (call.rank() == root) copy_bytes(call.next_staging(), at(data, offset), n);
    call.exchange();
    if (call.rank() != root) copy_bytes(at(data, offset), call.staged(root), n);
    offset += n;
  } while (offset < bytes);
}

void reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op, int root) {
  const ReduceFunction reduce = reduce_function(reduce_table(), dtype, op);
  Call call(group, CallHeader{CallKind::reduce, dtype, op, static_cast<uint32_t>(root), count});
  const size_t bytes = count * size_of(dtype), chunk_bytes = call.staging_bytes();
  std::vector<const void*> sources(call.world());
  size_t offset = 0;
  do {
    const size_t n = piece(bytes, offset, chunk_bytes);
    if (call.rank() != root) copy_bytes(call.next_staging(), at(input, offset), n);
    call.exchange();
    if (call.rank() == root) {
      for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank);
      sources[root] = at(input, offset);
      reduce(sources.data(), sources.size(), at(output, offset), n / size_of(dtype));
    }
    offset += n;
  } while (offset < bytes);
}

void gather(Group& group, const void* input, const std::vector<void*>& outputs, size_t count, DType dtype, int root) {
  Call call(group, CallHeader{CallKind::gather, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count});
  const size_t bytes = count * size_of(dtype), chunk_bytes = call.staging_bytes();
  size_t offset = 0;
  do {
    const size_t n = piece(bytes, offset, chunk_bytes);
    copy_bytes(call.next_staging(), at(input, offset), n);
    call.exchange();
    if (call.rank() == root)
      for (int rank = 0; rank < call.world(); ++rank) copy_bytes(at(outputs[rank], offset), call.staged(rank), n);
    offset += n;
  } while (offset < bytes);
}

void scatter(Group& group, const std::vector<const void*>& inputs, void* output, size_t count, DType dtype, int root) {
  Call call(group, CallHeader{CallKind::scatter, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count});
  const size_t bytes = count * size_of(dtype), chunk_bytes = share_of_staging(call);
  size_t offset = 0;
  do {
    const size_t n = piece(bytes, offset, chunk_bytes);
    if (call.rank() == root)
      for (int rank = 0; rank < call.world(); ++rank)
        copy_bytes(call.next_staging() + rank * chunk_bytes, at(inputs[rank], offset), n);
    call.exchange();
    copy_bytes(at(output, offset), call.staged(root) + call.rank() * chunk_bytes, n);
    offset += n;
  } while (offset < bytes);
}

void all_to_all(Group& group, const std::vector<const void*>& inputs, const std::vector<size_t>& input_counts,
                const std::vector<void*>& outputs, const std::vector<size_t>& output_counts, DType dtype) {
  Call call(group, CallHeader{CallKind::all_to_all, dtype});
  const int world = call.world();
  const size_t unit = size_of(dtype);

  // First the sizes: what each rank sends to each, and what it expects of each.
  auto* announced = reinterpret_cast<uint64_t*>(call.next_staging());
  std::copy(input_counts.begin(), input_counts.end(), announced);
  std::copy(output_counts.begin(), output_counts.end(), announced + world);
  call.exchange();
  uint64_t most_elements = 0;
  for (int from = 0; from < world; ++from) {
    const auto* sent = reinterpret_cast<const uint64_t*>(call.staged(from));
    for (int to = 0; to < world; ++to) {
      const uint64_t expected = reinterpret_cast<const uint64_t*>(call.staged(to))[world + from];
      if (sent[to] != expected)
        throw CollectiveMismatchError(call.text() + ": rank " + std::to_string(from) + " sends " +
                                      std::to_string(sent[to]) + " elements to rank " + std::to_string(to) +
                                      ", which expects " + std::to_string(expected) + ".");
      most_elements = std::max(most_elements, sent[to]);
    }
  }

  const size_t chunk_bytes = share_of_staging(call), longest = most_elements * unit;
  for (size_t offset = 0; offset < longest; offset += chunk_bytes) {
    for (int rank = 0; rank < world; ++rank)
      copy_bytes(call.next_staging() + rank * chunk_bytes, at(inputs[rank], offset),
                 piece(input_counts[rank] * unit, offset, chunk_bytes));
    call.exchange();
    for (int rank = 0; rank < world; ++rank)
      copy_bytes(at(outputs[rank], offset), call.staged(rank) + call.rank() * chunk_bytes,
                 piece(output_counts[rank] * unit, offset, chunk_bytes));
  }
}

}  // namespace weft::shm
