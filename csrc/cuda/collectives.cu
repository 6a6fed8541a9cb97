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
  static int load(const std::string& operation);
  static void copy(const std::string& operation, uintptr_t to, uintptr_t from, size_t bytes, uintptr_t stream);
};

namespace {

template <class Body>
__global__ void __launch_bounds__(Gpu::threads, 1) run(const __grid_constant__ Body body) {
  static_assert(sizeof(Body) <= 4096, "a kernel's parameters before CUDA 12.1 and sm_70");
  Here here;
  body(here);
}

}  // namespace

template <class Body>
void Gpu::launch(const std::string& operation, const Body& body, int blocks, uintptr_t stream) {
  run<Body><<<blocks, threads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(body);
  check(cudaGetLastError(), operation.c_str());
}

template <class Body>
int Gpu::load(const std::string& operation) {
  cudaFuncAttributes loaded;
  check(cudaFuncGetAttributes(&loaded, run<Body>), operation.c_str());
  return loaded.ptxVersion;
}

void Gpu::copy(const std::string& operation, uintptr_t to, uintptr_t from, size_t bytes, uintptr_t stream) {
  check(cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes, cudaMemcpyDefault,
                        reinterpret_cast<cudaStream_t>(stream)),
        operation.c_str());
}

template class Ranks<Gpu>;

}  // namespace weft::cuda
