// Compiled kernel, loaded into each context in which it is launched. Arguments are passed as by Triton 3.7.1's own
// launcher (triton/backends/nvidia/driver.c and driver.py in its wheel).
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "arguments.h"
#include "driver.h"
#include "tensor_map.h"

namespace weft::launch {

// C type of a parameter that is not a constant.
enum class Type { pointer, i1, i8, i16, i32, i64, u1, u8, u16, u32, u64, fp32, fp64, tensor_map };

using Grid = std::array<uint32_t, 3>;

class Packed;  // parameters of a launch, as the driver reads them

class Kernel {
 public:
  struct Description {
    std::string name;
    pybind11::bytes cubin;
    std::vector<std::string> arguments;
    uint32_t shared_bytes;
    uint32_t warps;
    int registers;
  };

  explicit Kernel(Description description);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Throws std::invalid_argument if the kernel does not take arguments of these classes.
  void check_takes(const std::vector<Described>& arguments) const;

  // Launches in the current context (see current_context). The caller holds the interpreter lock, which is released
  // while the driver loads or launches. Throws Python's exceptions, and std::runtime_error with all details of the
  // launch.
  //
  // Under stream capture it makes only calls that capture allows. The first launch in a context loads the kernel, in
  // the relaxed capture mode. The driver forbids loading in the other modes, although it adds nothing to the stream.
  // The function is loaded at once, not lazily by the launch. An empty grid loads it and launches nothing.
  void launch(const Parameters& parameters, const Arguments& arguments, Grid grid, Stream stream) const;

 private:
  // The function in one context. A module is never unloaded: a CUDA graph may hold the function longer than this
  // object lives, and a context destroys its modules at its end.
  struct Loaded {
    const Driver* driver;
    uint64_t context;
    Function function;
    const Loaded* next;
  };

  void pack(Packed& packed, const Driver& driver, const Parameters& parameters, const Arguments& arguments) const;
  const Loaded* find(const Driver& driver, uint64_t context) const;
  Function load(const Driver& driver, uint64_t context) const;
  Function load_function(const Driver& driver) const;
  void allow_shared_memory(const Driver& driver, Function function) const;
  std::string describe(Grid grid) const;

  Description description_;
  std::vector<Type> types_;
  std::vector<TensorMapLayout> maps_;  // one for each argument of type tensor_map
  int parameter_count_ = 0;            // on the device, including hidden parameters
  mutable std::mutex loading_;
  mutable std::atomic<const Loaded*> loaded_{nullptr};
};

}  // namespace weft::launch
