#include "methods.h"

#include <pybind11/detail/exception_translation.h>
#include <structmember.h>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
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

  // Returns false if the object is not a dense CPU tensor in one piece, of a type that is reduced. Subclasses and negated
  // views are refused: their memory does not hold their values.
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

  bool read(PyObject* object, const Group&) {
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
  bool read(PyObject* list, const Group& group) {
    if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != group.world()) return false;
    for (int rank = 0; rank < group.world(); ++rank) {
      Buffer part;
      if (!part.read(PyList_GET_ITEM(list, rank), group) || (rank > 0 && part.dtype != dtype)) return false;
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

bool all_reduce_on(Group& group, const Buffer& x, ReduceOp op) {
  return enter(group, [&] { all_reduce(group, x.data, x.data, x.count, x.dtype, op); });
}

bool reduce_on(Group& group, const Buffer& x, int root, ReduceOp op) {
  return enter(group, [&] { reduce(group, x.data, x.data, x.count, x.dtype, op, root); });
}

bool broadcast_on(Group& group, const Buffer& x, int root) {
  return enter(group, [&] { broadcast(group, x.data, x.count, x.dtype, root); });
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

bool barrier_on(Group& group) {
  return enter(group, [&] { barrier(group); });
}

py::object attribute_of(PyObject* object, PyObject* attribute) {
  PyObject* value = PyObject_GetAttr(object, attribute);
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

// Readers of an argument, besides Buffer and Parts. `read` returns false if it is unusual.

// A number from 0 to below a limit.
template <class Number>
bool read_number(PyObject* object, size_t limit, Number* number) {
  const long value = PyLong_Check(object) ? PyLong_AsLong(object) : -1;
  *number = static_cast<Number>(value);
  return PyErr_Occurred() != nullptr ? (PyErr_Clear(), false) : value >= 0 && static_cast<size_t>(value) < limit;
}

struct Op {
  ReduceOp op;
  bool read(PyObject* code, const Group&) { return read_number(code, reduce_op_count, &op); }
};

struct Root {
  int root;
  bool read(PyObject* rank, const Group& group) { return read_number(rank, group.world(), &root); }
};

struct Detached : Buffer {
  bool read(PyObject* tensor, const Group& group) {
    static PyObject* const requires_grad = name("requires_grad");
    return attribute_of(tensor, requires_grad).ptr() == Py_False && Buffer::read(tensor, group);
  }
};

// The one item of a list.
template <class Item>
struct Only : Item {
  bool read(PyObject* list, const Group& group) {
    return PyList_CheckExact(list) && PyList_GET_SIZE(list) == 1 && Item::read(PyList_GET_ITEM(list, 0), group);
  }
};

struct Rows {
  PyObject* numbers;
  bool read(PyObject* list, const Group&) { return numbers = list, true; }
};

// c10d's options: those of a call that waits, with its operator and its root if there are fields for them.
template <class... Fields>
struct Options : Fields... {
  bool read(PyObject* options, const Group& group) {
    static PyObject* const async = name("asyncOp");
    return attribute_of(options, async).ptr() == Py_False && (Fields::read(options, group) && ...);
  }
};

struct OpField {
  ReduceOp op;
  bool read(PyObject* options, const Group&) {
    // c10d's RedOpType, which its ReduceOp has as hash.
    static constexpr ReduceOp ours[] = {ReduceOp::sum,         ReduceOp::average,    ReduceOp::product,
                                        ReduceOp::minimum,     ReduceOp::maximum,    ReduceOp::bitwise_and,
                                        ReduceOp::bitwise_or,  ReduceOp::bitwise_xor};
    static PyObject* const reduce_op = name("reduceOp");
    const py::object value = attribute_of(options, reduce_op);
    const Py_hash_t theirs = value ? PyObject_Hash(value.ptr()) : -1;
    if (theirs < 0 || theirs >= static_cast<Py_hash_t>(std::size(ours))) return PyErr_Clear(), false;
    op = ours[theirs];
    return true;
  }
};

struct RootField : Root {
  bool read(PyObject* options, const Group& group) {
    static PyObject* const root_rank = name("rootRank");
    const py::object value = attribute_of(options, root_rank);
    return value && Root::read(value.ptr(), group);
  }
};

// A method: its arguments without self are those of `call`, each read as the type there says.
struct Definition {
  template <class Call>
  Definition(const char* its_name, Call call) : Definition(its_name, call, &Call::operator()) {}

  const char* name;
  int arguments;
  std::function<bool(Group&, Arguments)> call;

 private:
  template <class Call, class... Readers>
  Definition(const char* its_name, Call call_read, bool (Call::*)(Group&, const Readers&...) const)
      : name(its_name), arguments(sizeof...(Readers)), call([call_read](Group& group, Arguments objects) {
          std::tuple<Readers...> readers;
          const auto call = [&](const auto&... reader) { return call_read(group, reader...); };
          return read(readers, group, objects, std::index_sequence_for<Readers...>()) && std::apply(call, readers);
        }) {}

  // Reads the last argument first: c10d's options decide most unusual calls.
  template <class Tuple, size_t... back>
  static bool read(Tuple& readers, const Group& group, Arguments objects, std::index_sequence<back...>) {
    constexpr size_t count = sizeof...(back);
    return (std::get<count - 1 - back>(readers).read(objects[count - 1 - back], group) && ...);
  }
};

const auto do_barrier = [](Group& g) { return barrier_on(g); };

// Of Engine: its arguments without `wait`.
const Definition of_engine[] = {
    {"all_reduce", [](Group& g, const Buffer& x, const Op& op) { return all_reduce_on(g, x, op.op); }},
    {"broadcast", [](Group& g, const Buffer& x, const Root& root) { return broadcast_on(g, x, root.root); }},
    {"all_gather", [](Group& g, const Buffer& x, const Parts& parts) { return all_gather_on(g, x, parts); }},
    {"reduce_scatter",
     [](Group& g, const Parts& parts, const Buffer& output, const Op& op) {
       return reduce_scatter_on(g, parts, output, op.op);
     }},
    {"all_to_all", [](Group& g, const Parts& inputs, const Parts& outputs) { return all_to_all_on(g, inputs, outputs); }},
    {"barrier", do_barrier},
};

// Of a process group: c10d's arguments.
const Definition of_process_group[] = {
    {"allreduce",
     [](Group& g, const Only<Buffer>& x, const Options<OpField>& options) { return all_reduce_on(g, x, options.op); }},
    {"reduce",
     [](Group& g, const Only<Buffer>& x, const Options<OpField, RootField>& options) {
       return reduce_on(g, x, options.root, options.op);
     }},
    {"broadcast",
     [](Group& g, const Only<Buffer>& x, const Options<RootField>& options) { return broadcast_on(g, x, options.root); }},
    {"allgather",
     [](Group& g, const Only<Parts>& parts, const Only<Buffer>& x, const Options<>&) {
       return all_gather_on(g, x, parts);
     }},
    {"all_gather_single",
     [](Group& g, const Buffer& output, const Buffer& x, const Options<>&) {
       Parts parts;
       return parts.cut(output, g.world()) && all_gather_on(g, x, parts);
     }},
    {"reduce_scatter",
     [](Group& g, const Only<Buffer>& output, const Only<Parts>& parts, const Options<OpField>& options) {
       return reduce_scatter_on(g, parts, output, options.op);
     }},
    {"reduce_scatter_single",
     [](Group& g, const Buffer& output, const Buffer& x, const Options<OpField>& options) {
       Parts parts;
       return parts.cut(x, g.world()) && reduce_scatter_on(g, parts, output, options.op);
     }},
    {"alltoall",
     [](Group& g, const Parts& outputs, const Parts& inputs, const Options<>&) {
       return all_to_all_on(g, inputs, outputs);
     }},
    {"all_to_all_single",
     [](Group& g, const Buffer& output, const Buffer& x, const Rows& output_rows, const Rows& rows, const Options<>&) {
       Parts inputs, outputs;
       return outputs.cut(output, g.world(), output_rows.numbers) && inputs.cut(x, g.world(), rows.numbers) &&
              all_to_all_on(g, inputs, outputs);
     }},
    {"barrier", [](Group& g, const Options<>&) { return barrier_on(g); }},
};

// Functions of the default group, without their options; each returns its argument.
const Definition of_default_group[] = {
    {"all_reduce", [](Group& g, const Detached& x) { return all_reduce_on(g, x, ReduceOp::sum); }},
    {"broadcast", [](Group& g, const Detached& x) { return broadcast_on(g, x, 0); }},
    {"barrier", do_barrier},
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

// Forwards __doc__ and names to the Python function.
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
  static PyType_Spec spec = {"weft._C.FastMethod", sizeof(Method), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR |
                                 Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  return type;
}

// Methods live as long as the process.
template <size_t count>
py::object fast_method(const Definition (&definitions)[count], const char* group, const std::string& called,
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
  m.attr("FastMethod") = py::handle(method_type());
  m.def(
      "engine_method",
      [](const py::function& otherwise) {
        return fast_method(of_engine, "group", py::str(otherwise.attr("__name__")), otherwise, py::none());
      },
      py::arg("otherwise"), "Return a method of Engine that does the usual call here, and any other by `otherwise`.");
  m.def(
      "of_default_group",
      [](const py::function& otherwise) {
        const std::string called = py::str(otherwise.attr("__name__"));
        return called == "barrier" ? fast_method(of_default_group, nullptr, called, otherwise, py::none())
                                   : fast_method(of_default_group, nullptr, called, otherwise);
      },
      py::arg("otherwise"),
      "Return a function that does the usual call on the default group here, and any other by `otherwise`.");
  m.def(
      "process_group_method",
      [](const std::string& called, const py::function& otherwise, const py::object& work) {
        return fast_method(of_process_group, "group_here", called, otherwise, work);
      },
      py::arg("name"), py::arg("otherwise"), py::arg("work"),
      "Return a method of a process group that does the usual call here and returns `work`, and any other by "
      "`otherwise`.");
}

}  // namespace weft::shm
