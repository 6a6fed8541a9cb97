// Reduction on GPUs: sums the sources in rank order in fp32 and rounds once.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace weft::cuda {

enum class Element { float32, float16, bfloat16 };

constexpr int most_sources = 16;

// destination[i] = round(scale * (sources[0][i] + sources[1][i] + ...)). The destination may be one of the sources.
// Reads source_count * count elements and writes count, with 16-byte accesses if every pointer is aligned to 16 bytes.
cudaError_t rank_order_sum(const void* const* sources, int source_count, void* destination, size_t count,
                           Element element, float scale, cudaStream_t stream);

}  // namespace weft::cuda
