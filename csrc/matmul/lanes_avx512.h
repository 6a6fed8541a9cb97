// Vectors of AVX-512, for the products of the files that include this one.
#pragma once
#include <immintrin.h>

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
}  // namespace weft::matmul
