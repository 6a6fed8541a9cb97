// Copies that each set a flag at the end. The copy engine and the stream do them, without a multiprocessor.
#pragma once
#include <pybind11/pybind11.h>

namespace weft {

void register_copies(pybind11::module_& cuda);

}  // namespace weft
