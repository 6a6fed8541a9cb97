// Turns CUDA errors into exceptions with their names.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace weft::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                             ")");
}

}  // namespace weft::cuda
