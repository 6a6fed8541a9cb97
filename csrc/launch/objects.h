// Helpers that read Python objects at every launch: owned references, attribute names, and cached facts about objects.
//
// pybind11's own handles check for the interpreter lock at each change of a reference count, which costs as much as the
// read.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <utility>

namespace weft::launch {

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Owned = std::unique_ptr<PyObject, Release>;

// Takes a new reference; throws Python's exception if it is null.
inline Owned owned(PyObject* object) {
  if (object == nullptr) throw pybind11::error_already_set();
  return Owned(object);
}

struct Names {
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* base = PyUnicode_InternFromString("base");
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* strides = PyUnicode_InternFromString("strides");
  PyObject* block_shape = PyUnicode_InternFromString("block_shape");
  PyObject* padding = PyUnicode_InternFromString("padding");
  PyObject* round_f32_to_tf32 = PyUnicode_InternFromString("round_f32_to_tf32");
};

inline const Names& names() {
  static const Names interned;
  return interned;
}

inline Owned attribute(PyObject* object, PyObject* name) { return owned(PyObject_GetAttr(object, name)); }

// Items of a list or tuple, which must outlive this object.
class Items {
 public:
  explicit Items(PyObject* sequence) : fast_(owned(PySequence_Fast(sequence, "it must be a list or a tuple"))) {}
  Py_ssize_t count() const { return PySequence_Fast_GET_SIZE(fast_.get()); }
  long long integer(Py_ssize_t place) const {
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast_.get(), place));
    if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return value;
  }

 private:
  Owned fast_;
};

// Cache of facts about objects, by identity. It keeps each object alive, so that no other object gets its address. It
// is for few objects (types, element types). Once it is full, facts about others are found anew each time.
template <class Fact, size_t most>
class Facts {
 public:
  const Fact* find(PyObject* object) const {
    for (size_t i = 0; i < count_; ++i)
      if (objects_[i] == object) return &facts_[i];
    return nullptr;
  }
  void keep(PyObject* object, Fact fact) {
    if (count_ == most) return;
    Py_INCREF(object);
    facts_[count_] = std::move(fact);
    objects_[count_++] = object;
  }

 private:
  size_t count_ = 0;
  PyObject* objects_[most];
  Fact facts_[most];
};

}  // namespace weft::launch
