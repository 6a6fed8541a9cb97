// Element types and reduction operators that the collectives know; the numbers are shared with Python.
#pragma once
#include <cstddef>
#include <cstdint>

namespace weft::shm {

enum class DType : uint32_t {
  float32, float64, float16, bfloat16, int8, uint8, int16, int32, int64, boolean,
  count
};
enum class ReduceOp : uint32_t {
  sum, average, minimum, maximum, product, bitwise_and, bitwise_or, bitwise_xor,
  count
};

constexpr size_t dtype_count = static_cast<size_t>(DType::count);
constexpr size_t reduce_op_count = static_cast<size_t>(ReduceOp::count);

constexpr size_t element_bytes[dtype_count] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1};
constexpr const char* dtype_names[dtype_count] = {"float32", "float64", "float16", "bfloat16", "int8",
                                                  "uint8",   "int16",   "int32",   "int64",    "bool"};
constexpr const char* reduce_op_names[reduce_op_count] = {"sum",     "avg",         "min",        "max",
                                                          "product", "bitwise_and", "bitwise_or", "bitwise_xor"};

inline size_t size_of(DType dtype) { return element_bytes[static_cast<size_t>(dtype)]; }
inline const char* name_of(DType dtype) { return dtype_names[static_cast<size_t>(dtype)]; }
inline const char* name_of(ReduceOp op) { return reduce_op_names[static_cast<size_t>(op)]; }

}  // namespace weft::shm
