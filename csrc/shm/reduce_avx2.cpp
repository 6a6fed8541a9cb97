// The reduction loops for one instruction set; setup.py gives this file its compiler flags.
#include "reduce_kernels.h"

namespace weft::shm {

extern const ReduceTable reduce_table_avx2;
const ReduceTable reduce_table_avx2 = make_table();

}  // namespace weft::shm
