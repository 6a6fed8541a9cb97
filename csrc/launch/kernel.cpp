#include "kernel.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace weft::launch {

namespace {

constexpr int most_parameters = 256;
constexpr int most_maps = 12;
constexpr uint32_t shared_bytes_without_asking = 48 * 1024;
constexpr const char* map_prefix = "tensordesc:";

constexpr std::pair<const char*, Type> type_names[] = {
    {"ptr", Type::pointer}, {"fp32", Type::fp32}, {"fp64", Type::fp64},
    {"i1", Type::i1},       {"i8", Type::i8},     {"i16", Type::i16},   {"i32", Type::i32}, {"i64", Type::i64},
    {"u1", Type::u1},       {"u8", Type::u8},     {"u16", Type::u16},   {"u32", Type::u32}, {"u64", Type::u64},
};

class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver) : driver_(driver) {
    check(driver_, driver_.thread_exchange_stream_capture_mode(&mode_), "cuThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { driver_.thread_exchange_stream_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& driver_;
  int mode_ = relaxed_capture;
};

bool takes(Type type, Class kind) {
  switch (kind) {
    case Class::tensor:
    case Class::tensor_by_16:
      return type == Type::pointer;
    case Class::descriptor:
      return type == Type::tensor_map;
    case Class::real:
      return type == Type::fp32 || type == Type::fp64;
    case Class::boolean:
      return type == Type::i1 || type == Type::u1;
    case Class::u64:
    case Class::u64_by_16:
      return type == Type::u64;
    default:
      return type == Type::i8 || type == Type::i16 || type == Type::i32 || type == Type::i64 || type == Type::u8 ||
             type == Type::u16 || type == Type::u32;
  }
}

template <class Integer>
bool holds(int64_t value) {
  return static_cast<int64_t>(static_cast<Integer>(value)) == value;
}

// Whether the C type holds the integer. Types not listed here hold every value that was read for them.
bool holds(Type type, int64_t value) {
  switch (type) {
    case Type::i8:
      return holds<int8_t>(value);
    case Type::i16:
      return holds<int16_t>(value);
    case Type::i32:
      return holds<int32_t>(value);
    case Type::u8:
      return holds<uint8_t>(value);
    case Type::u16:
      return holds<uint16_t>(value);
    case Type::u32:
      return holds<uint32_t>(value);
    default:
      return true;
  }
}

}  // namespace

// Parameters of one launch as the driver reads them: an address for each, and little-endian values in 8-byte slots.
class Packed {
 public:
  void add(uint64_t bits) {
    slots_[count_] = bits;
    addresses_[count_] = &slots_[count_];
    ++count_;
  }
  void add(const TensorMap& map) {
    maps_[map_count_] = map;
    addresses_[count_++] = &maps_[map_count_++];
  }
  void** addresses() { return addresses_; }

 private:
  int count_ = 0, map_count_ = 0;
  uint64_t slots_[most_parameters];
  void* addresses_[most_parameters];
  TensorMap maps_[most_maps];
};

namespace {

void add_descriptor(Packed& packed, const Driver& driver, const TensorMapLayout& layout, const Value& value) {
  const Descriptor descriptor(value.descriptor);
  packed.add(layout.encode(driver, descriptor));
  for (int i = 0; i < descriptor.rank; ++i) {
    if (!holds<int32_t>(descriptor.sizes[i]))
      throw std::invalid_argument("a tensor descriptor's size " + std::to_string(descriptor.sizes[i]) +
                                  " is beyond 32 bits");
    packed.add(static_cast<uint32_t>(descriptor.sizes[i]));
  }
  for (int i = 0; i < descriptor.rank; ++i) packed.add(static_cast<uint64_t>(descriptor.strides[i]));
}

void add_real(Packed& packed, Type type, double real) {
  uint64_t bits = 0;
  if (type == Type::fp32) {
    const float rounded = static_cast<float>(real);
    std::memcpy(&bits, &rounded, sizeof rounded);
  } else {
    std::memcpy(&bits, &real, sizeof real);
  }
  packed.add(bits);
}

}  // namespace

Kernel::Kernel(Description description) : description_(std::move(description)) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument("kernel " + description_.name + " " + why);
  };
  if (description_.warps < 1 || description_.warps > 32)
    refuse("has " + std::to_string(description_.warps) + " warps; 1 to 32 are possible");
  parameter_count_ = 2;  // the addresses of Triton's two scratch memories, which weft's kernels do not use
  for (const std::string& argument : description_.arguments) {
    if (argument.rfind(map_prefix, 0) == 0) {
      maps_.emplace_back(argument.substr(std::strlen(map_prefix)));
      types_.push_back(Type::tensor_map);
      parameter_count_ += 1 + 2 * maps_.back().rank();
      continue;
    }
    const auto* found = std::find_if(std::begin(type_names), std::end(type_names),
                                     [&](const auto& pair) { return argument == pair.first; });
    if (found == std::end(type_names)) refuse("has an argument of the unknown type " + argument);
    types_.push_back(found->second);
    ++parameter_count_;
  }
  if (parameter_count_ > most_parameters || maps_.size() > most_maps)
    refuse("has " + std::to_string(parameter_count_) + " parameters, " + std::to_string(maps_.size()) +
           " of them tensor maps; at most " + std::to_string(most_parameters) + " and " + std::to_string(most_maps) +
           " are possible");
}

Kernel::~Kernel() {
  for (const Loaded* entry = loaded_.load(); entry != nullptr;) delete std::exchange(entry, entry->next);
}

