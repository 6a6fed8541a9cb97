// One random collective: what this rank passes, and what it must get back.
#pragma once
#include <deque>

#include "collectives.h"
#include "ranks.h"

// Memory that ends where its allocation ends, so that an address sanitizer sees the first byte too many. Of no bytes: a
// null pointer, as of an empty tensor.
class Buffer {
 public:
  Buffer(const Bytes& data, size_t before) : bytes_(data.size()), storage_(before) {
    storage_.insert(storage_.end(), data.begin(), data.end());
    storage_.shrink_to_fit();
  }
  void* data() { return bytes_ == 0 ? nullptr : storage_.data() + storage_.size() - bytes_; }

 private:
  size_t bytes_;
  Bytes storage_;
};

inline size_t random_count(Random& random) {
  constexpr size_t counts[] = {0, 1, 2, 3, 17, 64, 255, 1000, 1024, 4099, 9000, 20000};
  return counts[random.below(random.one_in(2) ? std::size(counts) : 9)];
}

class Trial {
 public:
  // Ranks decide alike by `key`. `scratch`: this rank's part of symmetric memory that no other trial uses, or null.
  Trial(Group& group, uint64_t key, bool may_mismatch, std::byte* scratch, size_t scratch_bytes)
      : group_(group), rank_(group.rank()), world_(group.world()), key_(key) {
    Random plan(key), own(key_of(key, rank_ + 1));
    kind_ = static_cast<CallKind>(plan.below(static_cast<size_t>(CallKind::count)));
    if (plan.one_in(4)) kind_ = CallKind::all_reduce;
    root_ = static_cast<int>(plan.below(world_));
    reduction_.op = static_cast<ReduceOp>(plan.below(reduce_op_count));
    dtype_ = reduction_.dtype = static_cast<DType>(plan.below(reduces() ? reduced_dtype_count : dtype_count));
    if (!reduction_.known()) reduction_.op = ReduceOp::sum;
    if (kind_ == CallKind::all_reduce && is_floating(dtype_) && plan.one_in(2)) choose_fusion(plan);
    const size_t most = random_count(plan);
    for (int part = 0; part < world_ * world_; ++part)
      counts_.push_back(plan.one_in(2) ? most : most / (1 + plan.below(4)) * plan.below(2));

    mismatched_ = may_mismatch && world_ > 1 && kind_ != CallKind::barrier && plan.one_in(10);
    const bool differs = static_cast<int>(plan.below(world_)) == rank_ && mismatched_;
    if (differs && plan.one_in(2)) kind_ = CallKind::barrier;
    if (differs)
      for (size_t& count : counts_) ++count;

    for (int to = 0; to < (is_split() ? world_ : 1); ++to)
      inputs_.push_back(gives() ? place(elements(dtype_, count(rank_, to), data_key(rank_, to)), own) : nullptr);
    for (int from = 0; from < (is_gathered() ? world_ : 1); ++from)
      outputs_.push_back(place(Bytes(count(from, rank_) * size_of(dtype_)), own));
    const size_t bytes = count(rank_, 0) * size_of(dtype_);
    const bool has_one = kind_ == CallKind::all_reduce || kind_ == CallKind::all_gather || kind_ == CallKind::gather;
    if (has_one && bytes <= scratch_bytes && bytes > 0 && plan.one_in(2)) {
      // At the same place on every rank, or not.
      if (plan.one_in(4) && bytes + 64 * world_ <= scratch_bytes) scratch += 64 * rank_;
      memcpy(scratch, inputs_[0], bytes);
      inputs_[0] = scratch;
      if (kind_ == CallKind::all_reduce) outputs_[0] = scratch;
    } else if (own.one_in(2)) {
      share_memory();
    }
  }
  Trial(const Trial&) = delete;

  bool mismatched() const { return mismatched_; }

  void call() {
    const std::vector<const void*> inputs(inputs_.begin(), inputs_.end());
    const ReduceOp op = reduction_.op;
    switch (kind_) {
      case CallKind::barrier: return barrier(group_);
      case CallKind::all_reduce:
        if (!reduction_.fusion.used) return all_reduce(group_, inputs[0], outputs_[0], count(0, 0), dtype_, op);
        return all_reduce_fused(group_, inputs[0], outputs_[0], count(0, 0), dtype_, op, reduction_.fusion.wire,
                                reduction_.fusion.scale, reduction_.fusion.measured ? &squared_norm_ : nullptr);
      case CallKind::all_gather: return all_gather(group_, inputs[0], outputs_, split(), dtype_);
      case CallKind::reduce_scatter: return reduce_scatter(group_, inputs, outputs_[0], split(), dtype_, op);
      case CallKind::broadcast:
        return broadcast(group_, rank_ == root_ ? inputs_[0] : outputs_[0], count(0, 0), dtype_, root_);
      case CallKind::reduce: return reduce(group_, inputs[0], outputs_[0], count(0, 0), dtype_, op, root_);
      case CallKind::gather: return gather(group_, inputs[0], outputs_, count(0, 0), dtype_, root_);
      case CallKind::scatter: return scatter(group_, inputs, outputs_[0], count(0, 0), dtype_, root_);
      case CallKind::all_to_all:
      case CallKind::count: break;
    }
    std::vector<size_t> sent, received;
    for (int peer = 0; peer < world_; ++peer) {
      sent.push_back(count(rank_, peer));
      received.push_back(count(peer, rank_));
    }
    all_to_all(group_, inputs, sent, outputs_, received, dtype_);
  }

