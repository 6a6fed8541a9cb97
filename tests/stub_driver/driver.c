// A CUDA driver without a device, for tests: it records every call, and fails on request.
//
// It is compiled against NVIDIA's own cuda.h, so what it reads of a launch is what a driver would read. What a real one
// refuses, as far as a launcher can get it wrong, it refuses too: a function of a context that is gone or not current,
// more shared memory than was asked for, loading while a stream is captured, a process forked after cuInit.
//
// A kernel's image is the text "stub NAME STATIC_SHARED_BYTES BYTES BYTES ...", with the size of each parameter.
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

#define SHOWN __attribute__((visibility("default")))

enum { MOST_CALLS = 2048, MOST_PARAMETERS = 256, MOST_FUNCTIONS = 1024, CONTEXTS = 4 };

typedef struct {
  char name[40];
  int64_t numbers[32];
  uint32_t attribute_count;
  struct {
    uint32_t id;
    uint32_t words[3];
  } attributes[8];
  uint32_t parameter_count;
  uint32_t sizes[MOST_PARAMETERS];
  uint8_t bytes[4096];  // of all parameters, one after another
} Call;

typedef struct {
  unsigned long long id;  // 0: not there
  int device;
} Context;

typedef struct {
  Context* context;
  unsigned long long context_id;
  char name[64];
  int static_shared, dynamic_shared, loaded;
  uint32_t parameter_count;
  uint32_t sizes[MOST_PARAMETERS];
} Kernel;  // a module and its one function

// What a test reads and sets.
SHOWN Call stub_calls[MOST_CALLS];
SHOWN atomic_int stub_count;
SHOWN int stub_recording = 1;
SHOWN int stub_version = 13010;
SHOWN int stub_shared_limit = 232448;
SHOWN int stub_capturing;
SHOWN atomic_int stub_hold_loads;  // a load under way waits until this is 0, but not for ever

static Context contexts[CONTEXTS];
static Kernel kernels[MOST_FUNCTIONS];
static atomic_int kernel_count;
static unsigned long long last_id = 100;
static int initialised, forked_since;
static __thread Context* current;
static __thread CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static char failing[40];
static atomic_int calls_until_failure;
static CUresult failure;
static Call unrecorded;

SHOWN void stub_fail(const char* name, int nth, int result) {
  snprintf(failing, sizeof failing, "%s", name);
  failure = (CUresult)result;
  calls_until_failure = nth;
}

SHOWN void stub_reset(void) {
  stub_count = kernel_count = 0;
  stub_recording = 1;
  stub_version = 13010;
  stub_shared_limit = 232448;
  stub_capturing = stub_hold_loads = 0;
  failing[0] = 0;
  memset(contexts, 0, sizeof contexts);
  current = NULL;
  initialised = forked_since = 0;
}

static void note_fork(void) { forked_since = initialised; }
__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

// Makes the calls while callgrind counts; returns 0 where valgrind's headers are missing.
SHOWN int stub_count_instructions(void (*calls)(void)) {
#ifdef CALLGRIND_START_INSTRUMENTATION
  CALLGRIND_START_INSTRUMENTATION;
  calls();
  CALLGRIND_STOP_INSTRUMENTATION;
  return 1;
#else
  (void)calls;
  return 0;
#endif
}

SHOWN void stub_initialise(void) { initialised = 1; }

// Makes a context where there may have been another.
SHOWN uint64_t stub_create_context(int place, int device) {
  contexts[place].id = ++last_id;
  contexts[place].device = device;
  return (uint64_t)&contexts[place];
}

SHOWN void stub_set_current(uint64_t context) { current = (Context*)context; }
SHOWN uint64_t stub_current(void) { return (uint64_t)current; }
SHOWN int stub_capture_mode(void) { return (int)capture_mode; }

static CUresult enter(const char* name, Call** call) {
  int place = stub_recording ? stub_count++ : MOST_CALLS;
  *call = place < MOST_CALLS ? &stub_calls[place] : &unrecorded;
  if (stub_recording) {
    memset(*call, 0, offsetof(Call, sizes));
    snprintf((*call)->name, sizeof(*call)->name, "%s", name);
  }
  if (failing[0] != 0 && strcmp(failing, name) == 0 && --calls_until_failure == 0) return failure;
  return CUDA_SUCCESS;
}

