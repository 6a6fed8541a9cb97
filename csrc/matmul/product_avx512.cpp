// The product for one instruction set; setup.py sets the compiler flags of this file.
#include <immintrin.h>

#include "product_kernels.h"

namespace weft::matmul {
namespace {

struct Avx512 {
  using Vector = __m512;
  static constexpr int rows = 14, width = 16;
  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector all(float value) { return _mm512_set1_ps(value); }
  static Vector load(const float* from) { return _mm512_load_ps(from); }
  static void store(float* to, Vector value) { _mm512_store_ps(to, value); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
};

}  // namespace

extern const ProductTable product_table_avx512;
const ProductTable product_table_avx512 = make_product_table<Avx512>();

}  // namespace weft::matmul
