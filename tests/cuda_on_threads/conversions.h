// bfloat16 and float16 on the CPU, rounded to nearest even as a GPU does.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

namespace weft::cuda {

template <>
struct Convert<BFloat16> {
  static float to_float(BFloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }
  static BFloat16 from_float(float value) {
    const uint32_t bits = bits_of_float(value);
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};

template <>
struct Convert<Float16> {
  static float to_float(Float16 value) {
    const int exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
    float magnitude;
    if (exponent == 31)
      magnitude = fraction == 0 ? INFINITY : NAN;
    else if (exponent == 0)
      magnitude = std::ldexp(static_cast<float>(fraction), -24);
    else
      magnitude = std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
    return value.bits & 0x8000 ? -magnitude : magnitude;
  }
  static Float16 from_float(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = std::fabs(value);
    if (std::isnan(value)) return {0x7fff};
    if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (magnitude == 0) return {sign};
    // In units of the last place: 2^-24 below the smallest normal number, else 2^(exponent - 10). nearbyint rounds to
    // even; a carry into the next exponent comes out right, since the encodings are consecutive.
    const int exponent = std::max(std::ilogb(magnitude), -14);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + units))};
  }
};

}  // namespace weft::cuda
