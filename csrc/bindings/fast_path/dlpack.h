// The part of DLPack 1.3 that fast_path/readers.cpp uses to read Python tensors. It is a standard
// ABI, independent of torch's headers and version.
// https://dmlc.github.io/dlpack/latest/
#pragma once

#include <cstdint>

namespace tk::dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0;
constexpr uint8_t kUint = 1;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBfloat = 4;
constexpr uint8_t kBool = 6;

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

// Strides are in elements. Shape and strides are owned by the Python tensor.
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// The table behind `type(tensor).__dlpack_c_exchange_api__`.
struct Exchange {
  struct {
    uint32_t major;
    uint32_t minor;
  } version;
  Exchange* previous;
  void* allocate;
  void* owning_from_object;
  void* object_from_owning;
  // Returns 0, or -1 with a Python exception set.
  int (*tensor_from_object)(void* object, Tensor* tensor);
  void* current_stream;
};

}  // namespace tk::dlpack