#define ENTER(...)                                                          \
  Call* call;                                                               \
  const CUresult entered = enter(__func__, &call);                          \
  const int64_t numbers[] = {__VA_ARGS__};                                  \
  if (stub_recording) memcpy(call->numbers, numbers, sizeof numbers);       \
  if (entered != CUDA_SUCCESS) return entered
#define INITIALISED \
  if (!initialised || forked_since) return CUDA_ERROR_NOT_INITIALIZED
#define CURRENT \
  if (current == NULL || current->id == 0) return CUDA_ERROR_INVALID_CONTEXT
#define MAY_LOAD \
  if (stub_capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED

SHOWN CUresult cuInit(unsigned flags) {
  ENTER(flags);
  if (forked_since) return CUDA_ERROR_NOT_INITIALIZED;
  initialised = 1;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuDriverGetVersion(int* version) {
  ENTER(0);
  *version = stub_version;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE              ? "CUDA_ERROR_INVALID_VALUE"
          : error == CUDA_ERROR_OUT_OF_MEMORY            ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == CUDA_ERROR_NOT_INITIALIZED          ? "CUDA_ERROR_NOT_INITIALIZED"
          : error == CUDA_ERROR_INVALID_HANDLE           ? "CUDA_ERROR_INVALID_HANDLE"
          : error == CUDA_ERROR_NOT_FOUND                ? "CUDA_ERROR_NOT_FOUND"
          : error == CUDA_ERROR_NO_BINARY_FOR_GPU        ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : error == CUDA_ERROR_ILLEGAL_ADDRESS          ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : error == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
                                                         : NULL;
  return *name != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SHOWN CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : "the stub's text";
  return CUDA_SUCCESS;
}

SHOWN CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(ordinal);
  INITIALISED;
  *device = ordinal;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  ENTER(attribute, device);
  INITIALISED;
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? stub_shared_limit : 0;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  ENTER(device);
  INITIALISED;
  if (contexts[device].id == 0) stub_create_context(device, device);
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}

SHOWN CUresult cuCtxGetCurrent(CUcontext* context) {
  ENTER(0);
  INITIALISED;
  *context = (CUcontext)current;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuCtxSetCurrent(CUcontext context) {
  ENTER((int64_t)context);
  INITIALISED;
  current = (Context*)context;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuCtxGetDevice(CUdevice* device) {
  ENTER(0);
  CURRENT;
  *device = current->device;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuStreamGetCtx(CUstream stream, CUcontext* context) {
  ENTER((int64_t)stream);
  INITIALISED;
  *context = *(CUcontext*)stream;  // a test's stream is the address of a context's
  return CUDA_SUCCESS;
}

SHOWN CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  ENTER(*mode);
  CUstreamCaptureMode before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  ENTER(0);
  CURRENT;
  MAY_LOAD;
  for (int tries = 0; stub_hold_loads && tries < 10000; ++tries) usleep(1000);
  Kernel* kernel = &kernels[kernel_count++];
  memset(kernel, 0, sizeof *kernel);
  kernel->context = current;
  kernel->context_id = current->id;
  int used = 0;
  const char* text = image;
  if (sscanf(text, "stub %63s %d%n", kernel->name, &kernel->static_shared, &used) != 2)
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  unsigned size;
  for (text += used; sscanf(text, " %u%n", &size, &used) == 1; text += used)
    kernel->sizes[kernel->parameter_count++] = size;
  *module = (CUmodule)kernel;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuModuleUnload(CUmodule module) {
  ENTER((int64_t)module);
  CURRENT;
  MAY_LOAD;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  ENTER((int64_t)module);
  CURRENT;
  if (strcmp(((Kernel*)module)->name, name) != 0) return CUDA_ERROR_NOT_FOUND;
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  ENTER(attribute, (int64_t)function);
  CURRENT;
  *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? ((Kernel*)function)->static_shared : 0;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  ENTER(attribute, value, (int64_t)function);
  CURRENT;
  Kernel* kernel = (Kernel*)function;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value + kernel->static_shared > stub_shared_limit) return CUDA_ERROR_INVALID_VALUE;
    kernel->dynamic_shared = value;
  }
  return CUDA_SUCCESS;
}

SHOWN CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
  ENTER(config, (int64_t)function);
  CURRENT;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  (void)attribute;
  *(CUdeviceptr*)value = address;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  (void)limit;
  *value = 0;
  return CUDA_ERROR_NOT_SUPPORTED;
}

SHOWN CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
  (void)limit, (void)value;
  return CUDA_ERROR_NOT_SUPPORTED;
}

