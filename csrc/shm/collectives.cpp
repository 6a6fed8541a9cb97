#include "collectives.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "bytes.h"
#include "direct.h"
#include "reduce.h"

namespace weft::shm {

namespace {

// Returns a hash that is never 0: 0 means "no split".
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

// A call's inputs, copied where an output would overwrite one that is still to be read. `in_place` may be both an input
// and an output: no other rank reads it, or it does not change.
class Inputs {
 public:
  Inputs(const std::vector<const void*>& inputs, const std::vector<size_t>& bytes, const std::vector<void*>& outputs,
         const std::vector<size_t>& output_bytes, const void* in_place)
      : data(inputs) {
    for (size_t i = 0; i < inputs.size(); ++i)
      for (size_t o = 0; o < outputs.size() && data[i] == inputs[i]; ++o) {
        if (inputs[i] == in_place && outputs[o] == in_place) continue;
        if (!overlap(inputs[i], bytes[i], outputs[o], output_bytes[o])) continue;
        copies_.emplace_back(at(inputs[i], 0), at(inputs[i], bytes[i]));
        data[i] = copies_.back().data();
      }
  }

  std::vector<const void*> data;

 private:
  std::vector<std::vector<std::byte>> copies_;
};

std::vector<size_t> in_bytes(const std::vector<size_t>& counts, size_t unit) {
  std::vector<size_t> bytes;
  for (const size_t count : counts) bytes.push_back(count * unit);
  return bytes;
}

// Returns whether the parts follow one another in memory.
bool in_one_piece(const std::vector<const void*>& parts, const std::vector<size_t>& bytes) {
  for (size_t i = 1; i < parts.size(); ++i)
    if (at(parts[i], 0) != at(parts[i - 1], bytes[i - 1])) return false;
  return true;
}

// Returns one rank's share of a staging buffer that holds a piece for each rank, in bytes.
size_t share_of_staging(const Call& call) { return call.staging_bytes() / call.world() / line_bytes * line_bytes; }

}  // namespace

void barrier(Group& group) { Call(group, CallHeader{CallKind::barrier}).exchange(); }

void all_gather(Group& group, const void* input, const std::vector<void*>& outputs, const std::vector<size_t>& counts,
                DType dtype) {
  const size_t unit = size_of(dtype), own_bytes = counts[group.rank()] * unit;
  const Inputs safe({input}, {own_bytes}, outputs, in_bytes(counts, unit), outputs[group.rank()]);
  input = safe.data[0];
  const size_t longest = most(counts) * unit;
  CallHeader header{CallKind::all_gather, dtype, ReduceOp::sum, 0, total(counts), hash_of(counts)};
  Direct direct(group, header, input, own_bytes);
  Call call(group, header);
  if (direct.announce(call, std::vector<const void*>(group.world(), input), longest)) {
    for (int next = 0; next < call.world(); ++next) {
      const int rank = (call.rank() + next) % call.world();
      direct.read(call, rank, 0, outputs[rank], counts[rank] * unit);
    }
    return call.exchange();
  }
  const size_t chunk_bytes = call.staging_bytes();
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
  const size_t unit = size_of(dtype), longest = most(counts) * unit, own_bytes = counts[group.rank()] * unit;
  CallHeader header{CallKind::reduce_scatter, dtype, op, 0, total(counts), hash_of(counts)};
  const Inputs safe(inputs, in_bytes(counts, unit), {output}, {own_bytes}, inputs[group.rank()]);
  const bool whole = in_one_piece(safe.data, in_bytes(counts, unit));
  Direct direct(group, header, safe.data[0], whole ? total(counts) * unit : 0);
  Call call(group, header);
  if (direct.announce(call, safe.data, longest)) {
    reduce_direct(call, direct, 0, own_bytes, false, [&](const auto& parts, size_t offset, size_t bytes) {
      reduce(parts.data(), parts.size(), at(output, offset), bytes / unit);
    });
    return call.exchange();
  }
  std::vector<const void*> sources(call.world());
  const size_t chunk_bytes = share_of_staging(call);
  size_t offset = 0;
  do {
    for (int rank = 0; rank < call.world(); ++rank)
      if (rank != call.rank())
        copy_bytes(call.next_staging() + rank * chunk_bytes, at(safe.data[rank], offset),
             piece(counts[rank] * unit, offset, chunk_bytes));
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank) + call.rank() * chunk_bytes;
    sources[call.rank()] = at(safe.data[call.rank()], offset);
    reduce(sources.data(), sources.size(), at(output, offset),
           piece(counts[call.rank()] * unit, offset, chunk_bytes) / unit);
    offset += chunk_bytes;
  } while (offset < longest);
}

