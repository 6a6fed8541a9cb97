#include "reduce.h"

#include <cstdint>

#include "elements.h"

namespace weft::cuda {

namespace {

struct Sources {
  const void* pointers[most_sources];
};

// Each thread sums one pack at a time, in a grid-stride loop. The order of the additions is source 0, 1, 2, ...
template <class T, int n>
__global__ void __launch_bounds__(256)
    sum_packs(const __grid_constant__ Sources sources, int source_count, T* destination, size_t packs, float scale) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < packs; i += stride) {
    float sums[n];
    const Pack<T, n> first = static_cast<const Pack<T, n>*>(sources.pointers[0])[i];
#pragma unroll
    for (int k = 0; k < n; ++k) sums[k] = Convert<T>::to_float(first.values[k]);
    for (int source = 1; source < source_count; ++source) {
      const Pack<T, n> next = static_cast<const Pack<T, n>*>(sources.pointers[source])[i];
#pragma unroll
      for (int k = 0; k < n; ++k) sums[k] = add(sums[k], Convert<T>::to_float(next.values[k]));
    }
    Pack<T, n> result;
#pragma unroll
    for (int k = 0; k < n; ++k) result.values[k] = Convert<T>::from_float(multiply(sums[k], scale));
    reinterpret_cast<Pack<T, n>*>(destination)[i] = result;
  }
}

template <class T, int n>
void launch(const Sources& sources, int source_count, T* destination, size_t packs, float scale, cudaStream_t stream) {
  if (packs == 0) return;
  constexpr unsigned threads = 256;
  constexpr size_t most_blocks = 132 * 8;  // enough to fill the largest device this is compiled for
  const size_t blocks = (packs + threads - 1) / threads;
  sum_packs<T, n><<<static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks), threads, 0, stream>>>(
      sources, source_count, destination, packs, scale);
}

template <class T>
void sum(Sources sources, int source_count, void* destination, size_t count, float scale, cudaStream_t stream) {
  constexpr int per_pack = 16 / sizeof(T);
  uintptr_t all = reinterpret_cast<uintptr_t>(destination);
  for (int i = 0; i < source_count; ++i) all |= reinterpret_cast<uintptr_t>(sources.pointers[i]);
  const size_t packs = all % 16 == 0 ? count / per_pack : 0;
  T* out = static_cast<T*>(destination);
  launch<T, per_pack>(sources, source_count, out, packs, scale, stream);
  for (int i = 0; i < source_count; ++i)
    sources.pointers[i] = static_cast<const T*>(sources.pointers[i]) + packs * per_pack;
  launch<T, 1>(sources, source_count, out + packs * per_pack, count - packs * per_pack, scale, stream);
}

}  // namespace

cudaError_t rank_order_sum(const void* const* sources, int source_count, void* destination, size_t count,
                           Element element, float scale, cudaStream_t stream) {
  if (source_count < 1 || source_count > most_sources) return cudaErrorInvalidValue;
  Sources table{};
  for (int i = 0; i < source_count; ++i) table.pointers[i] = sources[i];
  switch (element) {
    case Element::float32:
      sum<float>(table, source_count, destination, count, scale, stream);
      break;
    case Element::float16:
      sum<__half>(table, source_count, destination, count, scale, stream);
      break;
    case Element::bfloat16:
      sum<__nv_bfloat16>(table, source_count, destination, count, scale, stream);
      break;
  }
  return cudaGetLastError();
}

}  // namespace weft::cuda
