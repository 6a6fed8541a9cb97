// The reduction loops for one instruction set; setup.py gives this file its compiler flags.
#include "reduce_kernels.h"

namespace weft::shm {

extern const ReduceTable reduce_table_avx512;
const ReduceTable reduce_table_avx512 = make_table();

}  // namespace weft::shm
