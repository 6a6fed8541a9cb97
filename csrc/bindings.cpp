// The module weft._C, with one line per family.
#include "families.h"

PYBIND11_MODULE(_C, m) {
  weft::register_build(m);
  weft::register_shm(m);
  weft::register_cuda(m);
  weft::register_launch(m);
  weft::register_matmul(m);
}
