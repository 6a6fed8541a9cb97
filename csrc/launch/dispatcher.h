// Compiled variants of one jit function for one architecture, and the choice of a variant at each launch.
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

  // Throws std::invalid_argument if the key has a kernel already, or does not describe the kernel's arguments.
  void add(const std::string& key, std::shared_ptr<const Kernel> kernel);
  pybind11::bytes key(const pybind11::tuple& arguments, const pybind11::tuple& constants) const;
  // Returns false if no kernel has the key. An empty grid loads the kernel and launches nothing.
  bool launch(const pybind11::tuple& grid, const pybind11::tuple& arguments, const pybind11::tuple& constants,
              uintptr_t stream) const;

 private:
  Grid read(const pybind11::tuple& grid) const;

  struct Variant {
    std::string key;  // the map's key points into it
    std::shared_ptr<const Kernel> kernel;
  };

  Parameters parameters_;
  // Variants are never replaced, because launches use them without the interpreter lock.
  std::unordered_map<std::string_view, std::unique_ptr<const Variant>> variants_;
};

}  // namespace weft::launch
