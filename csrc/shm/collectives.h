// Collectives on plain memory. Counts are elements; every rank passes the same counts, types and operator.
#pragma once
#include <vector>

#include "group.h"

namespace weft::shm {

void barrier(Group& group);

// output[i] = op over ranks of input[i], the same bits on every rank. Input and output may be the same memory.
void all_reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op);

// all_reduce by a sum or an average of floating-point numbers, which also casts, scales and measures in the same pass.
// If squared_norm is given, it receives the sum of squares of the outputs, the same bits on every rank.
void all_reduce_fused(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op, DType wire,
                      double scale, double* squared_norm);

// outputs[r] (counts[r] elements) = rank r's input. outputs[rank] may be the input itself.
void all_gather(Group& group, const void* input, const std::vector<void*>& outputs, const std::vector<size_t>& counts,
                DType dtype);

// output (counts[rank] elements) = op over ranks of their inputs[rank]. Output may be inputs[rank] itself.
void reduce_scatter(Group& group, const std::vector<const void*>& inputs, void* output,
                    const std::vector<size_t>& counts, DType dtype, ReduceOp op);

// data (count elements) = the root's data.
void broadcast(Group& group, void* data, size_t count, DType dtype, int root);

// At the root, output = op over ranks of input, with the bits of all_reduce. Other ranks do not touch output.
void reduce(Group& group, const void* input, void* output, size_t count, DType dtype, ReduceOp op, int root);

// At the root, outputs[r] = rank r's input. Other ranks ignore outputs.
void gather(Group& group, const void* input, const std::vector<void*>& outputs, size_t count, DType dtype, int root);

// output = the root's inputs[rank]. Other ranks ignore inputs.
void scatter(Group& group, const std::vector<const void*>& inputs, void* output, size_t count, DType dtype, int root);

// outputs[r] (output_counts[r] elements) = rank r's inputs[rank]. Sizes may differ between any two ranks. The sizes of
// all ranks are compared before any data moves.
void all_to_all(Group& group, const std::vector<const void*>& inputs, const std::vector<size_t>& input_counts,
                const std::vector<void*>& outputs, const std::vector<size_t>& output_counts, DType dtype);

}  // namespace weft::shm
