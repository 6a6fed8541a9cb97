// Reductions on CPUs. Sources are combined in the given order, which is the order of ranks. They are combined in fp32
// (fp64 in fp64) and rounded once to the output type. Every instruction set gives the same bits.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace weft::shm {

// destination[i] = round(op(sources[0][i], sources[1][i], ...)). The destination may be one of the sources.
using ReduceFunction = void (*)(const void* const* sources, size_t source_count, void* destination, size_t count);

// Further steps of a sum of floating-point elements, in the same pass over the data.
struct Epilogue {
  bool average = false;            // divide the sum by the number of sources
  double scale = 1;                // then multiply it, before it is rounded
  double* squared_norm = nullptr;  // add to it the sum of squares of the rounded results, in fp64
};

// destination[i] = epilogue(sources[0][i] + sources[1][i] + ...), rounded to the type of the sources. The destination's
// type is the same or wider.
using SumFunction = void (*)(const void* const* sources, size_t source_count, void* destination, size_t count,
                             const Epilogue& epilogue);

// destination[i] = source[i] in another type.
using ConvertFunction = void (*)(const void* source, void* destination, size_t count);

struct ReduceTable {
  ReduceFunction functions[dtype_count][reduce_op_count];
  SumFunction sums[dtype_count][dtype_count];  // from, to
  ConvertFunction conversions[dtype_count][dtype_count];
};

std::vector<std::string> supported_instruction_sets();  // fastest first
// The fastest one, or the one that WEFT_ISA names. Chosen at the first call.
const std::string& instruction_set();

const ReduceTable& reduce_table();  // of that one
const ReduceTable& reduce_table(const std::string& instruction_set);

// Throws std::invalid_argument if the operator has no meaning for the type (an average of booleans).
ReduceFunction reduce_function(const ReduceTable& table, DType dtype, ReduceOp op);
// Throws std::invalid_argument if a type is not floating-point or the two types do not combine.
SumFunction sum_function(const ReduceTable& table, DType from, DType to);
// Between fp32 and the 16-bit types.
ConvertFunction convert_function(const ReduceTable& table, DType from, DType to);

}  // namespace weft::shm
