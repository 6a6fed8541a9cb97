// The CUDA driver: the entry points for launches, found with dlopen at their first use, and errors by name.
//
// The few types are declared here as in the driver's binary interface (CUDA driver API reference; cuda.h of CUDA 13).
// So this family builds without CUDA too.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace weft::launch {

using Result = int;  // CUresult
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;

constexpr Result success = 0;
constexpr Result not_initialized = 3;  // CUDA_ERROR_NOT_INITIALIZED

// CUdevice_attribute, CUfunction_attribute, CUfunc_cache, CUstreamCaptureMode
constexpr int most_shared_bytes_of_a_block = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int static_shared_bytes = 1;            // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int most_dynamic_shared_bytes = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int prefer_shared = 1;                  // CU_FUNC_CACHE_PREFER_SHARED
constexpr int relaxed_capture = 2;                // CU_STREAM_CAPTURE_MODE_RELAXED

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  Stream stream;
  const void* attributes;  // CUlaunchAttribute
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56 && offsetof(LaunchConfig, stream) == 32);

struct alignas(128) TensorMap {  // CUtensorMap
  uint64_t words[16];
};

// One function pointer for each entry point, named after it.
struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int*);
  Result (*get_error_name)(Result, const char**);
  Result (*get_error_string)(Result, const char**);
  Result (*device_get)(int*, int ordinal);
  Result (*device_get_attribute)(int*, int attribute, int device);
  Result (*device_primary_ctx_retain)(Context*, int device);
  Result (*ctx_get_current)(Context*);
  Result (*ctx_set_current)(Context);
  Result (*ctx_get_device)(int*);
  Result (*stream_get_ctx)(Stream, Context*);
  Result (*thread_exchange_stream_capture_mode)(int*);
  Result (*module_load_data)(Module*, const void*);
  Result (*module_unload)(Module);
  Result (*module_get_function)(Function*, Module, const char*);
  Result (*func_get_attribute)(int*, int attribute, Function);
  Result (*func_set_attribute)(Function, int attribute, int value);
  Result (*func_set_cache_config)(Function, int);
  Result (*launch_kernel_ex)(const LaunchConfig*, Function, void** parameters, void** extra);
  // Null in a driver older than the version given.
  Result (*ctx_get_id)(Context, unsigned long long*);  // 12.0
  Result (*tensor_map_encode_tiled)(TensorMap*, int element_type, uint32_t rank, void* address, const uint64_t* sizes,
                                    const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion, int fill);  // 12.0
  Result (*func_load)(Function);                                                               // 12.4
  int version;  // 13010 is 13.1
};

struct Search {
  std::string error;               // empty if the driver was found
  const Driver* driver = nullptr;  // null if it was not; never freed, because kernels hold its functions
};

// Searches the library that WEFT_CUDA_DRIVER names, by default libcuda.so.1; does nothing if that one is in use.
Search find_driver();
// Returns the driver found last, or finds it now. Throws std::runtime_error if there is none.
const Driver& driver();

// Error of a driver call, with the call, the error's name and its text.
class DriverError : public std::runtime_error {
 public:
  DriverError(const Driver& driver, Result result, const char* call);
};

inline void check(const Driver& driver, Result result, const char* call) {
  if (result != success) throw DriverError(driver, result, call);
}

// Returns the number of the current context. It is unique, unlike an address, which a new context may reuse. If none is
// current, makes the stream's context current, or for a default stream the primary context of device 0, as the CUDA
// runtime does in a new thread.
uint64_t current_context(const Driver& driver, Stream stream);

}  // namespace weft::launch
