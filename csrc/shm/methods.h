// Methods of Python's classes that read their tensors in C++ and enter the engine at once.
#pragma once
#include <pybind11/pybind11.h>

namespace weft::shm {

// Adds three functions that replace a method of Engine or of a process group, or a function of the default group, by one
// that does the same for the usual call: one that waits, on dense CPU tensors of a type that is reduced. Every other call
// goes to the given function.
void register_methods(pybind11::module_& m);

}  // namespace weft::shm
