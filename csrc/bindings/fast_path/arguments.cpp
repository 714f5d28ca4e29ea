#include "bindings/fast_path/arguments.h"

#include <algorithm>
#include <cmath>

#include "common/mask.h"

namespace tk::direct {

namespace {

// Looked up once, when the module is loaded; never freed.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* storage_offset = nullptr;
  const dlpack::Exchange* exchange = nullptr;  // null: every call is declined
} torch;

PyObject* attribute_of_module(const char* module, const char* name) {
  PyObject* const found = PyImport_ImportModule(module);
  PyObject* const attribute = found ? PyObject_GetAttrString(found, name) : nullptr;
  Py_XDECREF(found);
  return attribute;
}

// True after `untyped_storage().resize_(0)`: the data pointer is then the tensor's offset in its
// storage, without the address of the storage.
bool is_freed(PyObject* object, const dlpack::Tensor& x) {
  // No offset is larger, and 64-bit systems map memory mostly above: torch is rarely asked.
  constexpr uintptr_t kLargestOffset = uintptr_t{1} << 44;
  const auto address = reinterpret_cast<uintptr_t>(x.data);
  if (address > kLargestOffset) return false;
  PyObject* const offset = PyObject_CallMethodNoArgs(object, torch.storage_offset);
  const size_t elements = offset ? PyLong_AsSize_t(offset) : 0;
  Py_XDECREF(offset);
  PyErr_Clear();
  return address == elements * (x.dtype.bits / 8u);
}

bool is_aligned(const dlpack::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % std::max(x.dtype.bits / 8u, 1u) == 0;
}

bool read_dtype(const dlpack::DataType& from, DType& to) {
  if (from.lanes != 1) return false;
  if (from.code == dlpack::kBfloat && from.bits == 16) return to = DType::kBFloat16, true;
  if (from.code != dlpack::kFloat) return false;
  if (from.bits == 16) return to = DType::kFloat16, true;
  if (from.bits == 32) return to = DType::kFloat32, true;
  if (from.bits == 64) return to = DType::kFloat64, true;
  return false;
}

}  // namespace

void find_torch() {
  torch.is_neg = PyUnicode_InternFromString("is_neg");
  torch.storage_offset = PyUnicode_InternFromString("storage_offset");
  torch.tensor = attribute_of_module("torch", "Tensor");
  torch.parameter = attribute_of_module("torch.nn", "Parameter");
  PyObject* const capsule =
      torch.tensor ? PyObject_GetAttrString(torch.tensor, "__dlpack_c_exchange_api__") : nullptr;
  if (capsule) {
    const void* const table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    torch.exchange = static_cast<const dlpack::Exchange*>(table);
    Py_DECREF(capsule);
  }
  while (torch.exchange && torch.exchange->version.major != dlpack::kMajorVersion) {
    torch.exchange = torch.exchange->previous;
  }
  PyErr_Clear();
}

bool read(PyObject* object, int32_t dimensions, dlpack::Tensor& tensor) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!torch.exchange || (type != torch.tensor && type != torch.parameter)) return false;
  if (torch.exchange->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  return tensor.device.type == dlpack::kCpu && tensor.ndim == dimensions && tensor.data &&
         tensor.byte_offset == 0 && tensor.strides && is_aligned(tensor) &&
         !is_freed(object, tensor);
}

bool read(PyObject* object, int32_t dimensions, View& view) {
  dlpack::Tensor tensor;
  if (!read(object, dimensions, tensor)) return false;
  view = {tensor.data, {}, tensor.shape, tensor.strides};
  return read_dtype(tensor.dtype, view.dtype);
}

bool read_input(PyObject* object, View& view) {
  if (!read(object, 4, view)) return false;
  PyObject* const negated = PyObject_CallMethodNoArgs(object, torch.is_neg);
  Py_XDECREF(negated);
  PyErr_Clear();
  return negated == Py_False;
}

bool read_integer(PyObject* object, int64_t& to) {
  to = PyLong_AsLongLong(object);
  const bool fits = -kUnbounded <= to && to <= kUnbounded && !PyErr_Occurred();
  PyErr_Clear();
  return fits;
}

bool read_diagonals(PyObject* const* args, Problem& p) {
  return read_integer(args[0], p.mask.diagonal_low) && read_integer(args[1], p.mask.diagonal_high);
}

bool read_scale(PyObject* object, Problem& p) {
  if (object == Py_None) {
    p.score.scale = 1.0 / std::sqrt(static_cast<double>(p.D));
    return true;
  }
  if (!PyFloat_CheckExact(object)) return false;
  p.score.scale = PyFloat_AS_DOUBLE(object);
  return std::isfinite(p.score.scale);
}

bool has_size(const View& x, int64_t B, int64_t H, int64_t L, int64_t width) {
  return x.size[0] == B && x.size[1] == H && x.size[2] == L && x.size[3] == width;
}

bool is_output(const View& x, const Problem& p, int64_t H, int64_t L, int64_t width) {
  return x.dtype == p.dtype && has_size(x, p.B, H, L, width) && (width == 1 || x.stride[3] == 1);
}

bool count_is(Py_ssize_t count, Py_ssize_t wanted) {
  if (count == wanted) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, count);
  return false;
}

}  // namespace tk::direct
