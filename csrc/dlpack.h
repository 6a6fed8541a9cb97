// Reading torch's tensors without libtorch, by the C functions that torch.Tensor has for it (DLPack 1.3's exchange API,
// from torch 2.10 on). The layouts are dlpack.h's, and stay the same within version 1.
#pragma once
#include <Python.h>

#include <cstdint>

namespace weft::dlpack {

struct Tensor {
  void* data;  // of the first element, in torch's tensors; null if there is none
  int32_t device_type;
  int32_t device;
  int32_t dimensions;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  const int64_t* sizes;  // the tensor's own, as are the strides
  const int64_t* strides;
  uint64_t byte_offset;  // 0 in torch's tensors
};

struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  const ExchangeApi* older;
  void* allocate;
  void* share;
  void* import;
  int (*read)(PyObject* tensor, Tensor* result);  // not 0 with Python's exception
  void* current_stream;
};

// Returns the functions of a type of tensors, or null if it has none of version 1. Leaves no exception.
inline const ExchangeApi* exchange_api(PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  const ExchangeApi* api = nullptr;
  if (capsule != nullptr) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  while (api != nullptr && api->major_version != 1) api = api->older;
  return api == nullptr || api->read == nullptr ? nullptr : api;
}

}  // namespace weft::dlpack
