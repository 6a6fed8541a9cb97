#include "methods.h"

#include <pybind11/detail/exception_translation.h>
#include <structmember.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../dlpack.h"
#include "collectives.h"
#include "gil.h"

namespace py = pybind11;

namespace weft::shm {

namespace {

using Arguments = PyObject* const*;

// Returns an interned name.
PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

// Reader of torch's tensors.
class Reader {
 public:
  Reader() {
    const py::module_ torch = py::module_::import("torch");
    tensor_ = py::object(torch.attr("Tensor")).release().ptr();
    parameter_ = py::object(torch.attr("nn").attr("Parameter")).release().ptr();
    api_ = dlpack::exchange_api(tensor_);
    const py::object method = torch.attr("Tensor").attr("is_neg");
    if (Py_TYPE(method.ptr()) == &PyMethodDescr_Type) {
      const PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(method.ptr())->d_method;
      if (definition->ml_flags == METH_NOARGS) is_negated_ = definition->ml_meth;
    }
  }

  // Returns false if the object is not a dense CPU tensor in one piece, of a type that is reduced. A subclass may mean
  // more than its numbers, and a negated view means others.
  bool read(PyObject* object, dlpack::Tensor* tensor) const {
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    if ((type != tensor_ && type != parameter_) || api_ == nullptr || is_negated_ == nullptr) return false;
    if (api_->read(object, tensor) != 0) return PyErr_Clear(), false;
    constexpr int cpu = 1;
    if (tensor->device_type != cpu || dtype_of(*tensor) == DType::count) return false;
    int64_t whole = 1;
    for (int i = tensor->dimensions - 1; i >= 0; --i) {
      if (tensor->sizes[i] != 1 && tensor->strides[i] != whole && count_of(*tensor) != 0) return false;
      whole *= tensor->sizes[i];
    }
    PyObject* negated = is_negated_(object, nullptr);
    Py_XDECREF(negated);
    return negated == Py_False;
  }

  static size_t count_of(const dlpack::Tensor& tensor) {
    size_t count = 1;
    for (int i = 0; i < tensor.dimensions; ++i) count *= static_cast<size_t>(tensor.sizes[i]);
    return count;
  }

  static DType dtype_of(const dlpack::Tensor& tensor) {
    enum : uint8_t { integer = 0, natural = 1, real = 2, bfloat = 4, boolean = 6 };
    switch (tensor.type_code << 8 | tensor.type_bits) {
      case real << 8 | 32: return DType::float32;
      case real << 8 | 64: return DType::float64;
      case real << 8 | 16: return DType::float16;
      case bfloat << 8 | 16: return DType::bfloat16;
      case integer << 8 | 8: return DType::int8;
      case natural << 8 | 8: return DType::uint8;
      case integer << 8 | 16: return DType::int16;
      case integer << 8 | 32: return DType::int32;
      case integer << 8 | 64: return DType::int64;
      case boolean << 8 | 8: return DType::boolean;
      default: return DType::count;
    }
  }

 private:
  PyObject* tensor_;
  PyObject* parameter_;
  const dlpack::ExchangeApi* api_;
  PyCFunction is_negated_ = nullptr;
};

const Reader& reader() {
  static const Reader* made = new Reader;
  return *made;
}

struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::count;
  size_t rows = 0;  // its first dimension; 0 for a scalar

  bool read(PyObject* object) {
    dlpack::Tensor tensor;
    if (!reader().read(object, &tensor)) return false;
    data = tensor.data;
    count = Reader::count_of(tensor);
    dtype = Reader::dtype_of(tensor);
    rows = tensor.dimensions > 0 ? static_cast<size_t>(tensor.sizes[0]) : 0;
    return true;
  }
  void* at(size_t element) const { return static_cast<std::byte*>(data) + element * size_of(dtype); }
};

// One buffer for each rank, of one type.
struct Parts {
  std::vector<void*> data;
  std::vector<size_t> counts;
  DType dtype = DType::count;

