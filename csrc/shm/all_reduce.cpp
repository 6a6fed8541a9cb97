#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bytes.h"
#include "collectives.h"
#include "direct.h"
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

  void to_wire(const Call& call, void* staging, const void* input, size_t count) const {
    share(call, count, [&](size_t begin, size_t n) {
      const void* from = at(input, begin * element_bytes);
      void* to = at(staging, begin * wire_bytes);
      narrow_ != nullptr ? narrow_(from, to, n) : copy_bytes(to, from, n * element_bytes);
    });
  }
  void from_wire(const Call& call, void* output, const void* staging, size_t count) const {
    share(call, count, [&](size_t begin, size_t n) {
      const void* from = at(staging, begin * wire_bytes);
      void* to = at(output, begin * element_bytes);
      widen_ != nullptr ? widen_(from, to, n) : copy_bytes(to, from, n * element_bytes);
    });
  }
  void reduce_to_wire(const Call& call, const std::vector<const void*>& sources, void* staging, size_t count) const {
    reduce_shared(call, sources, staging, count, to_wire_, wire_bytes);
  }
  void reduce_to_output(const Call& call, const std::vector<const void*>& sources, void* output, size_t count) const {
    reduce_shared(call, sources, output, count, to_output_, element_bytes);
  }
  // As the one before, on this thread.
  void reduce_to_output(const std::vector<const void*>& sources, void* output, size_t count) const {
    reduce_alone(sources, output, count, to_output_);
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
  template <class Work>
  void share(const Call& call, size_t count, const Work& work) const {  // work(first element, elements)
    call.share(count * element_bytes, [&](size_t begin, size_t end) {
      work(begin / element_bytes, (end - begin) / element_bytes);
    });
  }
  void reduce_alone(const std::vector<const void*>& sources, void* destination, size_t count, SumFunction sum) const {
    fused_ ? sum(sources.data(), sources.size(), destination, count, epilogue_)
           : plain_(sources.data(), sources.size(), destination, count);
  }
  void reduce_shared(const Call& call, const std::vector<const void*>& sources, void* destination, size_t count,
                     SumFunction sum, size_t destination_bytes) const {
    if (measures()) return reduce_alone(sources, destination, count, sum);  // the norm is added up in order
    share(call, count, [&](size_t begin, size_t n) {
      std::vector<const void*> parts;
      for (const void* source : sources) parts.push_back(at(source, begin * wire_bytes));
      reduce_alone(parts, at(destination, begin * destination_bytes), n, sum);
    });
  }

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
    pass.to_wire(call, call.next_staging(), at(input, offset), n);
    call.exchange();
    for (int rank = 0; rank < call.world(); ++rank) sources[rank] = call.staged(rank);
    if (!pass.converts()) sources[call.rank()] = at(input, offset);
    pass.reduce_to_output(call, sources, at(output, offset), n);
    begin += n;
  } while (begin < count);
  pass.norm_is_whole();
}

// Two exchanges per chunk. Every rank stages the slices of the others, reduces its own, and copies those of the others.
void all_reduce_two_shot(Call& call, const void* input, void* output, size_t count, const Pass& pass) {
  const size_t chunk = call.staging_bytes() / pass.wire_bytes, line = line_bytes / pass.wire_bytes;
  const int world = call.world();
  std::vector<const void*> sources(world);
  for (size_t begin = 0; begin < count; begin += chunk) {
    const size_t n = piece(count, begin, chunk), offset = begin * pass.element_bytes;
    const size_t slice = (n / world + line) / line * line;
    const size_t mine = std::min(n, slice * call.rank());

    const size_t after = pass.converts() ? mine : mine + piece(n, mine, slice);  // its own slice it needs itself
    pass.to_wire(call, call.next_staging(), at(input, offset), mine);
    pass.to_wire(call, call.next_staging() + after * pass.wire_bytes, at(input, offset + after * pass.element_bytes),
                 n - after);
    call.exchange();
    for (int rank = 0; rank < world; ++rank) sources[rank] = call.staged(rank) + mine * pass.wire_bytes;
    if (!pass.converts()) sources[call.rank()] = at(input, offset + mine * pass.element_bytes);
    pass.reduce_to_wire(call, sources, call.next_staging() + mine * pass.wire_bytes, piece(n, mine, slice));
    call.exchange();
    for (int rank = 0; rank < world; ++rank) {
      const size_t theirs = std::min(n, slice * rank);
      pass.from_wire(call, at(output, offset + theirs * pass.element_bytes), call.staged(rank) + theirs * pass.wire_bytes,
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
void all_reduce_in_place(Call& call, const Direct& direct, void* data, size_t count, const Pass& pass) {
  const int world = call.world();
  const size_t bytes = count * pass.element_bytes;
  const size_t slice_bytes = (bytes / world + line_bytes) / line_bytes * line_bytes;
  const size_t begin = std::min(bytes, slice_bytes * call.rank());
  const auto reduce = [&](const std::vector<const void*>& sources, size_t offset, size_t n) {
    pass.reduce_to_output(sources, at(data, offset), n / pass.element_bytes);
    for (int rank = 0; rank < world; ++rank)
      copy_bytes(const_cast<std::byte*>(direct.at(rank, offset)), at(data, offset), n);
  };
  // The norm is added up from the first block to the last.
  reduce_direct(call, direct, begin, begin + piece(bytes, begin, slice_bytes), pass.measures(), reduce);
  pass.stage_norm(call);
  call.exchange();  // after it every slice is written on every rank
  pass.add_staged_norms(call);
}

void all_reduce(Group& group, const void* input, void* output, size_t count, CallHeader header, const Pass& pass) {
  const size_t bytes = count * pass.element_bytes;
  // From this size on, the extra reads of one-shot cost more than a second exchange.
  constexpr size_t two_shot_from_bytes = 32 << 10;
  // Elements that travel in another type are always staged. So are those in ordinary memory: single copies are no faster,
  // since a reduction reads what it gets from the cache in either way.
  const bool may_be_in_place = group.has_had_regions() && !pass.converts();
  Direct direct(group, header, output, may_be_in_place && input == output ? bytes : 0);
  Call call(group, header);
  const size_t part_bytes = may_be_in_place ? bytes / group.world() : 0;
  if (direct.announce(call, std::vector<const void*>(group.world(), output), part_bytes) && direct.mapped())
    return all_reduce_in_place(call, direct, output, count, pass);
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
