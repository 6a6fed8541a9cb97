#include "arguments.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "objects.h"
#include "tensors.h"

namespace py = pybind11;

namespace weft::launch {

namespace {

// Reader of one launch's arguments. Its methods throw Python's exceptions.
class Reader {
 public:
  Reader(const Parameters& parameters, Arguments& result) : parameters_(parameters), result_(result) {}

  void read_arguments(PyObject* tuple) {
    const size_t count = static_cast<size_t>(PyTuple_GET_SIZE(tuple));
    const size_t most = std::min<size_t>(parameters_.names.size(), most_arguments);
    if (count > most)
      throw py::type_error("kernel " + parameters_.function + " was given " + std::to_string(count) +
                           " arguments; it takes at most " + std::to_string(most));
    result_.key.put(static_cast<char>(count));
    for (size_t i = 0; i < count; ++i) read(i, PyTuple_GET_ITEM(tuple, i));
  }

  void read_constants(PyObject* tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* pair = PyTuple_GET_ITEM(tuple, i);
      if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(pair, 0)))
        throw py::type_error("kernel " + parameters_.function + ": a constant must be a pair (name, value), not " +
                             std::string(py::repr(pair)));
      put_text(PyTuple_GET_ITEM(pair, 0));
      put_constant(PyTuple_GET_ITEM(pair, 1), PyTuple_GET_ITEM(pair, 0));
    }
  }

 private:
  void put(Class kind) { result_.key.put(static_cast<char>(kind)); }

  Value& add(size_t place) {
    Value& value = result_.values[result_.count++];
    value.place = static_cast<uint32_t>(place);
    return value;
  }

  void read(size_t place, PyObject* object) {
    if (object == Py_None) {
      put(Class::none);
    } else if (PyLong_CheckExact(object)) {
      read_integer(place, object);
    } else if (PyFloat_CheckExact(object)) {
      read_real(place, object);
    } else if (PyBool_Check(object)) {
      put(Class::boolean);
      add(place).integer = object == Py_True;
    } else {
      read_memory(place, object);
    }
  }

  void read_real(size_t place, PyObject* object) {
    put(Class::real);
    add(place).real = PyFloat_AS_DOUBLE(object);
  }

  void read_memory(size_t place, PyObject* object) {
    const MemoryType type = memory_type(object);
    if (type.memory == Memory::tensor) {
      const int64_t address = address_of(type, object);
      put(parameters_.specialised[place] != 0 && address % 16 == 0 ? Class::tensor_by_16 : Class::tensor);
      put_element_type(place, type, object);
      add(place).integer = address;
    } else if (type.memory == Memory::descriptor) {
      read_descriptor(place, object);
    } else if (PyLong_Check(object)) {
      read_integer(place, object);
    } else if (PyFloat_Check(object)) {
      read_real(place, object);
    } else {
      throw py::type_error(parameters_.describe(place) + " is a " + Py_TYPE(object)->tp_name +
                           ", which no kernel takes");
    }
  }

  void read_integer(size_t place, PyObject* object) {
    const bool specialised = parameters_.specialised[place] != 0;
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) value = read_unsigned(place, object);
    if (specialised && overflow == 0 && value == 1) return put(Class::one);
    const bool by_16 = specialised && value % 16 == 0;
    if (overflow != 0)
      put(by_16 ? Class::u64_by_16 : Class::u64);
    else if (value >= INT32_MIN && value <= INT32_MAX)
      put(by_16 ? Class::i32_by_16 : Class::i32);
    else
      put(by_16 ? Class::i64_by_16 : Class::i64);
    add(place).integer = value;
  }

  // Returns the bits of an integer that only a u64 holds.
  long long read_unsigned(size_t place, PyObject* object) {
    const unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (PyErr_Occurred() == nullptr) return static_cast<long long>(value);
    PyErr_Clear();
    const std::string number = py::str(object);
    PyErr_SetString(PyExc_OverflowError, (parameters_.describe(place) + " is " + number + ", beyond 64 bits").c_str());
    throw py::error_already_set();
  }

  void read_descriptor(size_t place, PyObject* object) {
    const Owned base = attribute(object, names().base);
    const Owned block = attribute(object, names().block_shape);
    const Items sizes(block.get());
    if (sizes.count() < 1 || sizes.count() > most_dimensions)
      throw py::value_error(parameters_.describe(place) + " is a descriptor of " + std::to_string(sizes.count()) +
                            " dimensions; 1 to " + std::to_string(most_dimensions) + " are possible");
    put(Class::descriptor);
    put_element_type(place, memory_type(base.get()), base.get());
    result_.key.put(static_cast<char>(sizes.count()));
    for (Py_ssize_t i = 0; i < sizes.count(); ++i) {
      const auto size = static_cast<uint32_t>(sizes.integer(i));
      result_.key.put(&size, sizeof size);
    }
    add(place).descriptor = object;
  }

  void put_element_type(size_t place, const MemoryType& type, PyObject* tensor) {
    const int element_type = element_type_of(type, tensor);
    if (element_type < 0)
      throw py::type_error(parameters_.describe(place) + " has elements of type " +
                           std::string(py::str(attribute(tensor, names().dtype).get())) + ", which no kernel takes");
    result_.key.put(static_cast<char>(element_type));
  }

  void put_text(const char* text, size_t size) {
    const auto bytes = static_cast<uint32_t>(size);
    result_.key.put(&bytes, sizeof bytes);
    result_.key.put(text, size);
  }

  void put_text(PyObject* string) {
    if (PyUnicode_IS_COMPACT_ASCII(string))
      return put_text(static_cast<const char*>(PyUnicode_DATA(string)),
                      static_cast<size_t>(PyUnicode_GET_LENGTH(string)));
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(string, &size);
    if (text == nullptr) throw py::error_already_set();
    put_text(text, static_cast<size_t>(size));
  }

  void put_constant(PyObject* value, PyObject* name) {
    if (value == Py_None) {
      result_.key.put('N');
    } else if (PyBool_Check(value)) {
      result_.key.put(value == Py_True ? 'T' : 'F');
    } else if (PyLong_Check(value)) {
      const long long integer = PyLong_AsLongLong(value);
      if (integer == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      result_.key.put('i');
      result_.key.put(&integer, sizeof integer);
    } else if (PyFloat_Check(value)) {
      const double real = PyFloat_AS_DOUBLE(value);
      result_.key.put('f');
      result_.key.put(&real, sizeof real);
    } else if (PyUnicode_Check(value)) {
      result_.key.put('s');
      put_text(value);
    } else {
      put_other(value, name);
    }
  }

  // Puts another object, for example an element type of Triton, identified by its str().
  void put_other(PyObject* value, PyObject* name) {
    static Facts<std::string, 64> known;
    result_.key.put('o');
    if (const std::string* fact = known.find(value)) return put_text(fact->data(), fact->size());
    const std::string text = py::str(value);
    if (text.find(" at 0x") != std::string::npos)
      throw py::type_error("kernel " + parameters_.function + ": constant " + std::string(py::str(name)) + " is " +
                           text + ", which has no name that another process knows");
    known.keep(value, text);
    put_text(text.data(), text.size());
  }

  const Parameters& parameters_;
  Arguments& result_;
};

}  // namespace

