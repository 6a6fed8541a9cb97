// Address and element type of a tensor, for a launch. There is no libtorch here: they are read by name, from data_ptr()
// and dtype, as Triton does.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace weft::launch {

enum class Memory { none, tensor, descriptor };

// The kind of a Python type, and the C functions behind its data_ptr and dtype. A function that is not plain C (in a
// subclass written in Python) is null, and is looked up at each call.
struct MemoryType {
  Memory memory = Memory::none;
  PyCFunction data_ptr = nullptr;
  getter dtype = nullptr;
  void* dtype_closure = nullptr;
};

MemoryType memory_type(PyObject* object);

int64_t address_of(const MemoryType& type, PyObject* tensor);
// Returns the element type's place in the table of torch's element types, or -1 if no kernel takes it. Places never
// change, because keys contain them.
int element_type_of(const MemoryType& type, PyObject* tensor);

}  // namespace weft::launch