void Kernel::check_takes(const std::vector<Described>& arguments) const {
  const std::string kernel = "kernel " + description_.name;
  if (arguments.size() != types_.size())
    throw std::invalid_argument(kernel + " takes " + std::to_string(types_.size()) + " arguments; the key has " +
                                std::to_string(arguments.size()) + " that are no constants");
  size_t map = 0;
  for (size_t i = 0; i < types_.size(); ++i) {
    const bool is_map = types_[i] == Type::tensor_map;
    if (!takes(types_[i], arguments[i].kind) || (is_map && maps_[map].rank() != arguments[i].rank))
      throw std::invalid_argument(kernel + " takes " + description_.arguments[i] + " as argument " +
                                  std::to_string(i) + " of those that are no constants; the key has another (" +
                                  static_cast<char>(arguments[i].kind) + ")");
    map += is_map;
  }
}

void Kernel::launch(const Parameters& parameters, const Arguments& arguments, Grid grid, Stream stream) const {
  try {
    const Driver& driver = weft::launch::driver();
    const uint64_t context = current_context(driver, stream);
    const Loaded* loaded = find(driver, context);
    const Function function = loaded != nullptr ? loaded->function : load(driver, context);
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
    Packed packed;
    pack(packed, driver, parameters, arguments);
    const LaunchConfig config{{grid[0], grid[1], grid[2]},
                              {32 * description_.warps, 1, 1},
                              description_.shared_bytes,
                              stream,
                              nullptr,
                              0};
    const py::gil_scoped_release unlocked;  // a launch waits if the stream's queue is full
    check(driver, driver.launch_kernel_ex(&config, function, packed.addresses(), nullptr), "cuLaunchKernelEx");
  } catch (const std::overflow_error&) {
    throw;
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("kernel " + description_.name + ": " + error.what());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(describe(grid) + ": " + error.what());
  }
}

void Kernel::pack(Packed& packed, const Driver& driver, const Parameters& parameters,
                  const Arguments& arguments) const {
  size_t map = 0;
  for (size_t i = 0; i < types_.size(); ++i) {
    const Value& value = arguments.values[i];
    const Type type = types_[i];
    if (type == Type::tensor_map) {
      add_descriptor(packed, driver, maps_[map++], value);
    } else if (type == Type::fp32 || type == Type::fp64) {
      add_real(packed, type, value.real);
    } else if (holds(type, value.integer)) {
      packed.add(static_cast<uint64_t>(value.integer));
    } else {
      throw std::overflow_error(parameters.describe(value.place) + " is " + std::to_string(value.integer) +
                                ", which " + description_.arguments[i] + " does not hold");
    }
  }
  packed.add(uint64_t{0});  // no global scratch memory
  packed.add(uint64_t{0});  // none for a profiler
}

const Kernel::Loaded* Kernel::find(const Driver& driver, uint64_t context) const {
  const Loaded* entry = loaded_.load(std::memory_order_acquire);
  while (entry != nullptr && (entry->context != context || entry->driver != &driver)) entry = entry->next;
  return entry;
}

Function Kernel::load(const Driver& driver, uint64_t context) const {
  const py::gil_scoped_release unlocked;  // before the mutex: its holder may be waiting for the interpreter lock
  const std::lock_guard lock(loading_);
  if (const Loaded* entry = find(driver, context)) return entry->function;
  const RelaxedCapture relaxed(driver);
  const Function function = load_function(driver);
  loaded_.store(new Loaded{&driver, context, function, loaded_.load()}, std::memory_order_release);
  return function;
}

Function Kernel::load_function(const Driver& driver) const {
  Module module = nullptr;
  Function function = nullptr;
  check(driver, driver.module_load_data(&module, PyBytes_AS_STRING(description_.cubin.ptr())), "cuModuleLoadData");
  try {
    check(driver, driver.module_get_function(&function, module, description_.name.c_str()), "cuModuleGetFunction");
    allow_shared_memory(driver, function);
    // Otherwise a driver that loads lazily loads at the launch, and waits there for earlier work.
    if (driver.func_load != nullptr) check(driver, driver.func_load(function), "cuFuncLoad");
  } catch (...) {
    driver.module_unload(module);
    throw;
  }
  return function;
}

void Kernel::allow_shared_memory(const Driver& driver, Function function) const {
  int of_source = 0;
  check(driver, driver.func_get_attribute(&of_source, static_shared_bytes, function), "cuFuncGetAttribute");
  const uint64_t wanted = uint64_t{description_.shared_bytes} + static_cast<uint64_t>(of_source);
  if (wanted <= shared_bytes_without_asking) return;
  int device = 0, allowed = 0;
  check(driver, driver.ctx_get_device(&device), "cuCtxGetDevice");
  check(driver, driver.device_get_attribute(&allowed, most_shared_bytes_of_a_block, device), "cuDeviceGetAttribute");
  if (wanted > static_cast<uint64_t>(allowed))
    throw std::runtime_error("it needs " + std::to_string(wanted) +
                             " bytes of shared memory for each block, and the device allows " +
                             std::to_string(allowed) + "; use a variant with smaller tiles or fewer stages");
  check(driver, driver.func_set_cache_config(function, prefer_shared), "cuFuncSetCacheConfig");
  check(driver,
        driver.func_set_attribute(function, most_dynamic_shared_bytes, static_cast<int>(description_.shared_bytes)),
        "cuFuncSetAttribute");
}

std::string Kernel::describe(Grid grid) const {
  return "kernel " + description_.name + " (grid " + std::to_string(grid[0]) + "x" + std::to_string(grid[1]) +
         "x" + std::to_string(grid[2]) + ", block " + std::to_string(32 * description_.warps) + "x1x1, " +
         std::to_string(description_.shared_bytes) + " bytes of shared memory, " +
         std::to_string(description_.registers) + " registers)";
}

}  // namespace weft::launch
