// Products of random sizes, strides and types on heap memory of their exact size.
#pragma once
#include "../../csrc/matmul/product.h"
#include "reduce.h"
#include "session.h"

// The sum of the leaves from `low` to `high`, in the tree's order.
inline float tree_sum(const std::vector<float>& leaves, size_t low, size_t high) {
  if (high - low == 1) return leaves[low];
  size_t left = 1;
  while (2 * left < high - low) left *= 2;
  return tree_sum(leaves, low, low + left) + tree_sum(leaves, low + left, high);
}

inline std::string multiply_at_random(Random& plan) {
  const DType type = plan.one_in(3) ? DType::bfloat16 : plan.one_in(3) ? DType::float16 : DType::float32;
  const auto size = [&](size_t most) { return static_cast<int64_t>(1 + plan.below(most)); };
  const bool deep = plan.one_in(8);
  const int64_t leaves = size(9), depth = leaves * size(deep ? 700 : 20);
  const int64_t rows = size(deep ? 20 : 150), columns = size(deep ? 70 : 1200);
  const bool a_turned = plan.one_in(2), b_turned = plan.one_in(2);
  const auto bytes = static_cast<int64_t>(size_of(type));
  const Bytes a = elements(type, static_cast<size_t>(rows * depth), plan());
  const Bytes b = elements(type, static_cast<size_t>(depth * columns), plan());
  std::vector<float> out(static_cast<size_t>(rows * columns));
  const weft::matmul::Product product{rows, columns, depth, leaves, type,
                                      a.data(), a_turned ? 1 : depth, a_turned ? rows : 1,
                                      b.data(), b_turned ? 1 : columns, b_turned ? depth : 1, out.data(), columns, false};
  const std::vector<std::string> sets = supported_instruction_sets();
  weft::matmul::multiply(product, static_cast<int>(size(3)), sets[plan.below(sets.size())]);

  for (int check = 0; check < 20; ++check) {
    const auto i = static_cast<int64_t>(plan.below(static_cast<size_t>(rows)));
    const auto j = static_cast<int64_t>(plan.below(static_cast<size_t>(columns)));
    const auto element = [&](const Bytes& memory, int64_t at) {
      uint64_t bits = 0;
      memcpy(&bits, memory.data() + at * bytes, static_cast<size_t>(bytes));
      return static_cast<float>(decode(type, bits));
    };
    std::vector<float> sums(static_cast<size_t>(leaves));
    for (int64_t place = 0; place < depth; ++place) {
      const int64_t in_leaf = place % (depth / leaves), other = in_leaf ^ 1;
      const bool swapped = type == DType::bfloat16 && other < depth / leaves;
      const int64_t k = swapped ? place - in_leaf + other : place;
      float& sum = sums[static_cast<size_t>(k / (depth / leaves))];
      sum = std::fma(element(a, i * product.a_row + k * product.a_depth),
                     element(b, k * product.b_depth + j * product.b_column), sum);
    }
    const float wanted = tree_sum(sums, 0, sums.size()), had = out[static_cast<size_t>(i * columns + j)];
    if (had != wanted)
      return "a product of " + std::to_string(rows) + " x " + std::to_string(depth) + " x " + std::to_string(columns) +
             " has " + std::to_string(had) + " for " + std::to_string(wanted);
  }
  return "";
}
