// The reduction contract on CPUs: sources are combined in the order given (the order of ranks), in fp32 (fp64 stays
// fp64), and rounded once to the output type. Every instruction set gives the same bits.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace weft::shm {

// destination[i] = round(op(sources[0][i], sources[1][i], ...)). The destination may be one of the sources.
using ReduceFunction = void (*)(const void* const* sources, size_t source_count, void* destination, size_t count);

struct ReduceTable {
  ReduceFunction functions[dtype_count][reduce_op_count];
};

// The fastest table this machine runs, chosen at the first call; WEFT_ISA names another.
const ReduceTable& reduce_table();

std::vector<std::string> supported_instruction_sets();  // fastest first
const ReduceTable& reduce_table(const std::string& instruction_set);

// Throws std::invalid_argument where the operator means nothing for the type (an average of integers).
ReduceFunction reduce_function(const ReduceTable& table, DType dtype, ReduceOp op);

}  // namespace weft::shm
