#include "tensor_map.h"

#include <stdexcept>

#include "objects.h"
#include "tensors.h"

namespace py = pybind11;

namespace weft::launch {

namespace {

// CUDA driver API, cuTensorMapEncodeTiled
constexpr int no_interleave = 0;       // CU_TENSOR_MAP_INTERLEAVE_NONE
constexpr int l2_promotion_128_b = 2;  // CU_TENSOR_MAP_L2_PROMOTION_L2_128B
constexpr int zero_outside = 0;        // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
constexpr int nan_outside = 1;         // CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
constexpr int tfloat32 = 11;           // CU_TENSOR_MAP_DATA_TYPE_TFLOAT32

// Returns the driver's number (CUtensorMapDataType) of an element type. Triton's metadata has the instruction's
// numbers, which differ for three types (TMA_DTYPE_DEVICE_TO_HOST in Triton's launcher).
int driver_element_type(int in_metadata) {
  switch (in_metadata) {
    case 8:
      return 10;
    case 9:
      return 8;
    case 10:
      return 9;
    default:
      return in_metadata;
  }
}

int read_integers(PyObject* sequence, int64_t* integers, const char* name) {
  const Items items(sequence);
  if (items.count() < 1 || items.count() > most_dimensions)
    throw std::invalid_argument("a tensor descriptor's " + std::string(name) + " has " +
                                std::to_string(items.count()) + " dimensions; 1 to " +
                                std::to_string(most_dimensions) + " are possible");
  for (Py_ssize_t i = 0; i < items.count(); ++i) integers[i] = items.integer(i);
  return static_cast<int>(items.count());
}

// Whether a descriptor type has these fields; a missing one means "zero" or False.
struct Fields {
  bool padding = false;
  bool rounding = false;
};

Fields fields_of(PyObject* object) {
  static Facts<Fields, 16> known;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (const Fields* fact = known.find(type)) return *fact;
  const Fields fields{PyObject_HasAttr(object, names().padding) != 0,
                      PyObject_HasAttr(object, names().round_f32_to_tf32) != 0};
  known.keep(type, fields);
  return fields;
}

std::string listed(const int64_t* integers, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i == 0 ? "[" : ", ") + std::to_string(integers[i]);
  return text + "]";
}

}  // namespace

Descriptor::Descriptor(PyObject* object) {
  const Owned base = attribute(object, names().base);
  address = static_cast<uint64_t>(address_of(memory_type(base.get()), base.get()));
  rank = read_integers(attribute(object, names().shape).get(), sizes, "shape");
  if (read_integers(attribute(object, names().strides).get(), strides, "strides") != rank)
    throw std::invalid_argument("a tensor descriptor's shape and strides differ in length");
  if (strides[rank - 1] != 1)
    throw std::invalid_argument("a tensor descriptor's last stride is " + std::to_string(strides[rank - 1]) +
                                "; it must be 1");
  const Fields fields = fields_of(object);
  if (fields.padding) {
    const Owned padding = attribute(object, names().padding);
    nan_outside = PyUnicode_Check(padding.get()) && PyUnicode_CompareWithASCIIString(padding.get(), "nan") == 0;
  }
  if (fields.rounding) round_to_tf32 = attribute(object, names().round_f32_to_tf32).get() == Py_True;
}

TensorMapLayout::TensorMapLayout(const std::string& json) {
  const auto layout = py::module_::import("json").attr("loads")(json).cast<py::dict>();
  swizzle_ = layout["swizzle"].cast<int>();
  element_bytes_ = layout["elem_size"].cast<int>();
  element_type_ = driver_element_type(layout["elem_type"].cast<int>());
  fp4_padded_ = layout.contains("fp4_padded") && layout["fp4_padded"].cast<bool>();
  int64_t box[most_dimensions];
  rank_ = read_integers(layout["block_size"].cast<py::object>().ptr(), box, "block_size");
  for (int i = 0; i < rank_; ++i) box_[i] = static_cast<uint32_t>(box[rank_ - 1 - i]);
}

TensorMap TensorMapLayout::encode(const Driver& driver, const Descriptor& descriptor) const {
  if (driver.tensor_map_encode_tiled == nullptr)
    throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled; version 12 or later is needed");
  if (descriptor.rank != rank_)
    throw std::invalid_argument("a tensor descriptor has " + std::to_string(descriptor.rank) +
                                " dimensions; the kernel was compiled for " + std::to_string(rank_));
  // The fastest dimension comes first. Its stride is one element and is not passed.
  uint64_t sizes[most_dimensions], strides[most_dimensions] = {};
  const uint32_t element_strides[most_dimensions] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank_; ++i) sizes[i] = static_cast<uint64_t>(descriptor.sizes[rank_ - 1 - i]);
  for (int i = 0; i + 1 < rank_; ++i)
    strides[i] = static_cast<uint64_t>(descriptor.strides[rank_ - 2 - i]) * static_cast<uint64_t>(element_bytes_);
  if (fp4_padded_) sizes[0] *= 2;
  TensorMap map;
  const Result result = driver.tensor_map_encode_tiled(
      &map, descriptor.round_to_tf32 ? tfloat32 : element_type_, static_cast<uint32_t>(rank_),
      reinterpret_cast<void*>(descriptor.address), sizes, strides, box_, element_strides, no_interleave, swizzle_,
      l2_promotion_128_b, descriptor.nan_outside ? nan_outside : zero_outside);
  if (result != success) {
    int64_t box[most_dimensions];
    for (int i = 0; i < rank_; ++i) box[i] = box_[rank_ - 1 - i];
    throw std::runtime_error(std::string(DriverError(driver, result, "cuTensorMapEncodeTiled").what()) +
                             ", for a tensor of shape " + listed(descriptor.sizes, rank_) + ", strides " +
                             listed(descriptor.strides, rank_) + " and " + std::to_string(element_bytes_) +
                             "-byte elements at address " + std::to_string(descriptor.address) + ", in boxes of " +
                             listed(box, rank_) + " with swizzle " + std::to_string(swizzle_));
  }
  // Drivers up to 13.1 set a bit in the map of a tensor under 128 KiB that must be cleared (CUTLASS, commit b7ecaa6,
  // and later Triton's launcher).
  uint64_t last_byte = 0;
  for (int i = 0; i < rank_; ++i)
    last_byte += (sizes[i] - 1) * (i == 0 ? static_cast<uint64_t>(element_bytes_) : strides[i - 1]);
  if (driver.version <= 13010 && last_byte + 1 < 128 * 1024) map.words[1] &= ~(uint64_t{1} << 21);
  return map;
}

}  // namespace weft::launch
