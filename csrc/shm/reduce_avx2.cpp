// Reduction loops for one instruction set; setup.py sets the compiler flags of this file.
#include "reduce_kernels.h"

namespace weft::shm {

extern const ReduceTable reduce_table_avx2;
const ReduceTable reduce_table_avx2 = make_table();

}  // namespace weft::shm
