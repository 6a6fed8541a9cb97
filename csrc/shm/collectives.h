// Collectives on plain memory. Counts are elements; every rank passes the same counts, types and operator.
#pragma once
#include <vector>

#include "group.h"

namespace weft::shm {

void barrier(Group& group);

// output[i] = op over ranks of input[i], the same bits on every rank. Input and output may be the same memory.
void all_reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op);

// outputs[r] (counts[r] elements) = rank r's input. outputs[rank] may be the input itself.
void all_gather(Group& group, const void* input, const std::vector<void*>& outputs, const std::vector<size_t>& counts,
                DType dtype);

// output (counts[rank] elements) = op over ranks of their inputs[rank]. Output may be inputs[rank] itself.
void reduce_scatter(Group& group, const std::vector<const void*>& inputs, void* output,
                    const std::vector<size_t>& counts, DType dtype, ReduceOp op);

// data (count elements) = the root's data.
void broadcast(Group& group, void* data, size_t count, DType dtype, int root);

}  // namespace weft::shm
