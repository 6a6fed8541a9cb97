#include "tensors.h"

#include <algorithm>
#include <string>

#include "objects.h"

namespace py = pybind11;

namespace weft::launch {

namespace {

// New types go at the end.
constexpr const char* element_types[] = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",  // integers
    "float16", "bfloat16", "float32", "float64",                                       // floats
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",              // floats of 8 bits
};

MemoryType look_at(PyObject* object) {
  MemoryType result;
  if (PyObject_HasAttr(object, names().block_shape) != 0) {
    result.memory = Memory::descriptor;
    return result;
  }
  if (PyObject_HasAttr(object, names().data_ptr) == 0) return result;
  result.memory = Memory::tensor;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  // The type itself may lack attributes that its objects have.
  const Owned data_ptr(PyObject_GetAttr(type, names().data_ptr));
  PyErr_Clear();
  if (data_ptr && Py_TYPE(data_ptr.get()) == &PyMethodDescr_Type) {
    const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(data_ptr.get())->d_method;
    if (method->ml_flags == METH_NOARGS) result.data_ptr = method->ml_meth;
  }
  const Owned dtype(PyObject_GetAttr(type, names().dtype));
  PyErr_Clear();
  if (dtype && Py_TYPE(dtype.get()) == &PyGetSetDescr_Type) {
    const PyGetSetDef* property = reinterpret_cast<PyGetSetDescrObject*>(dtype.get())->d_getset;
    result.dtype = property->get;
    result.dtype_closure = property->closure;
  }
  return result;
}

}  // namespace

MemoryType memory_type(PyObject* object) {
  static Facts<MemoryType, 16> known;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (const MemoryType* fact = known.find(type)) return *fact;
  const MemoryType fact = look_at(object);
  known.keep(type, fact);
  return fact;
}

int64_t address_of(const MemoryType& type, PyObject* tensor) {
  const Owned result = owned(type.data_ptr != nullptr ? type.data_ptr(tensor, nullptr)
                                                      : PyObject_CallMethodNoArgs(tensor, names().data_ptr));
  static_assert(sizeof(unsigned long) == sizeof(int64_t));
  const unsigned long address = PyLong_AsUnsignedLong(result.get());  // faster than PyLong_AsUnsignedLongLong
  if (address == static_cast<unsigned long>(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return static_cast<int64_t>(address);
}

int element_type_of(const MemoryType& type, PyObject* tensor) {
  static Facts<int, 32> known;
  const Owned dtype =
      owned(type.dtype != nullptr ? type.dtype(tensor, type.dtype_closure) : PyObject_GetAttr(tensor, names().dtype));
  if (const int* fact = known.find(dtype.get())) return *fact;
  const std::string text = py::str(dtype.get());
  const auto found = std::find(std::begin(element_types), std::end(element_types), text.substr(text.rfind('.') + 1));
  const int place = found == std::end(element_types) ? -1 : static_cast<int>(found - std::begin(element_types));
  known.keep(dtype.get(), place);
  return place;
}

}  // namespace weft::launch