  // Reads a list of tensors.
  bool read(PyObject* list, int world) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != world) return false;
    for (int rank = 0; rank < world; ++rank) {
      Buffer part;
      if (!part.read(PyList_GET_ITEM(list, rank)) || (rank > 0 && part.dtype != dtype)) return false;
      dtype = part.dtype;
      data.push_back(part.data);
      counts.push_back(part.count);
    }
    return true;
  }
  // Cuts a buffer into equal parts, or into these numbers of rows.
  bool cut(const Buffer& whole, int world, PyObject* rows = nullptr) {
    const Py_ssize_t sizes = rows == nullptr ? 0 : PyList_CheckExact(rows) ? PyList_GET_SIZE(rows) : -1;
    if (sizes != 0 && (sizes != world || whole.rows == 0)) return false;
    if (sizes == 0 && (rows == nullptr ? whole.count : whole.rows) % world != 0) return false;
    dtype = whole.dtype;
    size_t begin = 0;
    for (int rank = 0; rank < world; ++rank) {
      size_t count = whole.count / world;
      if (sizes != 0) {
        const long long size = PyLong_AsLongLong(PyList_GET_ITEM(rows, rank));
        if (size < 0) return PyErr_Clear(), false;
        count = whole.count / whole.rows * static_cast<size_t>(size);
      }
      if (begin + count > whole.count) return false;
      data.push_back(whole.at(begin));
      counts.push_back(count);
      begin += count;
    }
    return begin == whole.count;
  }
  std::vector<const void*> sources() const { return {data.begin(), data.end()}; }
};

// Runs a call of the engine without the interpreter lock. Throws its error.
template <class Function>
bool enter(Group& group, Function call) {
  const WithoutGil no_gil;
  group.run(call);
  return true;
}

// The collectives on Python's tensors. Each returns false, before it does anything, if the call is unusual.

bool all_reduce_on(Group& group, PyObject* x, ReduceOp op) {
  Buffer b;
  return b.read(x) && enter(group, [&] { all_reduce(group, b.data, b.data, b.count, b.dtype, op); });
}

bool reduce_on(Group& group, PyObject* x, int root, ReduceOp op) {
  Buffer b;
  return b.read(x) && enter(group, [&] { reduce(group, b.data, b.data, b.count, b.dtype, op, root); });
}

bool broadcast_on(Group& group, PyObject* x, int root) {
  Buffer b;
  return b.read(x) && enter(group, [&] { broadcast(group, b.data, b.count, b.dtype, root); });
}

bool all_gather_on(Group& group, const Buffer& x, const Parts& parts) {
  if (parts.dtype != x.dtype || parts.counts[group.rank()] != x.count) return false;
  return enter(group, [&] { all_gather(group, x.data, parts.data, parts.counts, x.dtype); });
}

bool reduce_scatter_on(Group& group, const Parts& parts, const Buffer& output, ReduceOp op) {
  if (parts.dtype != output.dtype || parts.counts[group.rank()] != output.count) return false;
  return enter(group, [&] { reduce_scatter(group, parts.sources(), output.data, parts.counts, output.dtype, op); });
}

bool all_to_all_on(Group& group, const Parts& inputs, const Parts& outputs) {
  if (inputs.dtype != outputs.dtype) return false;
  return enter(group, [&] {
    all_to_all(group, inputs.sources(), inputs.counts, outputs.data, outputs.counts, inputs.dtype);
  });
}

// Reads a non-negative integer; -1 if it is none.
long integer(PyObject* object) {
  if (!PyLong_Check(object)) return -1;
  const long value = PyLong_AsLong(object);
  return PyErr_Occurred() != nullptr ? (PyErr_Clear(), -1) : value;
}

bool read_op(PyObject* code, ReduceOp* op) {
  const long value = integer(code);
  *op = static_cast<ReduceOp>(value);
  return value >= 0 && value < static_cast<long>(reduce_op_count);
}

bool read_rank(PyObject* rank, const Group& group, int* root) {
  const long value = integer(rank);
  *root = static_cast<int>(value);
  return value >= 0 && value < group.world();
}

// Options of c10d.
class Options {
 public:
  explicit Options(PyObject* object) : object_(object) {}

