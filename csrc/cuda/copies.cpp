#if defined(WEFT_CUDA_VERSION)
#include "copies.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace py = pybind11;

namespace weft {

namespace {

// Finds the driver's function at its first use, so that the extension loads without a driver.
decltype(&cuStreamWriteValue32) stream_write_value() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cuda::check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000, cudaEnableDefault, &result),
                "cuStreamWriteValue32");
    if (found == nullptr) throw std::runtime_error("the CUDA driver has no cuStreamWriteValue32 of version 12");
    return reinterpret_cast<decltype(&cuStreamWriteValue32)>(found);
  }();
  return function;
}

// Copies the bytes of each copy, then writes 1 to its flag. The write waits for the copy, and a reader of the flag sees
// the copied bytes (CU_STREAM_WRITE_VALUE_DEFAULT has a system-wide fence before the write).
void copy_and_mark(const std::vector<uintptr_t>& destinations, const std::vector<uintptr_t>& sources,
                   const std::vector<size_t>& bytes, const std::vector<uintptr_t>& flags, uintptr_t stream) {
  const size_t count = destinations.size();
  if (sources.size() != count || bytes.size() != count || flags.size() != count)
    throw std::invalid_argument("copy_and_mark: " + std::to_string(count) + " destinations, " +
                                std::to_string(sources.size()) + " sources, " + std::to_string(bytes.size()) +
                                " sizes and " + std::to_string(flags.size()) + " flags; there must be as many of each");
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const auto write = count > 0 ? stream_write_value() : nullptr;
  for (size_t i = 0; i < count; ++i) {
    cuda::check(cudaMemcpyAsync(reinterpret_cast<void*>(destinations[i]), reinterpret_cast<const void*>(sources[i]),
                                bytes[i], cudaMemcpyDefault, on),
                "copy_and_mark");
    const CUresult result = write(on, flags[i], 1, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (result != CUDA_SUCCESS)
      throw std::runtime_error("copy_and_mark: cuStreamWriteValue32 gave error " + std::to_string(result));
  }
}

}  // namespace

void register_copies(py::module_& cuda) {
  cuda.def("copy_and_mark", &copy_and_mark, py::call_guard<py::gil_scoped_release>(), py::arg("destinations"),
           py::arg("sources"), py::arg("bytes"), py::arg("flags"), py::arg("stream"),
           "Copies one after another, each followed by 1 in its int32 flag. Addresses are of memory mapped here.");
}

}  // namespace weft
#endif
