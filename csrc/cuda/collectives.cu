// Collectives on a GPU: one kernel that runs any body, and its launch.
#include "check.h"
#include "launches.h"
#include "ptx.h"

namespace weft::cuda {

struct Gpu {
  using float16 = __half;
  using bfloat16 = __nv_bfloat16;
  static constexpr int threads = 512;

  template <class Body>
  static void launch(const std::string& operation, const Body& body, int blocks, uintptr_t stream);
  template <class Body>
  static void need_multimem(const std::string& operation, const Body& body);
};

namespace {

template <class Body>
__global__ void __launch_bounds__(Gpu::threads, 1) run(const __grid_constant__ Body body) {
  Here here;
  body(here);
}

}  // namespace

template <class Body>
void Gpu::launch(const std::string& operation, const Body& body, int blocks, uintptr_t stream) {
  run<Body><<<blocks, threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(body);
  check(cudaGetLastError(), operation.c_str());
}

// Checks the loaded code, not the device. A device without its own code here runs the code for sm_80, which has no
// multimem instructions.
template <class Body>
void Gpu::need_multimem(const std::string& operation, const Body&) {
  cudaFuncAttributes loaded;
  check(cudaFuncGetAttributes(&loaded, run<Body>), operation.c_str());
  if (loaded.ptxVersion < 90)
    throw std::runtime_error(operation + ": cudaErrorNotSupported (multimem instructions need code for sm_90 or later; "
                             "this device runs code for sm_" + std::to_string(loaded.ptxVersion) + ")");
}

template class Ranks<Gpu>;

}  // namespace weft::cuda
