// Reduction loops in plain C++ that the compiler vectorises, compiled once per instruction set.
//
// One source file per instruction set includes this one. Everything is in an unnamed namespace and uses no inline
// function of the standard library. Otherwise the linker could pick one file's AVX-512 copy of a shared function for a
// machine without AVX-512.
#pragma once
#include "reduce.h"

namespace weft::shm {
namespace {

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Each element type has the type it is stored in, the type it is summed in, and the two conversions.
template <class T>
struct Native {
  using Stored = T;
  using Sum = T;
  static Sum load(T value) { return value; }
  static T store(Sum value) { return value; }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  static float load(uint16_t value) { return bits_of<float>(static_cast<uint32_t>(value) << 16); }
  static uint16_t store(float value) {  // round to nearest, ties to even
    const uint32_t bits = bits_of<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
  }
};

struct Float16 {
  using Stored = uint16_t;
  using Sum = float;
  // No step makes an fp32 denormal, so the result does not depend on the thread's flush-to-zero mode.
  static float load(uint16_t value) {
    const uint32_t magnitude = value & 0x7fffu;
    const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t denormal = bits_of<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t infinite_or_nan = (magnitude << 13) | 0x7f800000u;
    const uint32_t finite = magnitude < 0x400u ? denormal : normal;
    return bits_of<float>(sign | (magnitude >= 0x7c00u ? infinite_or_nan : finite));
  }
  static uint16_t store(float value) {  // round to nearest, ties to even
    const uint32_t bits = bits_of<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 aligns the bits of a half-precision denormal with the end of the fp32 mantissa, and rounds them.
    const uint32_t denormal = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
    const uint32_t infinite_or_nan = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? infinite_or_nan : finite));
  }
};

struct Boolean {  // any value but 0 is true, and true is stored as 1
  using Stored = uint8_t;
  using Sum = uint8_t;
  static uint8_t load(uint8_t value) { return value != 0; }
  static uint8_t store(uint8_t value) { return value != 0; }
};

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

template <class Type, class Op, bool averaged>
void reduce(const void* const* sources, size_t source_count, void* destination, size_t count) {
  using S = typename Type::Sum;
  S sums[block];
  const S divisor = static_cast<S>(source_count);
  auto* out = static_cast<typename Type::Stored*>(destination);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = count - begin < block ? count - begin : block;
    accumulate<Type, Op>(sources, source_count, begin, n, sums);
    for (size_t i = 0; i < n; ++i) {
      if constexpr (averaged)
        out[begin + i] = Type::store(sums[i] / divisor);
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
  }
  if constexpr (is_floating<S>) {
    set(ReduceOp::average, reduce<Type, Add, true>);
  } else {
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
