// One jit function's compiled variants for one architecture, and the choice among them at each launch.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "kernel.h"

namespace weft::launch {

class Dispatcher {
 public:
  explicit Dispatcher(Parameters parameters) : parameters_(std::move(parameters)) {}

  // Throws std::invalid_argument where the key has a kernel, or is not of the kernel's arguments.
  void add(const std::string& key, std::shared_ptr<const Kernel> kernel);
  pybind11::bytes key(const pybind11::tuple& arguments, const pybind11::tuple& constants) const;
  // False where no kernel has the key. An empty grid is launched by doing nothing.
  bool launch(const pybind11::tuple& grid, const pybind11::tuple& arguments, const pybind11::tuple& constants,
              uintptr_t stream) const;

 private:
  Grid read(const pybind11::tuple& grid) const;

  struct Variant {
    std::string key;  // what the map's key points to
    std::shared_ptr<const Kernel> kernel;
  };

  Parameters parameters_;
  // A variant is never replaced: a launch uses it without the interpreter lock.
  std::unordered_map<std::string_view, std::unique_ptr<const Variant>> variants_;
};

}  // namespace weft::launch
