// Products of matrices on CPUs whose bits depend on no shape: an element is the same whatever rows and columns are
// computed with it, on every instruction set and number of threads (NaNs may have other bits, and bf16 other denormals
// off x86).
//
// The depth is cut into `leaves` equal parts. Within a leaf an element is one chain of fused multiply-adds in fp32, in
// the order of the depth; in bf16, of two neighbours the second comes first, and denormals are 0. The leaves' sums are
// added in a binary tree: of n leaves, the largest power of two below n makes the left side.
#pragma once
#include <cstdint>
#include <string>

#include "../shm/types.h"

namespace weft::matmul {

// out[i, j] = sum over k of a[i, k] b[k, j]. Strides are in elements.
struct Product {
  int64_t rows, columns, depth;
  int64_t leaves;  // divides the depth
  shm::DType type;  // of a and b: fp32, bf16 or fp16
  const void* a;
  int64_t a_row, a_depth;
  const void* b;
  int64_t b_depth, b_column;
  void* out;
  int64_t out_row;  // its columns are adjacent
  bool rounds;  // out has the type of a and b; fp32 otherwise
};

// Throws std::invalid_argument if the type has no product, or an instruction set does not run here.
void multiply(const Product& product, int threads, const std::string& instruction_set);

using ProductFunction = void (*)(const Product& product);

struct ProductTable {
  ProductFunction functions[shm::dtype_count];
  int64_t row_tile, column_tile;  // a thread's part is a multiple of one of them
};

}  // namespace weft::matmul