  bool waits() const {
    static PyObject* const async = name("asyncOp");
    const py::object value = get(async);
    return value.ptr() == Py_False;
  }
  bool op(ReduceOp* op) const {
    // c10d's RedOpType, which its ReduceOp has as hash.
    static constexpr ReduceOp ours[] = {ReduceOp::sum,         ReduceOp::average,    ReduceOp::product,
                                        ReduceOp::minimum,     ReduceOp::maximum,    ReduceOp::bitwise_and,
                                        ReduceOp::bitwise_or,  ReduceOp::bitwise_xor};
    static PyObject* const reduce_op = name("reduceOp");
    const py::object value = get(reduce_op);
    const Py_hash_t theirs = value ? PyObject_Hash(value.ptr()) : -1;
    if (theirs < 0 || theirs >= static_cast<Py_hash_t>(std::size(ours))) return PyErr_Clear(), false;
    *op = ours[theirs];
    return true;
  }
  bool root(const Group& group, int* root) const {
    static PyObject* const root_rank = name("rootRank");
    const py::object value = get(root_rank);
    return value && read_rank(value.ptr(), group, root);
  }

 private:
  py::object get(PyObject* attribute) const {
    PyObject* value = PyObject_GetAttr(object_, attribute);
    if (value == nullptr) PyErr_Clear();
    return py::reinterpret_steal<py::object>(value);
  }
  PyObject* object_;
};

// Returns the one item of a list, or null.
PyObject* only(PyObject* list) {
  return PyList_CheckExact(list) && PyList_GET_SIZE(list) == 1 ? PyList_GET_ITEM(list, 0) : nullptr;
}

using Function = bool (*)(Group&, Arguments);

struct Definition {
  const char* name;
  int arguments;  // without self
  Function call;
};

// Of Engine: its arguments without `wait`.
const Definition of_engine[] = {
    {"all_reduce", 2,
     [](Group& group, Arguments a) {
       ReduceOp op{};
       return read_op(a[1], &op) && all_reduce_on(group, a[0], op);
     }},
    {"broadcast", 2,
     [](Group& group, Arguments a) {
       int root;
       return read_rank(a[1], group, &root) && broadcast_on(group, a[0], root);
     }},
    {"all_gather", 2,
     [](Group& group, Arguments a) {
       Buffer x;
       Parts parts;
       return x.read(a[0]) && parts.read(a[1], group.world()) && all_gather_on(group, x, parts);
     }},
    {"reduce_scatter", 3,
     [](Group& group, Arguments a) {
       Buffer output;
       Parts parts;
       ReduceOp op{};
       return read_op(a[2], &op) && output.read(a[1]) && parts.read(a[0], group.world()) &&
              reduce_scatter_on(group, parts, output, op);
     }},
    {"all_to_all", 2,
     [](Group& group, Arguments a) {
       Parts inputs, outputs;
       return inputs.read(a[0], group.world()) && outputs.read(a[1], group.world()) &&
              all_to_all_on(group, inputs, outputs);
     }},
    {"barrier", 0, [](Group& group, Arguments) { return enter(group, [&] { barrier(group); }); }},
};

