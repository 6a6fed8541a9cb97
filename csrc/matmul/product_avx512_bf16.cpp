// The product of bf16 by the instruction that adds two products to each lane: first that of the second numbers, then
// that of the first, as two fused multiply-adds that take and make denormals as 0 (Intel's manual of VDPBF16PS).
#include "lanes_avx512.h"
#include "product_kernels.h"

namespace weft::matmul {
namespace {

struct Avx512Bf16 : Avx512 {
  static Vector multiply_add(Vector a, Vector b, Vector sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

constexpr ProductTable make_table() {
  ProductTable table{};
  table.functions[static_cast<size_t>(shm::DType::bfloat16)] = multiply<Avx512Bf16, Pair>;
  table.row_tile = Avx512Bf16::rows;
  table.column_tile = 2 * Avx512Bf16::width;
  return table;
}

}  // namespace

extern const ProductTable product_table_avx512_bf16;
const ProductTable product_table_avx512_bf16 = make_table();

}  // namespace weft::matmul
