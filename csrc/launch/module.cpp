// Binds the launcher of compiled kernels. It exists without CUDA and without a driver too, and driver() reports that.
#include <pybind11/stl.h>

#include <memory>

#include "../families.h"
#include "dispatcher.h"
#include "driver.h"
#include "kernel.h"
#include "kind.h"

namespace py = pybind11;

namespace weft {

namespace {

using namespace launch;

py::dict driver_state() {
  const Search search = find_driver();
  py::dict state;
  state["found"] = search.driver != nullptr;
  state["error"] = search.driver != nullptr ? py::object(py::none()) : py::object(py::str(search.error));
  state["version"] = search.driver != nullptr ? py::object(py::int_(search.driver->version)) : py::object(py::none());
  return state;
}

std::shared_ptr<Kernel> make_kernel(std::string name, py::bytes cubin, std::vector<std::string> arguments,
                                    uint32_t shared_bytes, uint32_t warps, int registers) {
  return std::make_shared<Kernel>(Kernel::Description{std::move(name), std::move(cubin), std::move(arguments),
                                                      shared_bytes, warps, registers});
}

}  // namespace

void register_launch(py::module_& m) {
  py::module_ family = m.def_submodule("launch", "Launches of kernels that were compiled ahead of time.");
  family.def("driver", &driver_state,
             "Look for the CUDA driver; return found, error, version (13010 is 13.1). The environment variable "
             "WEFT_CUDA_DRIVER names another library than libcuda.so.1; launches use the library of the last search.");
  family.def("kind", &kind_of, py::arg("arguments"), py::arg("options"), py::arg("tensors"),
             "Return the kind of a call as bytes, all but its tensors' addresses, and append the tensors to the list. "
             "Return None if an argument cannot be described.");
  py::class_<Kernel, std::shared_ptr<Kernel>>(family, "Kernel",
                                              "One compiled variant, loaded into a context at its first launch there.")
      .def(py::init(&make_kernel), py::arg("name"), py::arg("cubin"), py::arg("arguments"), py::arg("shared_bytes"),
           py::arg("warps"), py::arg("registers"),
           "arguments: the C types, in order, of the parameters that are not constants: ptr, i1 to i64, u1 to u64, "
           "fp32, fp64, or tensordesc: followed by the entry of Triton's metadata tensordesc_meta as JSON.");
  py::class_<Dispatcher>(family, "Dispatcher", "Compiled variants of one jit function for one architecture.")
      .def(py::init([](std::string name, std::vector<std::string> parameters,
                       const std::vector<std::string>& unspecialised) {
             return std::make_unique<Dispatcher>(Parameters(std::move(name), std::move(parameters), unspecialised));
           }),
           py::arg("name"), py::arg("parameters"), py::arg("unspecialised"))
      .def(
          "add",
          [](Dispatcher& self, const py::bytes& key, std::shared_ptr<Kernel> kernel) {
            self.add(std::string(key), std::move(kernel));
          },
          py::arg("key"), py::arg("kernel"))
      .def("key", &Dispatcher::key, py::arg("arguments"), py::arg("constants"),
           "Return the key of a launch; two keys are equal exactly if Triton would run the same variant.")
      .def("launch", &Dispatcher::launch, py::arg("grid"), py::arg("arguments"), py::arg("constants"),
           py::arg("stream"),
           "Launch the variant for these arguments and constants (pairs of name and value) in the current context. "
           "Return False, without a launch, if there is none. An empty grid loads the variant and launches nothing.");
}

}  // namespace weft
