// Element types of the CPU's loops: the type they are stored in, the type they are summed in, and the conversions.
// In an unnamed namespace, since files for different instruction sets include it.
#pragma once
#include <cstdint>

namespace weft::shm {
namespace {

template <class To, class From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

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

}  // namespace
}  // namespace weft::shm
