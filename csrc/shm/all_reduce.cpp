#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bytes.h"
#include "collectives.h"
#include "reduce.h"

namespace weft::shm {

namespace {

// Per-element work of an all_reduce, with or without a fusion.
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

  // Sets the norm if every rank has reduced every element.
  void norm_is_whole() const {
    if (measures()) *squared_norm_ = partial_norm_;
  }
  // If each rank has reduced its slice, its part of the norm is staged before an exchange and added up after it.
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

// One exchange per chunk. Every rank stages its chunk and reduces the chunks of all. Each byte is read world times.
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

// Two exchanges per chunk. Every rank stages its chunk, reduces its own slice, and copies the slices of the others.
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

// Two exchanges in all, in symmetric memory. Every rank reduces its own slice straight from the memory of all ranks and
// writes the result to all of them. Each rank reads and writes every byte once, which is the minimum.
void all_reduce_in_place(Call& call, const Region& region, size_t offset, size_t count, const Pass& pass) {
  constexpr size_t block_bytes = 16 << 10;  // small enough to be copied out while it is in the first-level cache
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
  call.exchange();  // after it every slice is written on every rank
  pass.add_staged_norms(call);
}

void all_reduce(Group& group, const void* input, void* output, size_t count, CallHeader header, const Pass& pass) {
  const size_t bytes = count * pass.element_bytes;
  // From this size on, the extra reads of one-shot cost more than a second exchange.
  constexpr size_t two_shot_from_bytes = 32 << 10;
  // Below this size, the copy to a staging buffer costs less than the exchange in which ranks agree on zero copy.
  constexpr size_t zero_copy_from_bytes = 64 << 10;
  // Elements that travel in another type are always staged.
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

void all_reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op) {
  all_reduce(group, input, output, count, CallHeader{CallKind::all_reduce, dtype, op, 0, count}, Pass(dtype, op));
}

void all_reduce_fused(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op, DType wire,
                      double scale, double* squared_norm) {
  CallHeader header{CallKind::all_reduce, dtype, op, 0, count};
  header.fusion = {true, wire, scale, squared_norm != nullptr};
  all_reduce(group, input, output, count, header, Pass(dtype, op, wire, scale, squared_norm));
}

}  // namespace weft::shm