Parameters::Parameters(std::string function_name, std::vector<std::string> all,
                       const std::vector<std::string>& unspecialised)
    : function(std::move(function_name)), names(std::move(all)), specialised(names.size(), 1) {
  for (const auto& name : unspecialised) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) throw std::invalid_argument("kernel " + function + " has no parameter " + name);
    specialised[static_cast<size_t>(found - names.begin())] = 0;
  }
}

void Key::grow(size_t count) {
  auto longer = std::make_unique<char[]>(capacity_ = 2 * (size_ + count));
  std::memcpy(longer.get(), bytes_, size_);
  long_ = std::move(longer);
  bytes_ = long_.get();
}

Arguments::Arguments(const Parameters& parameters, PyObject* arguments, PyObject* constants) {
  Reader reader(parameters, *this);
  reader.read_arguments(arguments);
  reader.read_constants(constants);
}

std::vector<Described> described(std::string_view key) {
  size_t at = 0;
  const auto next = [&] {
    if (at == key.size()) throw std::invalid_argument("the bytes are no key: they end within an argument");
    return key[at++];
  };
  std::vector<Described> result;
  for (int left = static_cast<unsigned char>(next()); left > 0; --left) {
    const auto kind = static_cast<Class>(next());
    int rank = 0;
    switch (kind) {
      case Class::none:
      case Class::one:
        continue;
      case Class::i32:
      case Class::i32_by_16:
      case Class::i64:
      case Class::i64_by_16:
      case Class::u64:
      case Class::u64_by_16:
      case Class::boolean:
      case Class::real:
        break;
      case Class::tensor:
      case Class::tensor_by_16:
        next();
        break;
      case Class::descriptor:
        next();
        rank = next();
        for (int byte = 0; byte < 4 * rank; ++byte) next();
        break;
      default:
        throw std::invalid_argument("the bytes are no key: no argument begins with the byte " +
                                    std::to_string(static_cast<unsigned char>(kind)));
    }
    result.push_back({kind, rank});
  }
  return result;
}

}  // namespace weft::launch
