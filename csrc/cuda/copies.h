// Copies that set a flag behind each: by the copy engine and the stream itself, without a multiprocessor.
#pragma once
#include <pybind11/pybind11.h>

namespace weft {

void register_copies(pybind11::module_& cuda);

}  // namespace weft
