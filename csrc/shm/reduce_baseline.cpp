// Reduction loops for one instruction set; setup.py sets the compiler flags of this file.
#include "reduce_kernels.h"

namespace weft::shm {

extern const ReduceTable reduce_table_baseline;
const ReduceTable reduce_table_baseline = make_table();

}  // namespace weft::shm
