#include "kind.h"

#include <cstdint>
#include <cstring>

#include "../dlpack.h"
#include "arguments.h"
#include "objects.h"

namespace py = pybind11;

namespace weft::launch {

namespace {

enum class Form { unknown, tensor, type, record };

// What an object's type makes of it.
struct Reading {
  Form form = Form::unknown;
  const dlpack::ExchangeApi* api = nullptr;  // of a tensor
};

bool is_frozen_dataclass(PyObject* type) {
  const Owned parameters(PyObject_GetAttrString(type, "__dataclass_params__"));
  const Owned frozen(parameters ? PyObject_GetAttrString(parameters.get(), "frozen") : nullptr);
  PyErr_Clear();
  return frozen && frozen.get() == Py_True;
}

Reading read_type(PyObject* type) {
  const py::module_ torch = py::module_::import("torch");
  if (torch.attr("Tensor").ptr() == type || torch.attr("nn").attr("Parameter").ptr() == type) {
    const auto* api = dlpack::exchange_api(type);
    return {api == nullptr ? Form::unknown : Form::tensor, api};
  }
  if (torch.attr("dtype").ptr() == type) return {Form::type};
  return {is_frozen_dataclass(type) ? Form::record : Form::unknown};
}

Reading reading_of(PyObject* type) {
  static Facts<Reading, 32> known;
  if (const Reading* fact = known.find(type)) return *fact;
  const Reading fact = read_type(type);
  known.keep(type, fact);
  return fact;
}

// Writes the arguments into the key, each after a byte for its type. Its methods return false if one is not described.
class Writer {
 public:
  Writer(Key& key, PyObject* tensors) : key_(key), tensors_(tensors) {}

  bool put_all(PyObject* tuple) {
    const Py_ssize_t count = PyTuple_GET_SIZE(tuple);
    put('(', static_cast<int64_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!put(PyTuple_GET_ITEM(tuple, i))) return false;
    return true;
  }

  bool put_named(PyObject* dict) {
    put('{', static_cast<int64_t>(PyDict_GET_SIZE(dict)));
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(dict, &at, &name, &value) != 0)
      if (!put(name) || !put(value)) return false;
    return true;
  }

 private:
  template <class T>
  void put(char form, T value) {
    key_.put(form);
    key_.put(&value, sizeof value);
  }

  bool put(PyObject* object) {
    if (object == Py_None) return key_.put('N'), true;
    if (PyBool_Check(object)) return key_.put(object == Py_True ? 'T' : 'F'), true;
    if (PyLong_CheckExact(object)) return put_integer(object);
    if (PyFloat_CheckExact(object)) return put('f', PyFloat_AS_DOUBLE(object)), true;
    if (PyUnicode_CheckExact(object)) return put_text(object);
    if (PyTuple_Check(object)) return put_all(object);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    const Reading reading = reading_of(type);
    switch (reading.form) {
      case Form::unknown:
        return false;
      case Form::tensor:
        return put_tensor(*reading.api, object);
      case Form::type:
        return put('d', object), true;  // there is one object for each type
      case Form::record:
        put('r', type);
        const Owned fields = owned(PyObject_GenericGetDict(object, nullptr));
        return put_named(fields.get());
    }
    return false;
  }

  bool put_integer(PyObject* object) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && (put('i', value), true);
  }

  bool put_text(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) return PyErr_Clear(), false;
    put('s', static_cast<int64_t>(size));
    key_.put(text, static_cast<size_t>(size));
    return true;
  }

  bool put_tensor(const dlpack::ExchangeApi& api, PyObject* object) {
    dlpack::Tensor tensor;
    if (api.read(object, &tensor) != 0) return PyErr_Clear(), false;
    if (tensor.data == nullptr) return false;
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    const size_t bytes = static_cast<size_t>(tensor.dimensions) * sizeof(int64_t);
    put(address % 16 == 0 ? 'P' : 'p', tensor.dimensions);
    key_.put(tensor.sizes, bytes);
    key_.put(tensor.strides, bytes);
    const uint8_t type[] = {tensor.type_code, tensor.type_bits};
    key_.put(type, sizeof type);
    key_.put(&tensor.device_type, sizeof tensor.device_type);
    key_.put(&tensor.device, sizeof tensor.device);
    if (count_ == most_arguments) return false;
    addresses_[count_] = address;
    uint8_t same = 0;
    while (addresses_[same] != address) ++same;
    key_.put(&same, sizeof same);
    ++count_;
    if (PyList_Append(tensors_, object) != 0) throw py::error_already_set();
    return true;
  }

  Key& key_;
  PyObject* tensors_;
  uintptr_t addresses_[most_arguments];
  uint8_t count_ = 0;
};

}  // namespace

py::object kind_of(const py::tuple& arguments, const py::dict& options, const py::list& tensors) {
  Key key;
  Writer writer(key, tensors.ptr());
  if (!writer.put_all(arguments.ptr()) || !writer.put_named(options.ptr())) return py::none();
  return py::bytes(key.view().data(), key.view().size());
}

}  // namespace weft::launch