void broadcast(Group& group, void* data, size_t count, DType dtype, int root) {
  const size_t bytes = count * size_of(dtype);
  CallHeader header{CallKind::broadcast, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count};
  Direct direct(group, header, data, bytes);
  Call call(group, header);
  if (direct.announce(call, std::vector<const void*>(group.world(), data), bytes)) {
    if (call.rank() != root) direct.read(call, root, 0, data, bytes);
    return call.exchange();
  }
  const size_t chunk_bytes = call.staging_bytes();
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
  const size_t bytes = count * size_of(dtype);
  CallHeader header{CallKind::reduce, dtype, op, static_cast<uint32_t>(root), count};
  Direct direct(group, header, input, bytes);
  Call call(group, header);
  if (direct.announce(call, std::vector<const void*>(group.world(), input), bytes)) {
    if (call.rank() == root)
      reduce_direct(call, direct, 0, bytes, false, [&](const auto& parts, size_t offset, size_t n) {
        reduce(parts.data(), parts.size(), at(output, offset), n / size_of(dtype));
      });
    return call.exchange();
  }
  std::vector<const void*> sources(call.world());
  const size_t chunk_bytes = call.staging_bytes();
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
  const size_t bytes = count * size_of(dtype);
  CallHeader header{CallKind::gather, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count};
  Direct direct(group, header, input, bytes);
  Call call(group, header);
  if (direct.announce(call, std::vector<const void*>(group.world(), input), bytes)) {
    if (call.rank() == root)
      for (int rank = 0; rank < call.world(); ++rank) direct.read(call, rank, 0, outputs[rank], bytes);
    return call.exchange();
  }
  const size_t chunk_bytes = call.staging_bytes();
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
  const size_t bytes = count * size_of(dtype);
  CallHeader header{CallKind::scatter, dtype, ReduceOp::sum, static_cast<uint32_t>(root), count};
  Direct direct(group, header, nullptr, 0);
  Call call(group, header);
  if (direct.announce(call, call.rank() == root ? inputs : std::vector<const void*>(call.world()), bytes)) {
    direct.read(call, root, 0, output, bytes);
    return call.exchange();
  }
  const size_t chunk_bytes = share_of_staging(call);
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
  const int world = group.world();
  const size_t unit = size_of(dtype);
  const std::vector<size_t> bytes = in_bytes(input_counts, unit);
  const Inputs safe(inputs, bytes, outputs, in_bytes(output_counts, unit), inputs[group.rank()]);
  CallHeader header{CallKind::all_to_all, dtype};
  Direct direct(group, header, safe.data[0], in_one_piece(safe.data, bytes) ? total(bytes) : 0);
  Call call(group, header);
  call.record_count(total(input_counts));

  // First the sizes: how much each rank sends to each, and how much it expects from each. Little data goes with them.
  auto* announced = reinterpret_cast<uint64_t*>(call.next_staging());
  std::copy(input_counts.begin(), input_counts.end(), announced);
  std::copy(output_counts.begin(), output_counts.end(), announced + world);
  const size_t sizes_bytes = 2 * world * sizeof *announced;
  const size_t little_bytes = std::min<size_t>(8 << 10, call.staging_bytes() - sizes_bytes);
  if (total(bytes) <= little_bytes) {
    std::byte* place = call.next_staging() + sizes_bytes;
    for (int rank = 0; rank < world; place += bytes[rank++]) copy_bytes(place, safe.data[rank], bytes[rank]);
  }
  call.exchange();
  uint64_t most_elements = 0;
  bool all_little = true;
  for (int from = 0; from < world; ++from) {
    const auto* sent = reinterpret_cast<const uint64_t*>(call.staged(from));
    all_little = all_little && std::accumulate(sent, sent + world, uint64_t{0}) * unit <= little_bytes;
    for (int to = 0; to < world; ++to) {
      const uint64_t expected = reinterpret_cast<const uint64_t*>(call.staged(to))[world + from];
      if (sent[to] != expected)
        throw CollectiveMismatchError(call.text() + ": rank " + std::to_string(group.label(from)) + " sends " +
                                      std::to_string(sent[to]) + " elements to rank " +
                                      std::to_string(group.label(to)) + ", which expects " + std::to_string(expected) + ".");
      most_elements = std::max(most_elements, sent[to]);
    }
  }

  if (all_little) {
    for (int from = 0; from < world; ++from) {
      const auto* sent = reinterpret_cast<const uint64_t*>(call.staged(from));
      const size_t before = std::accumulate(sent, sent + call.rank(), uint64_t{0}) * unit;
      copy_bytes(outputs[from], call.staged(from) + sizes_bytes + before, output_counts[from] * unit);
    }
    return;
  }

  const size_t longest = most_elements * unit;
  if (direct.announce(call, safe.data, longest)) {
    for (int next = 0; next < world; ++next) {
      const int rank = (call.rank() + next) % world;
      direct.read(call, rank, 0, outputs[rank], output_counts[rank] * unit);
    }
    return call.exchange();
  }
  const size_t chunk_bytes = share_of_staging(call);
  for (size_t offset = 0; offset < longest; offset += chunk_bytes) {
    for (int rank = 0; rank < world; ++rank)
      copy_bytes(call.next_staging() + rank * chunk_bytes, at(safe.data[rank], offset),
                 piece(input_counts[rank] * unit, offset, chunk_bytes));
    call.exchange();
    for (int rank = 0; rank < world; ++rank)
      copy_bytes(at(outputs[rank], offset), call.staged(rank) + call.rank() * chunk_bytes,
                 piece(output_counts[rank] * unit, offset, chunk_bytes));
  }
}

}  // namespace weft::shm
