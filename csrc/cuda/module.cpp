// Binds the CUDA family. Without nvcc the module has no `cuda` attribute but None, and nothing else changes.
#include "../families.h"

#if defined(WEFT_CUDA_VERSION)
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "reduce.h"

namespace py = pybind11;

namespace weft {

namespace {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                             ")");
}

py::dict state() {
  py::dict result;
  int driver = 0, devices = 0;
  cudaDriverGetVersion(&driver);  // 0 where there is no driver
  const cudaError_t error = cudaGetDeviceCount(&devices);
  result["driver"] = driver == 0 ? py::object(py::none()) : py::object(py::int_(driver));
  result["devices"] = error == cudaSuccess ? devices : 0;
  result["error"] = error == cudaSuccess ? py::object(py::none()) : py::object(py::str(cudaGetErrorString(error)));
  cudaGetLastError();  // "no device" must not be reported by the next call of somebody else
  return result;
}

void rank_order_sum(const std::vector<uintptr_t>& sources, uintptr_t destination, size_t count,
                    const std::string& dtype, float scale, uintptr_t stream) {
  cuda::Element element;
  if (dtype == "float32")
    element = cuda::Element::float32;
  else if (dtype == "float16")
    element = cuda::Element::float16;
  else if (dtype == "bfloat16")
    element = cuda::Element::bfloat16;
  else
    throw std::invalid_argument("rank_order_sum takes float32, float16 and bfloat16, got " + dtype);
  if (sources.empty() || sources.size() > cuda::most_sources)
    throw std::invalid_argument("rank_order_sum takes 1 to " + std::to_string(cuda::most_sources) + " sources, got " +
                                std::to_string(sources.size()));
  std::vector<const void*> pointers;
  for (const uintptr_t source : sources) pointers.push_back(reinterpret_cast<const void*>(source));
  check(cuda::rank_order_sum(pointers.data(), static_cast<int>(pointers.size()), reinterpret_cast<void*>(destination),
                             count, element, scale, reinterpret_cast<cudaStream_t>(stream)),
        "rank_order_sum");
}

}  // namespace

void register_cuda(py::module_& m) {
  py::module_ cuda = m.def_submodule("cuda", "CUDA kernels on raw pointers, sizes and stream handles.");
  cuda.def("state", &state, "Driver version, number of devices, and the error that asking for them gave.");
  cuda.def("rank_order_sum", &rank_order_sum, py::arg("sources"), py::arg("destination"), py::arg("count"),
           py::arg("dtype"), py::arg("scale") = 1.0f, py::arg("stream") = 0,
           "destination = scale * sum(sources), in order, accumulated in fp32 and rounded once.");
}

}  // namespace weft
#else

namespace weft {

void register_cuda(pybind11::module_& m) { m.attr("cuda") = pybind11::none(); }

}  // namespace weft
#endif
