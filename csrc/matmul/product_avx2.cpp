// The product for one instruction set; setup.py sets the compiler flags of this file.
#include <immintrin.h>

#include "product_kernels.h"

namespace weft::matmul {
namespace {

struct Avx2 {
  using Vector = __m256;
  static constexpr int rows = 6, width = 8;
  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector all(float value) { return _mm256_set1_ps(value); }
  static Vector load(const float* from) { return _mm256_load_ps(from); }
  static void store(float* to, Vector value) { _mm256_store_ps(to, value); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
};

}  // namespace

extern const ProductTable product_table_avx2;
const ProductTable product_table_avx2 = make_product_table<Avx2>();

}  // namespace weft::matmul
