// Elements in kernels: conversion to fp32 and back, and packs of 16 bytes that are moved together.
//
// This header and those that include it compile twice: by nvcc for GPUs, and by a plain C++ compiler, with which the
// tests run the same kernels on threads with their own 16-bit types.
// A function that the host also calls must be WEFT_ON_BOTH. In a template, nvcc lets a host function call a device
// function without a warning, and the call then ends the process.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define WEFT_ON_DEVICE __device__ __forceinline__
#define WEFT_ON_BOTH __host__ __device__ __forceinline__
#define WEFT_UNROLL _Pragma("unroll")
#define WEFT_ROLLED _Pragma("unroll 1")
#else
#define WEFT_ON_DEVICE inline
#define WEFT_ON_BOTH inline
#define WEFT_UNROLL
#define WEFT_ROLLED
#endif

namespace weft::cuda {

template <class T>
struct Convert;

template <>
struct Convert<float> {
  static WEFT_ON_DEVICE float to_float(float value) { return value; }
  static WEFT_ON_DEVICE float from_float(float value) { return value; }
};

#if defined(__CUDACC__)
template <>
struct Convert<__half> {
  static WEFT_ON_DEVICE float to_float(__half value) { return __half2float(value); }
  static WEFT_ON_DEVICE __half from_float(float value) { return __float2half_rn(value); }
};

template <>
struct Convert<__nv_bfloat16> {
  static WEFT_ON_DEVICE float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
  static WEFT_ON_DEVICE __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
};
#endif

// Each rounds once: no compiler may merge two into a fused multiply-add, or divide by a reciprocal.
#if defined(__CUDA_ARCH__)
WEFT_ON_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
WEFT_ON_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
WEFT_ON_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
WEFT_ON_DEVICE float square_root(float a) { return __fsqrt_rn(a); }
#else
WEFT_ON_DEVICE float add(float a, float b) { return a + b; }
WEFT_ON_DEVICE float multiply(float a, float b) { return a * b; }
WEFT_ON_DEVICE float divide(float a, float b) { return a / b; }
WEFT_ON_DEVICE float square_root(float a) { return sqrtf(a); }
#endif

template <class T, int n>
struct alignas(sizeof(T) * n) Pack {
  T values[n];
};

}  // namespace weft::cuda