  void check() const {
    const std::string text = "the result of kind " + std::to_string(static_cast<int>(kind_)) + " in " +
                             name_of(dtype_) + " by " + name_of(reduction_.op) + " on rank " + std::to_string(rank_);
    const bool at_root = kind_ == CallKind::reduce || kind_ == CallKind::gather;
    if (kind_ == CallKind::barrier || (at_root && rank_ != root_)) return;
    if (kind_ == CallKind::broadcast && rank_ == root_) return;
    if (!reduces()) {
      for (size_t i = 0; i < outputs_.size(); ++i) {
        const int from = is_gathered() ? static_cast<int>(i) : root_;
        const Bytes expected = elements(dtype_, count(from, rank_), data_key(from, rank_));
        expect(expected.empty() || memcmp(outputs_[i], expected.data(), expected.size()) == 0, text);
      }
      return;
    }
    std::vector<Bytes> parts;
    for (int from = 0; from < world_; ++from)
      parts.push_back(elements(dtype_, count(from, rank_), data_key(from, rank_)));
    double squares = 0;
    expect(reduction_.holds(parts, outputs_[0], count(0, rank_), squares), text);
    if (reduction_.fusion.measured) expect(std::abs(squared_norm_ - squares) <= 1e-9 * squares, text + ": its norm");
  }

 private:
  bool reduces() const {
    return kind_ == CallKind::all_reduce || kind_ == CallKind::reduce_scatter || kind_ == CallKind::reduce;
  }
  bool is_split() const {  // an input for each rank
    return kind_ == CallKind::reduce_scatter || kind_ == CallKind::scatter || kind_ == CallKind::all_to_all;
  }
  bool is_gathered() const {  // an output of each rank
    return kind_ == CallKind::all_gather || kind_ == CallKind::gather || kind_ == CallKind::all_to_all;
  }
  bool gives() const { return (kind_ != CallKind::broadcast && kind_ != CallKind::scatter) || rank_ == root_; }

  // Elements that rank `from` has for rank `to`.
  size_t count(int from, int to) const {
    if (kind_ == CallKind::all_to_all) return counts_[from * world_ + to];
    if (kind_ == CallKind::all_gather) return counts_[from];
    return kind_ == CallKind::reduce_scatter ? counts_[to] : counts_[0];
  }
  std::vector<size_t> split() const { return {counts_.begin(), counts_.begin() + world_}; }
  uint64_t data_key(int from, int to) const { return key_of(key_, from, is_split() ? to : 0); }

  void choose_fusion(Random& plan) {
    constexpr double scales[] = {1, 0.5, 0.37};
    reduction_.op = plan.one_in(2) ? ReduceOp::sum : ReduceOp::average;
    const DType narrow = plan.one_in(2) ? DType::bfloat16 : DType::float16;
    const DType wire = dtype_ == DType::float32 && plan.one_in(2) ? narrow : dtype_;
    reduction_.fusion = {true, wire, scales[plan.below(3)], plan.one_in(2)};
  }

  // Where input and output may be the same memory, or overlap.
  void share_memory() {
    if (kind_ == CallKind::all_reduce || kind_ == CallKind::reduce) outputs_[0] = inputs_[0];
    if (kind_ == CallKind::reduce_scatter) outputs_[0] = inputs_[rank_];
    if (kind_ != CallKind::all_gather) return;
    const int other = static_cast<int>(key_ % world_);
    const int place = count(rank_, 0) <= count(other, 0) ? other : rank_;
    if (count(rank_, 0) > 0) memcpy(outputs_[place], inputs_[0], count(rank_, 0) * size_of(dtype_));
    inputs_[0] = outputs_[place];
  }

  void* place(const Bytes& data, Random& own) {
    return memory_.emplace_back(data, own.below(4) * size_of(dtype_)).data();
  }

  Group& group_;
  const int rank_, world_;
  const uint64_t key_;
  CallKind kind_;
  DType dtype_;
  Reduction reduction_;
  int root_;
  bool mismatched_;
  std::vector<size_t> counts_;
  std::deque<Buffer> memory_;
  std::vector<void*> inputs_, outputs_;
  double squared_norm_ = 0;
};
