// The kind of a call: all of its arguments but the addresses of its tensors.
#pragma once
#include <pybind11/pybind11.h>

namespace weft::launch {

// Returns the kind as bytes, which are equal exactly for calls of one kind, and appends the call's tensors to a list.
// Returns None if an argument is neither a number, a text, None, a torch.dtype, a torch.Tensor or Parameter (of no
// other class) with memory, nor a tuple or frozen dataclass of these.
//
// Of a tensor it has the sizes, strides, type and device, whether 16 divides its address, and which tensor before it has
// the same address.
pybind11::object kind_of(const pybind11::tuple& arguments, const pybind11::dict& options,
                         const pybind11::list& tensors);

}  // namespace weft::launch