// Of a process group: c10d's arguments.
const Definition of_process_group[] = {
    {"allreduce", 2,
     [](Group& group, Arguments a) {
       PyObject* x = only(a[0]);
       const Options options(a[1]);
       ReduceOp op{};
       return x != nullptr && options.waits() && options.op(&op) && all_reduce_on(group, x, op);
     }},
    {"reduce", 2,
     [](Group& group, Arguments a) {
       PyObject* x = only(a[0]);
       const Options options(a[1]);
       ReduceOp op{};
       int root;
       return x != nullptr && options.waits() && options.op(&op) && options.root(group, &root) &&
              reduce_on(group, x, root, op);
     }},
    {"broadcast", 2,
     [](Group& group, Arguments a) {
       PyObject* x = only(a[0]);
       const Options options(a[1]);
       int root;
       return x != nullptr && options.waits() && options.root(group, &root) && broadcast_on(group, x, root);
     }},
    {"allgather", 3,
     [](Group& group, Arguments a) {
       PyObject *list = only(a[0]), *input = only(a[1]);
       Buffer x;
       Parts parts;
       return list != nullptr && input != nullptr && Options(a[2]).waits() && x.read(input) &&
              parts.read(list, group.world()) && all_gather_on(group, x, parts);
     }},
    {"all_gather_single", 3,
     [](Group& group, Arguments a) {
       Buffer x, output;
       Parts parts;
       return Options(a[2]).waits() && output.read(a[0]) && x.read(a[1]) && parts.cut(output, group.world()) &&
              all_gather_on(group, x, parts);
     }},
    {"reduce_scatter", 3,
     [](Group& group, Arguments a) {
       PyObject *result = only(a[0]), *list = only(a[1]);
       const Options options(a[2]);
       Buffer output;
       Parts parts;
       ReduceOp op{};
       return result != nullptr && list != nullptr && options.waits() && options.op(&op) && output.read(result) &&
              parts.read(list, group.world()) && reduce_scatter_on(group, parts, output, op);
     }},
    {"reduce_scatter_single", 3,
     [](Group& group, Arguments a) {
       const Options options(a[2]);
       Buffer x, output;
       Parts parts;
       ReduceOp op{};
       return options.waits() && options.op(&op) && output.read(a[0]) && x.read(a[1]) &&
              parts.cut(x, group.world()) && reduce_scatter_on(group, parts, output, op);
     }},
    {"alltoall", 3,
     [](Group& group, Arguments a) {
       Parts inputs, outputs;
       return Options(a[2]).waits() && outputs.read(a[0], group.world()) && inputs.read(a[1], group.world()) &&
              all_to_all_on(group, inputs, outputs);
     }},
    {"all_to_all_single", 5,
     [](Group& group, Arguments a) {
       Buffer x, output;
       Parts inputs, outputs;
       return Options(a[4]).waits() && output.read(a[0]) && x.read(a[1]) && outputs.cut(output, group.world(), a[2]) &&
              inputs.cut(x, group.world(), a[3]) && all_to_all_on(group, inputs, outputs);
     }},
    {"barrier", 1,
     [](Group& group, Arguments a) {
       return Options(a[0]).waits() && enter(group, [&] { barrier(group); });
     }},
};

bool requires_grad(PyObject* tensor) {
  static PyObject* const requires_grad = name("requires_grad");
  const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(tensor, requires_grad));
  if (!value) PyErr_Clear();
  return value.ptr() != Py_False;
}

// Functions of the default group, without their options; each returns its argument.
const Definition of_default_group[] = {
    {"all_reduce", 1,
     [](Group& group, Arguments a) { return !requires_grad(a[0]) && all_reduce_on(group, a[0], ReduceOp::sum); }},
    {"broadcast", 1, [](Group& group, Arguments a) { return !requires_grad(a[0]) && broadcast_on(group, a[0], 0); }},
    {"barrier", 0, [](Group& group, Arguments) { return enter(group, [&] { barrier(group); }); }},
};

// The Python object of a method or function. It is looked up on the class or module and called without being bound, as a
// Python function is.
struct Method {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  const Definition* definition;
  PyObject* group;  // name of the attribute of self with the Group, which may be None; null: the default group's
  PyObject* otherwise;
  PyObject* result;  // of the usual call; null: its argument
};

// Returns the Group of torch's default process group, or None.
py::object default_group() {
  static PyObject* const c10d = py::module_::import("torch.distributed.distributed_c10d").release().ptr();
  static PyObject *const world = name("_world"), *const default_pg = name("default_pg"),
                  *const group_here = name("group_here");
  auto found = py::reinterpret_borrow<py::object>(c10d);
  for (PyObject* attribute : {world, default_pg, group_here}) {
    found = py::reinterpret_steal<py::object>(PyObject_GetAttr(found.ptr(), attribute));
    if (!found) return PyErr_Clear(), py::none();  // a group of another backend
  }
  return found;
}

// Returns whether a profiler of torch runs, which the Python functions tell of their calls.
bool profiling() {
  static PyObject* const names = PyModule_GetDict(py::module_::import("torch.autograd.profiler").release().ptr());
  static PyObject* const enabled = name("_is_profiler_enabled");
  return PyDict_GetItem(names, enabled) == Py_True;
}

