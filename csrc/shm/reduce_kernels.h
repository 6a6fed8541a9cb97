// Reduction loops in plain C++ that the compiler vectorises, compiled once per instruction set.
//
// One source file per instruction set includes this one. Everything is in an unnamed namespace and uses no inline
// function of the standard library. Otherwise the linker could pick one file's AVX-512 copy of a shared function for a
// machine without AVX-512.
#pragma once
#include "element_types.h"
#include "reduce.h"

namespace weft::shm {
namespace {

template <class Sum>
constexpr bool is_floating = static_cast<Sum>(0.5) != static_cast<Sum>(0);

struct Add {
  template <class S>
  static S combine(S a, S b) {
    return static_cast<S>(a + b);
  }
};
struct Multiply {
  template <class S>
  static S combine(S a, S b) {
    return static_cast<S>(a * b);
  }
};
struct Minimum {  // a NaN on either side wins, as in torch.minimum
  template <class S>
  static S combine(S a, S b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Maximum {
  template <class S>
  static S combine(S a, S b) {
    return (a > b || a != a) ? a : b;
  }
};
struct And {
  template <class S>
  static S combine(S a, S b) {
    return static_cast<S>(a & b);
  }
};
struct Or {
  template <class S>
  static S combine(S a, S b) {
    return static_cast<S>(a | b);
  }
};
struct Xor {
  template <class S>
  static S combine(S a, S b) {
    return static_cast<S>(a ^ b);
  }
};

constexpr size_t block = 2048;  // elements; the accumulators of one block stay in the first-level cache

// sums[0 .. n) = op over the sources, for the n elements from `begin` on.
template <class Type, class Op>
inline void accumulate(const void* const* sources, size_t source_count, size_t begin, size_t n,
                       typename Type::Sum* sums) {
  using Stored = typename Type::Stored;
  const Stored* first = static_cast<const Stored*>(sources[0]) + begin;
  if (source_count == 1) {
    for (size_t i = 0; i < n; ++i) sums[i] = Type::load(first[i]);
  } else {
    const Stored* second = static_cast<const Stored*>(sources[1]) + begin;
    for (size_t i = 0; i < n; ++i) sums[i] = Op::combine(Type::load(first[i]), Type::load(second[i]));
  }
  for (size_t source = 2; source < source_count; ++source) {
    const Stored* next = static_cast<const Stored*>(sources[source]) + begin;
    for (size_t i = 0; i < n; ++i) sums[i] = Op::combine(sums[i], Type::load(next[i]));
  }
}

// Integers are divided as 64 bits, and what is left over is dropped.
template <class S>
constexpr auto divisor_of(size_t source_count) {
  if constexpr (is_floating<S>)
    return static_cast<S>(source_count);
  else
    return static_cast<int64_t>(source_count);
}

template <class Type, class Op, bool averaged>
void reduce(const void* const* sources, size_t source_count, void* destination, size_t count) {
  using S = typename Type::Sum;
  S sums[block];
  const auto divisor = divisor_of<S>(source_count);
  auto* out = static_cast<typename Type::Stored*>(destination);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = count - begin < block ? count - begin : block;
    accumulate<Type, Op>(sources, source_count, begin, n, sums);
    for (size_t i = 0; i < n; ++i) {
      if constexpr (averaged)
        out[begin + i] = Type::store(static_cast<S>(sums[i] / divisor));
      else
        out[begin + i] = Type::store(sums[i]);
    }
  }
}

// Eight lanes in a fixed order, so that every instruction set gives the same bits.
template <class S>
inline double sum_of_squares(const S* values, size_t n) {
  constexpr size_t lanes = 8;
  double sums[lanes] = {};
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (size_t lane = 0; lane < lanes; ++lane)
      sums[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  for (size_t lane = 0; i < n; ++i, ++lane) sums[lane] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

template <class From, class To>
void sum(const void* const* sources, size_t source_count, void* destination, size_t count, const Epilogue& epilogue) {
  using S = typename From::Sum;
  S sums[block];
  const S divisor = static_cast<S>(source_count), scale = static_cast<S>(epilogue.scale);
  auto* out = static_cast<typename To::Stored*>(destination);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = count - begin < block ? count - begin : block;
    accumulate<From, Add>(sources, source_count, begin, n, sums);
    if (epilogue.average)
      for (size_t i = 0; i < n; ++i) sums[i] = sums[i] / divisor;
    for (size_t i = 0; i < n; ++i) {  // a scale of 1 changes nothing
      sums[i] = From::load(From::store(sums[i] * scale));
      out[begin + i] = To::store(sums[i]);
    }
    if (epilogue.squared_norm != nullptr) *epilogue.squared_norm += sum_of_squares(sums, n);
  }
}

template <class From, class To>
void convert(const void* source, void* destination, size_t count) {
  const auto* in = static_cast<const typename From::Stored*>(source);
  auto* out = static_cast<typename To::Stored*>(destination);
  for (size_t i = 0; i < count; ++i) out[i] = To::store(From::load(in[i]));
}

template <class Type>
constexpr void fill_row(ReduceFunction* row) {
  using S = typename Type::Sum;
  const auto set = [row](ReduceOp op, ReduceFunction function) { row[static_cast<size_t>(op)] = function; };
  set(ReduceOp::minimum, reduce<Type, Minimum, false>);
  set(ReduceOp::maximum, reduce<Type, Maximum, false>);
  if constexpr (__is_same(Type, Boolean)) {  // a sum of booleans is "any", a product "all"
    set(ReduceOp::sum, reduce<Type, Or, false>);
    set(ReduceOp::product, reduce<Type, And, false>);
  } else {
    set(ReduceOp::sum, reduce<Type, Add, false>);
    set(ReduceOp::product, reduce<Type, Multiply, false>);
    set(ReduceOp::average, reduce<Type, Add, true>);
  }
  if constexpr (!is_floating<S>) {
    set(ReduceOp::bitwise_and, reduce<Type, And, false>);
    set(ReduceOp::bitwise_or, reduce<Type, Or, false>);
    set(ReduceOp::bitwise_xor, reduce<Type, Xor, false>);
  }
}

constexpr ReduceTable make_table() {
  ReduceTable table{};
  const auto row = [&table](DType dtype) { return table.functions[static_cast<size_t>(dtype)]; };
  fill_row<Native<float>>(row(DType::float32));
  fill_row<Native<double>>(row(DType::float64));
  fill_row<Float16>(row(DType::float16));
  fill_row<BFloat16>(row(DType::bfloat16));
  fill_row<Native<int8_t>>(row(DType::int8));
  fill_row<Native<uint8_t>>(row(DType::uint8));
  fill_row<Native<int16_t>>(row(DType::int16));
  fill_row<Native<int32_t>>(row(DType::int32));
  fill_row<Native<int64_t>>(row(DType::int64));
  fill_row<Boolean>(row(DType::boolean));

  const auto sum_from = [&table](DType from, DType to) -> SumFunction& {
    return table.sums[static_cast<size_t>(from)][static_cast<size_t>(to)];
  };
  sum_from(DType::float32, DType::float32) = sum<Native<float>, Native<float>>;
  sum_from(DType::float64, DType::float64) = sum<Native<double>, Native<double>>;
  sum_from(DType::float16, DType::float16) = sum<Float16, Float16>;
  sum_from(DType::bfloat16, DType::bfloat16) = sum<BFloat16, BFloat16>;
  sum_from(DType::float16, DType::float32) = sum<Float16, Native<float>>;
  sum_from(DType::bfloat16, DType::float32) = sum<BFloat16, Native<float>>;

  const auto conversion = [&table](DType from, DType to) -> ConvertFunction& {
    return table.conversions[static_cast<size_t>(from)][static_cast<size_t>(to)];
  };
  conversion(DType::float32, DType::float16) = convert<Native<float>, Float16>;
  conversion(DType::float32, DType::bfloat16) = convert<Native<float>, BFloat16>;
  conversion(DType::float16, DType::float32) = convert<Float16, Native<float>>;
  conversion(DType::bfloat16, DType::float32) = convert<BFloat16, Native<float>>;
  return table;
}

}  // namespace
}  // namespace weft::shm
