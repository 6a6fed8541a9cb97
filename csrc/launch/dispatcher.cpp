#include "dispatcher.h"

#include <stdexcept>

namespace py = pybind11;

namespace weft::launch {

void Dispatcher::add(const std::string& key, std::shared_ptr<const Kernel> kernel) {
  kernel->check_takes(described(key));
  auto variant = std::make_unique<const Variant>(Variant{key, std::move(kernel)});
  const std::string_view view = variant->key;
  if (!variants_.emplace(view, std::move(variant)).second)
    throw std::invalid_argument("kernel " + parameters_.function + " has a variant of this key already");
}

py::bytes Dispatcher::key(const py::tuple& arguments, const py::tuple& constants) const {
  const Arguments given(parameters_, arguments.ptr(), constants.ptr());
  const std::string_view key = given.key.view();
  return py::bytes(key.data(), key.size());
}

bool Dispatcher::launch(const py::tuple& grid, const py::tuple& arguments, const py::tuple& constants,
                        uintptr_t stream) const {
  const Grid blocks = read(grid);
  const Arguments given(parameters_, arguments.ptr(), constants.ptr());
  const auto found = variants_.find(given.key.view());
  if (found == variants_.end()) return false;
  found->second->kernel->launch(parameters_, given, blocks, reinterpret_cast<Stream>(stream));
  return true;
}

Grid Dispatcher::read(const py::tuple& grid) const {
  const Py_ssize_t dimensions = PyTuple_GET_SIZE(grid.ptr());
  Grid result{1, 1, 1};
  for (Py_ssize_t i = 0; i < dimensions && i < 3; ++i) {
    const long long blocks = PyLong_AsLongLong(PyTuple_GET_ITEM(grid.ptr(), i));
    if (blocks == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (blocks < 0 || blocks > INT32_MAX)
      throw std::invalid_argument("kernel " + parameters_.function + ": a grid of " + std::to_string(blocks) +
                                  " programs one way; 0 to " + std::to_string(INT32_MAX) + " are possible");
    result[static_cast<size_t>(i)] = static_cast<uint32_t>(blocks);
  }
  if (dimensions < 1 || dimensions > 3)
    throw std::invalid_argument("kernel " + parameters_.function + ": a grid of " + std::to_string(dimensions) +
                                " dimensions; 1 to 3 are possible");
  return result;
}

}  // namespace weft::launch