// Returns the number of arguments, with one given as opts=..., which is the last; -1 if others have names.
Py_ssize_t count_all(size_t count, PyObject* names) {
  static PyObject* const opts = name("opts");
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (named > 1 || (named == 1 && PyTuple_GET_ITEM(names, 0) != opts)) return -1;
  return PyVectorcall_NARGS(count) + named;
}

PyObject* call(PyObject* callable, Arguments arguments, size_t count, PyObject* names) {
  const auto* method = reinterpret_cast<Method*>(callable);
  const Definition& definition = *method->definition;
  const bool has_self = method->group != nullptr;
  if (count_all(count, names) == definition.arguments + has_self && (has_self || names == nullptr) && !profiling()) {
    try {
      const auto held = has_self ? py::reinterpret_steal<py::object>(PyObject_GetAttr(arguments[0], method->group))
                                 : default_group();
      if (!held) throw py::error_already_set();
      if (!held.is_none() && definition.call(*held.cast<Group*>(), arguments + has_self)) {
        PyObject* const result = method->result != nullptr ? method->result : arguments[0];
        return Py_INCREF(result), result;
      }
    } catch (py::error_already_set& error) {
      return error.restore(), nullptr;
    } catch (...) {
      return py::detail::try_translate_exceptions(), nullptr;
    }
  }
  return PyObject_Vectorcall(method->otherwise, arguments, count, names);
}

// What describes the Python function describes this one.
PyObject* attribute(PyObject* object, PyObject* attribute) {
  for (const char* of_function : {"__doc__", "__name__", "__qualname__", "__module__"})
    if (PyUnicode_CompareWithASCIIString(attribute, of_function) == 0)
      return PyObject_GetAttr(reinterpret_cast<Method*>(object)->otherwise, attribute);
  return PyObject_GenericGetAttr(object, attribute);
}

PyObject* bind(PyObject* method, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) return Py_INCREF(method), method;
  return PyMethod_New(method, object);
}

PyObject* method_type() {
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, nullptr},
                                  {"__wrapped__", T_OBJECT, offsetof(Method, otherwise), READONLY, nullptr},
                                  {}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                {Py_tp_members, members},
                                {}};
  static PyType_Spec spec = {"weft._C.Direct", sizeof(Method), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

// Methods live as long as the process.
template <size_t count>
py::object direct(const Definition (&definitions)[count], const char* group, const std::string& called,
                  const py::function& otherwise, const py::object& result = py::object()) {
  for (const Definition& definition : definitions) {
    if (called != definition.name) continue;
    auto* method = PyObject_New(Method, reinterpret_cast<PyTypeObject*>(method_type()));
    if (method == nullptr) throw py::error_already_set();
    method->vectorcall = call;
    method->definition = &definition;
    method->group = group == nullptr ? nullptr : name(group);
    method->otherwise = py::object(otherwise).release().ptr();
    method->result = py::object(result).release().ptr();
    return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(method));
  }
  throw std::invalid_argument("no method \"" + called + "\"");
}

}  // namespace

void register_methods(py::module_& m) {
  m.attr("Direct") = py::handle(method_type());
  m.def(
      "engine_method",
      [](const py::function& otherwise) {
        return direct(of_engine, "group", py::str(otherwise.attr("__name__")), otherwise, py::none());
      },
      py::arg("otherwise"), "Return a method of Engine that does the usual call here, and any other by `otherwise`.");
  m.def(
      "of_default_group",
      [](const py::function& otherwise) {
        const std::string called = py::str(otherwise.attr("__name__"));
        return called == "barrier" ? direct(of_default_group, nullptr, called, otherwise, py::none())
                                   : direct(of_default_group, nullptr, called, otherwise);
      },
      py::arg("otherwise"),
      "Return a function that does the usual call on the default group here, and any other by `otherwise`.");
  m.def(
      "process_group_method",
      [](const std::string& called, const py::function& otherwise, const py::object& work) {
        return direct(of_process_group, "group_here", called, otherwise, work);
      },
      py::arg("name"), py::arg("otherwise"), py::arg("work"),
      "Return a method of a process group that does the usual call here and returns `work`, and any other by "
      "`otherwise`.");
}

}  // namespace weft::shm
