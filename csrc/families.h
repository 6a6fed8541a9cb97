// Families of functions in weft._C. Each is registered by its own module.cpp (or .cpp).
#pragma once
#include <pybind11/pybind11.h>

namespace weft {

void register_build(pybind11::module_& m);
void register_shm(pybind11::module_& m);
void register_cuda(pybind11::module_& m);
void register_launch(pybind11::module_& m);
void register_matmul(pybind11::module_& m);

}  // namespace weft
