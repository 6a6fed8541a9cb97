// Tensor maps, which describe a tensor to the copy engine. Each launch makes them from tensor descriptors.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "arguments.h"
#include "driver.h"

namespace weft::launch {

// A tensor descriptor of Triton, read from its Python object.
struct Descriptor {
  explicit Descriptor(PyObject* object);

  uint64_t address;
  int rank;
  int64_t sizes[most_dimensions];
  int64_t strides[most_dimensions];  // in elements
  bool nan_outside = false;          // reads outside the tensor give NaN, not 0
  bool round_to_tf32 = false;
};

// The compiler's layout of one parameter's map: an entry of the metadata `tensordesc_meta` of Triton 3.7.1.
class TensorMapLayout {
 public:
  explicit TensorMapLayout(const std::string& json);

  int rank() const { return rank_; }
  TensorMap encode(const Driver& driver, const Descriptor& descriptor) const;

 private:
  int rank_ = 0;
  uint32_t box_[most_dimensions] = {};  // fastest dimension first, as the driver requires
  int swizzle_ = 0;
  int element_bytes_ = 0;
  int element_type_ = 0;
  bool fp4_padded_ = false;
};

}  // namespace weft::launch
