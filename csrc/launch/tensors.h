// What a launch wants of a tensor: its address and its element type. There is no libtorch here: they are asked for by
// name, data_ptr() and dtype, as Triton asks.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace weft::launch {

enum class Memory { none, tensor, descriptor };

// What a type of Python objects is, and the C functions behind its data_ptr and dtype. Where these are not plain (a
// subclass written in Python), they are null, and looked up at each call.
struct MemoryType {
  Memory memory = Memory::none;
  PyCFunction data_ptr = nullptr;
  getter dtype = nullptr;
  void* dtype_closure = nullptr;
};

MemoryType memory_type(PyObject* object);

int64_t address_of(const MemoryType& type, PyObject* tensor);
// Its place in the table of torch's element types, or -1 where no kernel takes it. The places stay as they are: keys
// have them.
int element_type_of(const MemoryType& type, PyObject* tensor);

}  // namespace weft::launch
