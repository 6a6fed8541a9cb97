#include "reduce.h"

#include <cstdlib>
#include <stdexcept>

namespace weft::shm {

extern const ReduceTable reduce_table_baseline;  // SSE2 on x86-64, NEON on aarch64
#if defined(__x86_64__)
extern const ReduceTable reduce_table_avx2;
extern const ReduceTable reduce_table_avx512;
#endif

std::vector<std::string> supported_instruction_sets() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512bf16")) names.emplace_back("avx512_bf16");  // for products; sums are as avx512's
    names.emplace_back("avx512");
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.emplace_back("avx2");
#endif
  names.emplace_back("baseline");
  return names;
}

const ReduceTable& reduce_table(const std::string& instruction_set) {
  std::string known;
  for (const std::string& name : supported_instruction_sets()) {
    known += known.empty() ? name : ", " + name;
    if (name != instruction_set) continue;
#if defined(__x86_64__)
    if (name == "avx512" || name == "avx512_bf16") return reduce_table_avx512;
    if (name == "avx2") return reduce_table_avx2;
#endif
    return reduce_table_baseline;
  }
  throw std::invalid_argument("instruction set \"" + instruction_set + "\" does not run here; this machine runs " +
                              known);
}

const std::string& instruction_set() {
  static const std::string chosen = [] {
    const char* wanted = std::getenv("WEFT_ISA");
    return wanted != nullptr ? wanted : supported_instruction_sets().front();
  }();
  return chosen;
}

const ReduceTable& reduce_table() {
  static const ReduceTable& table = reduce_table(instruction_set());
  return table;
}

ReduceFunction reduce_function(const ReduceTable& table, DType dtype, ReduceOp op) {
  const ReduceFunction function = table.functions[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
  if (function == nullptr)
    throw std::invalid_argument(std::string("no reduction \"") + name_of(op) + "\" of " + name_of(dtype) +
                                " elements: booleans have no average, and bitwise operators need an integer type");
  return function;
}

SumFunction sum_function(const ReduceTable& table, DType from, DType to) {
  const SumFunction function = table.sums[static_cast<size_t>(from)][static_cast<size_t>(to)];
  if (function == nullptr)
    throw std::invalid_argument(std::string("no sum of ") + name_of(to) + " elements travels as " + name_of(from) +
                                ": float32 travels as itself, bfloat16 or float16, other floating-point types as they are");
  return function;
}

ConvertFunction convert_function(const ReduceTable& table, DType from, DType to) {
  const ConvertFunction function = table.conversions[static_cast<size_t>(from)][static_cast<size_t>(to)];
  if (function == nullptr)
    throw std::invalid_argument(std::string("no conversion from ") + name_of(from) + " to " + name_of(to));
  return function;
}

}  // namespace weft::shm
