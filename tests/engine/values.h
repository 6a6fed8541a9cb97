// Elements derived from a key, and the reduction of them, in plain arithmetic that shares no code with the engine.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "group.h"

using namespace weft::shm;

using Bytes = std::vector<std::byte>;

class Random {  // splitmix64: the same numbers from the same seed with every standard library
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  size_t below(size_t limit) { return (*this)() % limit; }
  bool one_in(size_t chances) { return below(chances) == 0; }

 private:
  uint64_t state_;
};

inline uint64_t key_of(uint64_t a, uint64_t b, uint64_t c = 0) { return Random(Random(Random(a)() + b)() + c)(); }

struct Format {  // of a floating-point type
  int fraction_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};

inline bool is_floating(DType dtype) { return dtype <= DType::bfloat16; }

inline Format format_of(DType dtype) {
  constexpr Format formats[] = {{23, 8}, {52, 11}, {10, 5}, {7, 8}};
  return formats[static_cast<size_t>(dtype)];
}

inline double decode(DType dtype, uint64_t bits) {
  const Format format = format_of(dtype);
  const uint64_t hidden = uint64_t{1} << format.fraction_bits, fraction = bits & (hidden - 1);
  const int exponent = static_cast<int>(bits >> format.fraction_bits & ((1u << format.exponent_bits) - 1));
  const double magnitude = std::ldexp(static_cast<double>(exponent == 0 ? fraction : fraction + hidden),
                                      std::max(exponent, 1) - format.bias() - format.fraction_bits);
  return bits >> (format.fraction_bits + format.exponent_bits) & 1 ? -magnitude : magnitude;
}

// The nearest value of the type, ties to even.
inline double rounded(DType dtype, double value) {
  if (value == 0 || dtype == DType::float64) return value;
  const Format format = format_of(dtype);
  const double unit = std::ldexp(1, std::max(std::ilogb(value), 1 - format.bias()) - format.fraction_bits);
  return std::nearbyint(value / unit) * unit;
}

// Floating-point values are between 1/8 and 4 in magnitude: no product over the ranks overflows.
inline Bytes elements(DType dtype, size_t count, uint64_t key) {
  Bytes data(count * size_of(dtype));
  Random random(key);
  const size_t unit = std::min<size_t>(size_of(dtype), sizeof(uint64_t));
  for (size_t offset = 0; offset < data.size(); offset += unit) {
    uint64_t bits = random();
    if (dtype == DType::boolean) bits %= 3;  // any value but 0 is true
    if (is_floating(dtype)) {
      const Format format = format_of(dtype);
      const uint64_t exponent = format.bias() - 3 + bits % 5, sign = bits >> 8 & 1;
      const uint64_t fraction = bits >> 9 & ((uint64_t{1} << format.fraction_bits) - 1);
      bits = (sign << format.exponent_bits | exponent) << format.fraction_bits | fraction;
    }
    std::memcpy(data.data() + offset, &bits, unit);
  }
  return data;
}

// A reduction of one element after another in the order of ranks: floating-point numbers are summed in fp32 (fp64 stays
// fp64) and rounded once, integers wrap.
struct Reduction {
  DType dtype;
  ReduceOp op;
  Fusion fusion = {};

  bool known() const {
    const bool bitwise = op >= ReduceOp::bitwise_and;
    return is_floating(dtype) ? !bitwise : op != ReduceOp::average || dtype != DType::boolean;
  }

  double of(const std::vector<double>& values) const {
    const DType wire = fusion.used ? fusion.wire : dtype;
    const DType accumulated = dtype == DType::float64 ? DType::float64 : DType::float32;
    double result = rounded(wire, values[0]);
    for (size_t rank = 1; rank < values.size(); ++rank)
      result = rounded(accumulated, combine(result, rounded(wire, values[rank])));
    if (op == ReduceOp::average) result = rounded(accumulated, result / static_cast<double>(values.size()));
    if (fusion.used) result = rounded(accumulated, result * rounded(accumulated, fusion.scale));
    return rounded(wire, result);
  }

  uint64_t of(const std::vector<int64_t>& values) const {
    int64_t result = values[0];
    for (size_t rank = 1; rank < values.size(); ++rank) result = combine(result, values[rank]);
    if (op == ReduceOp::average) result = integer(result) / static_cast<int64_t>(values.size());  // of what fits the type
    return dtype == DType::boolean ? result != 0 : result;
  }

  // Whether `output` is the reduction of `inputs`. Adds the squares of what is there to `squared_norm`.
  bool holds(const std::vector<Bytes>& inputs, const void* output, size_t count, double& squared_norm) const {
    std::vector<double> reals(inputs.size());
    std::vector<int64_t> integers(inputs.size());
    for (size_t i = 0; i < count; ++i) {
      const uint64_t got = bits_of(output, i);
      for (size_t rank = 0; rank < inputs.size(); ++rank) {
        if (is_floating(dtype)) reals[rank] = decode(dtype, bits_of(inputs[rank].data(), i));
        else integers[rank] = integer(bits_of(inputs[rank].data(), i));
      }
      if (is_floating(dtype)) {
        const double value = decode(dtype, got);
        squared_norm += value * value;
        if (value != of(reals)) return false;
      } else if (integer(got) != integer(of(integers))) {
        return false;
      }
    }
    return true;
  }

 private:
  uint64_t bits_of(const void* data, size_t index) const {
    uint64_t bits = 0;
    std::memcpy(&bits, static_cast<const std::byte*>(data) + index * size_of(dtype), size_of(dtype));
    return bits;
  }

  // The value of an integer type, from its low bits.
  int64_t integer(uint64_t bits) const {
    if (dtype == DType::boolean) return (bits & 0xff) != 0;
    if (dtype == DType::uint8) return static_cast<uint8_t>(bits);
    const size_t unused = 64 - 8 * size_of(dtype);
    return static_cast<int64_t>(bits << unused) >> unused;
  }

  template <class Value>
  Value combine(Value a, Value b) const {
    if constexpr (std::is_same_v<Value, int64_t>) {
      if (op == ReduceOp::bitwise_and) return a & b;
      if (op == ReduceOp::bitwise_or) return a | b;
      if (op == ReduceOp::bitwise_xor) return a ^ b;
    }
    if (op == ReduceOp::minimum) return std::min(a, b);
    if (op == ReduceOp::maximum) return std::max(a, b);
    return op == ReduceOp::product ? a * b : a + b;  // -fwrapv: integers wrap
  }
};
