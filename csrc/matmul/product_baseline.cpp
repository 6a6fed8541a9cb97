// The product for any processor. Without fused multiply-adds the C library computes them: right, and slow.
#include <cmath>

#include "product_kernels.h"

namespace weft::matmul {
namespace {

struct Baseline {
  using Vector = float __attribute__((vector_size(16)));
  static constexpr int rows = 4, width = 4;
  static Vector zero() { return Vector{}; }
  static Vector all(float value) { return Vector{value, value, value, value}; }
  static Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
  static void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
  static Vector multiply_add(Vector a, Vector b, Vector sum) {
    for (int lane = 0; lane < width; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
    return sum;
  }
};

}  // namespace

extern const ProductTable product_table_baseline;
const ProductTable product_table_baseline = make_product_table<Baseline>();

}  // namespace weft::matmul
