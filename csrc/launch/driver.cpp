#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace weft::launch {

namespace {

std::atomic<const Driver*> latest{nullptr};
std::atomic<pid_t> user{0};  // the first process with a context

std::string named_library() {
  const char* named = std::getenv("WEFT_CUDA_DRIVER");
  return named != nullptr && *named != 0 ? named : "libcuda.so.1";
}

template <class Pointer>
bool find(void* library, const char* symbol, Pointer& function) {
  function = reinterpret_cast<Pointer>(dlsym(library, symbol));
  return function != nullptr;
}

// Finds all entry points; returns the first missing one, or null.
const char* find_all(void* library, Driver& driver) {
  const char* missing = nullptr;
  const auto need = [&](const char* symbol, auto& function) {
    if (!find(library, symbol, function) && missing == nullptr) missing = symbol;
  };
  need("cuInit", driver.init);
  need("cuDriverGetVersion", driver.driver_get_version);
  need("cuGetErrorName", driver.get_error_name);
  need("cuGetErrorString", driver.get_error_string);
  need("cuDeviceGet", driver.device_get);
  need("cuDeviceGetAttribute", driver.device_get_attribute);
  need("cuDevicePrimaryCtxRetain", driver.device_primary_ctx_retain);
  need("cuCtxGetCurrent", driver.ctx_get_current);
  need("cuCtxSetCurrent", driver.ctx_set_current);
  need("cuCtxGetDevice", driver.ctx_get_device);
  need("cuStreamGetCtx", driver.stream_get_ctx);
  need("cuThreadExchangeStreamCaptureMode", driver.thread_exchange_stream_capture_mode);
  need("cuModuleLoadData", driver.module_load_data);
  need("cuModuleUnload", driver.module_unload);
  need("cuModuleGetFunction", driver.module_get_function);
  need("cuFuncGetAttribute", driver.func_get_attribute);
  need("cuFuncSetAttribute", driver.func_set_attribute);
  need("cuFuncSetCacheConfig", driver.func_set_cache_config);
  need("cuLaunchKernelEx", driver.launch_kernel_ex);
  find(library, "cuCtxGetId", driver.ctx_get_id);
  find(library, "cuTensorMapEncodeTiled", driver.tensor_map_encode_tiled);
  find(library, "cuFuncLoad", driver.func_load);
  return missing;
}

Search search(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return {"no CUDA driver: " + (why != nullptr ? std::string(why) : name + " does not load")};
  }
  auto found = std::make_unique<Driver>();
  if (const char* missing = find_all(library, *found))
    return {"the CUDA driver " + name + " has no " + missing + "; version 12 or later is needed"};
  // This call needs no cuInit. After cuInit, this process could not be forked.
  const Result result = found->driver_get_version(&found->version);
  if (result != success) return {DriverError(*found, result, "cuDriverGetVersion").what()};
  return {"", found.release()};
}

std::string text_of(const Driver& driver, Result result, const char* call) {
  const char *name = nullptr, *text = nullptr;
  std::string message = std::string(call) + ": ";
  if (driver.get_error_name(result, &name) != success || name == nullptr)
    message += "CUDA error " + std::to_string(result);
  else if (driver.get_error_string(result, &text) != success || text == nullptr)
    message += name;
  else
    message += std::string(name) + " (" + text + ")";
  const pid_t first = user.load();
  if (first != 0 && first != getpid())
    message += "; this process was forked from one that had used CUDA, and cannot use it: start it by spawn";
  else if (result == 700 || result == 702 || result == 710 || (result >= 714 && result <= 719))
    // An illegal address, a time-out, an assertion or an exception in a kernel: the next call reports it.
    message += "; work given to the device before may have caused it";
  return message;
}

Context adopt_context(const Driver& driver, Stream stream) {
  Context context = nullptr;
  // 0, 1 and 2 are the default streams, which belong to the current context.
  if (reinterpret_cast<uintptr_t>(stream) > 2) {
    check(driver, driver.stream_get_ctx(stream, &context), "cuStreamGetCtx");
  } else {
    int device = 0;
    check(driver, driver.device_get(&device, 0), "cuDeviceGet");
    check(driver, driver.device_primary_ctx_retain(&context, device), "cuDevicePrimaryCtxRetain");
  }
  check(driver, driver.ctx_set_current(context), "cuCtxSetCurrent");
  return context;
}

}  // namespace

Search find_driver() {
  static std::mutex mutex;
  static std::map<std::string, const Driver*> found;
  const std::lock_guard lock(mutex);
  const std::string name = named_library();
  const auto earlier = found.find(name);
  // Search again for a driver that was not found: it may exist now.
  Search result = earlier == found.end() ? search(name) : Search{"", earlier->second};
  if (result.driver != nullptr) found.emplace(name, result.driver);
  latest.store(result.driver, std::memory_order_release);
  return result;
}

const Driver& driver() {
  const Driver* used = latest.load(std::memory_order_acquire);
  if (used != nullptr) return *used;
  const Search result = find_driver();
  if (result.driver == nullptr) throw std::runtime_error(result.error);
  return *result.driver;
}

DriverError::DriverError(const Driver& driver, Result result, const char* call)
    : std::runtime_error(text_of(driver, result, call)) {}

uint64_t current_context(const Driver& driver, Stream stream) {
  Context context = nullptr;
  Result result = driver.ctx_get_current(&context);
  if (result == not_initialized) {
    check(driver, driver.init(0), "cuInit");
    result = driver.ctx_get_current(&context);
  }
  check(driver, result, "cuCtxGetCurrent");
  if (context == nullptr) context = adopt_context(driver, stream);
  unsigned long long id = reinterpret_cast<uintptr_t>(context);
  if (driver.ctx_get_id != nullptr) check(driver, driver.ctx_get_id(context, &id), "cuCtxGetId");
  pid_t nobody = 0;
  if (user.load(std::memory_order_relaxed) == 0) user.compare_exchange_strong(nobody, getpid());
  return id;
}

}  // namespace weft::launch
