// The product for one instruction set; setup.py sets the compiler flags of this file.
#include "lanes_avx512.h"
#include "product_kernels.h"

namespace weft::matmul {

extern const ProductTable product_table_avx512;
const ProductTable product_table_avx512 = make_product_table<Avx512>();

}  // namespace weft::matmul
