// The reduction contract on CPUs: sources are combined in the order given (the order of ranks), in fp32 (fp64 stays
// fp64), and rounded once to the output type. Every instruction set gives the same bits.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace weft::shm {

// destination[i] = round(op(sources[0][i], sources[1][i], ...)). The destination may be one of the sources.
using ReduceFunction = void (*)(const void* const* sources, size_t source_count, void* destination, size_t count);

// What a sum of floating-point elements may do besides, in the same pass over the data.
struct Epilogue {
  bool average = false;            // divide the sum by the number of sources
  double scale = 1;                // then multiply it, before it is rounded
  double* squared_norm = nullptr;  // add to it the sum of squares of the rounded results, in fp64
};

// destination[i] = epilogue(sources[0][i] + sources[1][i] + ...), rounded to the type of the sources and stored in the
// destination's, which is the same or wider.
using SumFunction = void (*)(const void* const* sources, size_t source_count, void* destination, size_t count,
                             const Epilogue& epilogue);

// destination[i] = source[i] in another type.
using ConvertFunction = void (*)(const void* source, void* destination, size_t count);

struct ReduceTable {
  ReduceFunction functions[dtype_count][reduce_op_count];
  SumFunction sums[dtype_count][dtype_count];  // from, to
  ConvertFunction conversions[dtype_count][dtype_count];
};

// The fastest table this machine runs, chosen at the first call; WEFT_ISA names another.
const ReduceTable& reduce_table();

std::vector<std::string> supported_instruction_sets();  // fastest first
const ReduceTable& reduce_table(const std::string& instruction_set);

// Throws std::invalid_argument where the operator means nothing for the type (an average of integers).
ReduceFunction reduce_function(const ReduceTable& table, DType dtype, ReduceOp op);
// Throws std::invalid_argument for types that are not floating-point, or that do not go together.
SumFunction sum_function(const ReduceTable& table, DType from, DType to);
// Between fp32 and the 16-bit types.
ConvertFunction convert_function(const ReduceTable& table, DType from, DType to);

}  // namespace weft::shm