#ifndef WITHOUT_NEWER
SHOWN CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
  ENTER((int64_t)context);
  if (((Context*)context)->id == 0) return CUDA_ERROR_INVALID_CONTEXT;
  *id = ((Context*)context)->id;
  return CUDA_SUCCESS;
}

SHOWN CUresult cuFuncLoad(CUfunction function) {
  ENTER((int64_t)function);
  MAY_LOAD;
  ((Kernel*)function)->loaded = 1;
  return CUDA_SUCCESS;
}

// The map is nothing but what it was made of.
SHOWN CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                      const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                      CUtensorMapFloatOOBfill fill) {
  ENTER(type, rank, (int64_t)address, interleave, swizzle, promotion, fill);
  if ((uintptr_t)map % 64 != 0 || rank < 1 || rank > 5) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  for (cuuint32_t i = 0; i < rank; ++i) {
    const int64_t stride = i + 1 < rank ? (int64_t)strides[i] : 0;
    if (stub_recording) {
      call->numbers[7 + i] = (int64_t)sizes[i];
      call->numbers[12 + i] = stride;
      call->numbers[17 + i] = box[i];
      call->numbers[22 + i] = element_strides[i];
    }
    map->opaque[2 + i] = sizes[i];
    map->opaque[7 + i] = (uint64_t)stride << 16 | box[i];
  }
  map->opaque[0] = (uint64_t)address;
  map->opaque[1] = ~0ull;  // all that a launcher may clear is set
  map->opaque[12] = (uint64_t)type << 48 | (uint64_t)swizzle << 32 | (uint64_t)promotion << 16 | (uint64_t)fill;
  return CUDA_SUCCESS;
}
#endif

#ifndef WITHOUT_LAUNCH
SHOWN CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  ENTER(config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ,
        config->sharedMemBytes, (int64_t)config->hStream, (int64_t)current, extra != NULL);
  INITIALISED;
  CURRENT;
  const Kernel* kernel = (const Kernel*)function;
  if (kernel->context != current || kernel->context_id != current->id) return CUDA_ERROR_INVALID_HANDLE;
  const unsigned allowed = kernel->dynamic_shared != 0 ? (unsigned)kernel->dynamic_shared
                                                       : 48u * 1024 - (unsigned)kernel->static_shared;
  if (config->sharedMemBytes > allowed) return CUDA_ERROR_INVALID_VALUE;
#ifndef WITHOUT_NEWER
  if (stub_capturing && !kernel->loaded) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
#endif
  if (!stub_recording) return CUDA_SUCCESS;
  call->attribute_count = config->numAttrs;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    call->attributes[i].id = config->attrs[i].id;
    memcpy(call->attributes[i].words, &config->attrs[i].value, sizeof call->attributes[i].words);
  }
  call->parameter_count = kernel->parameter_count;
  size_t at = 0;
  for (uint32_t i = 0; i < kernel->parameter_count; ++i) {
    call->sizes[i] = kernel->sizes[i];
    if (kernel->sizes[i] == sizeof(CUtensorMap) && (uintptr_t)parameters[i] % 64 != 0) return CUDA_ERROR_INVALID_VALUE;
    memcpy(call->bytes + at, parameters[i], kernel->sizes[i]);
    at += kernel->sizes[i];
  }
  return CUDA_SUCCESS;
}
#endif
