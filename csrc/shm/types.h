// Element types and reduction operators of the collectives; Python uses the same numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace weft::shm {

enum class DType : uint32_t {
  float32, float64, float16, bfloat16, int8, uint8, int16, int32, int64, boolean,
  // Types that are moved but not reduced. They have codes of their own, so that disagreeing ranks are found.
  uint16, uint32, uint64, complex32, complex64, complex128, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2,
  float8_e5m2fnuz, float8_e8m0fnu,
  count
};
enum class ReduceOp : uint32_t {
  sum, average, minimum, maximum, product, bitwise_and, bitwise_or, bitwise_xor,
  count
};

constexpr size_t dtype_count = static_cast<size_t>(DType::count);
constexpr size_t reduce_op_count = static_cast<size_t>(ReduceOp::count);

constexpr size_t reduced_dtype_count = static_cast<size_t>(DType::boolean) + 1;
constexpr size_t element_bytes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1};
constexpr const char* dtype_names[] = {
    "float32",   "float64",    "float16",       "bfloat16",        "int8",        "uint8",           "int16",
    "int32",     "int64",      "bool",          "uint16",          "uint32",      "uint64",          "complex32",
    "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"};
static_assert(std::size(element_bytes) == dtype_count && std::size(dtype_names) == dtype_count);
constexpr const char* reduce_op_names[reduce_op_count] = {"sum",     "avg",         "min",        "max",
                                                          "product", "bitwise_and", "bitwise_or", "bitwise_xor"};

inline size_t size_of(DType dtype) { return element_bytes[static_cast<size_t>(dtype)]; }
inline const char* name_of(DType dtype) { return dtype_names[static_cast<size_t>(dtype)]; }
inline const char* name_of(ReduceOp op) { return reduce_op_names[static_cast<size_t>(op)]; }

}  // namespace weft::shm
