// GPU instructions that kernels of several ranks need beyond C++; no other file has any.
#pragma once
#include <cuda_runtime_api.h>

#include <type_traits>

#include "pieces.h"

namespace weft::cuda {

// A thread of a kernel, in the interface that the other headers use. The tests have another one, on CPU threads.
struct Here {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return static_cast<int>(blockDim.x); }
  __device__ int block() const { return static_cast<int>(blockIdx.x); }
  __device__ int blocks() const { return static_cast<int>(gridDim.x); }

  // Barrier of the block; returns whether the argument is true for all its threads.
  __device__ bool all(bool mine) const { return __syncthreads_and(mine); }

  // Memory of the block for an address of each rank.
  __device__ const void** shared() const {
    __shared__ const void* addresses[most_ranks];
    return addresses;
  }

  // Memory of the block for a number of each thread.
  __device__ float* shared_numbers() const {
    __shared__ float numbers[1024];
    return numbers;
  }

  __device__ void prefetch(const void* address) const { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

  __device__ uint64_t now_ns() const {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
  }

  // Sets a flag. The block's earlier writes are visible before the flag ...
  __device__ void set(uint32_t* flag, uint32_t value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }
  // ... to a block that takes the flag back to 0, which happens if the flag has the value. Returns the value seen.
  __device__ uint32_t take(uint32_t* flag, uint32_t value) const {
    uint32_t seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (seen == value) write(flag, 0);
    return seen;
  }
  __device__ uint32_t read(const uint32_t* flag) const {
    uint32_t seen;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return seen;
  }
  __device__ void write(uint32_t* flag, uint32_t value) const {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }

  // A line of a box (boxes.h): each word is valid by itself, in any order.
  __device__ void write_line(uint32_t* to, const Packed<uint32_t>& line) const {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(line.values[0]),
                 "r"(line.values[1]), "r"(line.values[2]), "r"(line.values[3])
                 : "memory");
  }
  __device__ Packed<uint32_t> read_line(const uint32_t* from) const {
    Packed<uint32_t> line;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(line.values[0]), "=r"(line.values[1]), "=r"(line.values[2]), "=r"(line.values[3])
                 : "l"(from)
                 : "memory");
    return line;
  }

  // The record is in host memory. A claim is atomic among the threads of this GPU, which needs nothing of the link.
  __device__ int64_t read(const int64_t* field) const {
    int64_t seen;
    asm volatile("ld.relaxed.sys.global.s64 %0, [%1];" : "=l"(seen) : "l"(field) : "memory");
    return seen;
  }
  __device__ void write(int64_t* field, int64_t value) const {
    asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(field), "l"(value) : "memory");
  }
  __device__ bool claim(int64_t* field) const {
    int64_t seen;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, 1;" : "=l"(seen) : "l"(field) : "memory");
    return seen == 0;
  }
  // A reader that sees the value also sees the fields written before it.
  __device__ void publish(int64_t* field, int64_t value) const {
    asm volatile("st.release.sys.global.s64 [%0], %1;" ::"l"(field), "l"(value) : "memory");
  }

#if __CUDA_ARCH__ >= 900
  static constexpr bool has_multimem = true;
#else
  static constexpr bool has_multimem = false;
#endif

  // A multicast address is a second address of memory that kernels also reach by its own address. This fence orders
  // accesses through the two (PTX ISA, fence.proxy.alias).
  __device__ void between_aliases() const {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.alias;" ::: "memory");
#endif
  }

  // Loads the sum over all ranks, formed by the switch: in fp32 for the 16-bit types, rounded to T.
  template <class T>
  __device__ Packed<T> load_sum(const T* multicast) const {
    Packed<T> sum{};
#if __CUDA_ARCH__ >= 900
    uint32_t words[4];
    if constexpr (std::is_same_v<T, float>)
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(multicast)
                   : "memory");
    else if constexpr (std::is_same_v<T, __half>)
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(multicast)
                   : "memory");
    else
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(multicast)
                   : "memory");
    memcpy(&sum, words, sizeof sum);
#endif
    return sum;
  }

  // Stores to every rank's memory at once. The type gives only the width of the words; no bits change.
  template <class T>
  __device__ void store_to_all(T* multicast, const Packed<T>& pack) const {
#if __CUDA_ARCH__ >= 900
    uint32_t words[4];
    memcpy(words, &pack, sizeof pack);
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#endif
  }
};

}  // namespace weft::cuda
