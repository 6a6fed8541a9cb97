#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <numeric>

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

// What is left of `bytes` from `offset` on, at most `limit`.
size_t piece(size_t bytes, size_t offset, size_t limit) { return offset < bytes ? std::min(limit, bytes - offset) : 0; }

// One exchange a chunk: every rank stages its chunk and reduces everybody's. Each byte is read world times.
void all_reduce_one_shot(Call& call, const void* input, void* output, size_t bytes, size_t element_bytes,
                         ReduceFunction reduce) {
  const size_t chunk_bytes = call.staging_bytes();
  std::vector<const void*> sources(call.world());
  size_t offset = 0;
  do {
    const size_t n = piece(bytes, offset, chunk_bytes);
    copy_bytes(call.next_staging(), at(input, offset), n);
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank);
    sources[call.rank()] = at(input, offset);
    reduce(sources.data(), sources.size(), at(output, offset), n / element_bytes);
    offset += n;
  } while (offset < bytes);
}

// Two exchanges a chunk: every rank stages its chunk, reduces its own slice of it, and copies the slices of the others.
void all_reduce_two_shot(Call& call, const void* input, void* output, size_t bytes, size_t element_bytes,
                         ReduceFunction reduce) {
  const size_t chunk_bytes = call.staging_bytes();
  const int world = call.world();
  std::vector<const void*> sources(world);
  for (size_t offset = 0; offset < bytes; offset += chunk_bytes) {
    const size_t n = piece(bytes, offset, chunk_bytes);
    const size_t slice_bytes = (n / world + line_bytes) / line_bytes * line_bytes;
    const size_t begin = std::min(n, slice_bytes * call.rank());
    const size_t mine = piece(n, begin, slice_bytes);

    copy_bytes(call.next_staging(), at(input, offset), n);
    call.exchange();
    for (int rank = 0; rank < world; ++rank) sources[rank] = call.staged(rank) + begin;
    reduce(sources.data(), sources.size(), call.next_staging() + begin, mine / element_bytes);
    call.exchange();
    for (int rank = 0; rank < world; ++rank) {
      const size_t slice = std::min(n, slice_bytes * rank);
      copy_bytes(at(output, offset + slice), call.staged(rank) + slice, piece(n, slice, slice_bytes));
    }
  }
}

}  // namespace

void barrier(Group& group) { Call(group, CallHeader{CallKind::barrier}).exchange(); }

void all_reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
  const ReduceFunction reduce = reduce_function(reduce_table(), dtype, op);
  Call call(group, CallHeader{CallKind::all_reduce, dtype, op, 0, count});
  const size_t bytes = count * size_of(dtype);
  // Two exchanges pay once the extra reads of one-shot cost more than the second meeting of the ranks.
  constexpr size_t two_shot_from_bytes = 32 << 10;
  if (group.world() > 2 && bytes >= two_shot_from_bytes)
    all_reduce_two_shot(call, input, output, bytes, size_of(dtype), reduce);
  else
    all_reduce_one_shot(call, input, output, bytes, size_of(dtype), reduce);
}

void all_gather(Group& group, const void* input, const std::vector<void*>& outputs, const std::vector<size_t>& counts,
                DType dtype) {
  Call call(group, CallHeader{CallKind::all_gather, dtype, ReduceOp::sum, 0, total(counts), hash_of(counts)});
  const size_t unit = size_of(dtype), chunk_bytes = call.staging_bytes(), longest = most(counts) * unit;
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
  // The staging buffer holds one piece for each rank.
  const size_t chunk_bytes = call.staging_bytes() / call.world() / line_bytes * line_bytes;
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

}  // namespace weft::shm
