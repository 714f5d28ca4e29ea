#include "bindings/fast_path/readers.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace tk::direct {

namespace {

// Looked up once, when the module is loaded; never freed.
struct Torch {
  PyObject* tensor = nullptr;
  PyObject* parameter = nullptr;
  PyCFunction is_neg = nullptr;  // of Tensor.is_neg: a lookup for each call would cost more
  PyObject* storage_offset = nullptr;
  const dlpack::Exchange* exchange = nullptr;  // null: every call is declined
} torch;

PyObject* attribute_of_module(const char* module, const char* name) {
  PyObject* const found = PyImport_ImportModule(module);
  PyObject* const attribute = found ? PyObject_GetAttrString(found, name) : nullptr;
  Py_XDECREF(found);
  return attribute;
}

// The C function of a method of torch.Tensor without arguments; null if there is none.
PyCFunction method_of_tensor(const char* name) {
  PyObject* const tensor = torch.tensor ? PyObject_CallNoArgs(torch.tensor) : nullptr;
  PyObject* const method = tensor ? PyObject_GetAttrString(tensor, name) : nullptr;
  const bool is_plain = method && PyCFunction_GetFlags(method) == METH_NOARGS;
  const PyCFunction function = is_plain ? PyCFunction_GetFunction(method) : nullptr;
  Py_XDECREF(method);
  Py_XDECREF(tensor);
  return function;
}

// True after `untyped_storage().resize_(0)`: the data pointer is then the tensor's offset in its
// storage, without the address of the storage.
bool is_freed(PyObject* object, const dlpack::Tensor& x) {
  // No offset is larger, and 64-bit systems map memory mostly above: torch is rarely asked.
  constexpr uintptr_t kLargestOffset = uintptr_t{1} << 44;
  const auto address = reinterpret_cast<uintptr_t>(x.data);
  if (address > kLargestOffset) return false;
  PyObject* const offset = PyObject_CallMethodObjArgs(object, torch.storage_offset, nullptr);
  const size_t elements = offset ? PyLong_AsSize_t(offset) : 0;
  Py_XDECREF(offset);
  PyErr_Clear();
  return address == elements * (x.dtype.bits / 8u);
}

bool is_aligned(const dlpack::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data) % std::max(x.dtype.bits / 8u, 1u) == 0;
}

Element element_of(const dlpack::DataType& type) {
  using namespace dlpack;
  constexpr DataType kTypes[] = {{kFloat, 16, 1}, {kBfloat, 16, 1}, {kFloat, 32, 1},
                                 {kFloat, 64, 1}, {kBool, 8, 1},    {kUint, 8, 1},
                                 {kInt, 32, 1},   {kInt, 64, 1},    {kInt, 8, 1}};
  const auto* const found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& x) {
    return x.code == type.code && x.bits == type.bits && x.lanes == type.lanes;
  });
  return static_cast<Element>(found - kTypes);
}

bool read_number(PyObject* object, double& to) {
  if (!PyFloat_CheckExact(object)) return false;
  to = PyFloat_AsDouble(object);
  return std::isfinite(to);
}

bool read_number(PyObject* object, std::optional<double>& to) {
  return object == Py_None || read_number(object, to.emplace());
}

bool read_number(PyObject* object, bool& to) {
  to = object == Py_True;
  return to || object == Py_False;
}

bool read_number(PyObject* object, int64_t& to) {
  to = PyLong_AsLongLong(object);
  if (to != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// False for objects of other types, and if torch has no exchange table.
bool exchange(PyObject* object, dlpack::Tensor& x) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!torch.exchange || (type != torch.tensor && type != torch.parameter)) return false;
  if (torch.exchange->tensor_from_object(object, &x) == 0) return true;
  PyErr_Clear();
  return false;
}

// The items of a named tuple, in their order.
class Items {
 public:
  // Returns false if the object is not a tuple of so many items.
  bool begin(PyObject* tuple, Py_ssize_t count) {
    tuple_ = tuple;
    read_ = 0;
    return PyTuple_Check(tuple) && PyTuple_Size(tuple) == count;
  }

  PyObject* next() { return PyTuple_GetItem(tuple_, read_++); }

 private:
  PyObject* tuple_ = nullptr;
  Py_ssize_t read_ = 0;
};

}  // namespace

void find_torch() {
  torch.storage_offset = PyUnicode_InternFromString("storage_offset");
  torch.tensor = attribute_of_module("torch", "Tensor");
  torch.parameter = attribute_of_module("torch.nn", "Parameter");
  torch.is_neg = method_of_tensor("is_neg");
  PyObject* const capsule =
      torch.is_neg ? PyObject_GetAttrString(torch.tensor, "__dlpack_c_exchange_api__") : nullptr;
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

dlpack::Device device_of(PyObject* object) {
  dlpack::Tensor x;
  return exchange(object, x) ? x.device : dlpack::Device{};
}

bool Reader::read(PyObject* object, View& view) const {
  dlpack::Tensor x;
  if (!exchange(object, x)) return false;
  view = {x.data, element_of(x.dtype), x.ndim, x.shape, x.strides};
  return x.device.type == device_.type && x.device.id == device_.id && x.data &&
         x.byte_offset == 0 && x.strides && is_aligned(x) && !is_freed(object, x);
}

bool Reader::read_input(PyObject* object, View& view) const {
  if (!read(object, view)) return false;
  PyObject* const negated = torch.is_neg(object, nullptr);
  Py_XDECREF(negated);
  PyErr_Clear();
  return negated == Py_False;
}

bool Reader::read_optional(PyObject* object, View& view) const {
  return object == Py_None || read(object, view);
}

bool Reader::read_field(PyObject* object, Elements elements, View& to) const {
  if (object == Py_None) return true;
  const bool may_be_negated = elements == Elements::kValues || elements == Elements::kStatistics;
  return may_be_negated ? read_input(object, to) : read(object, to);
}

#define TK_COUNT(...) +1
#define TK_NUMBER(type, kind, name, layouts) &&read_number(items.next(), options.name)
#define TK_TENSOR(name, elements, memory, shape, layouts) \
  &&read_field(items.next(), Elements::elements, options.name)

bool Reader::read_options(PyObject* const* arguments, Options& options) const {
  Items items;
  return items.begin(arguments[0], TK_SCORE_FIELDS(TK_COUNT, TK_COUNT))
             TK_SCORE_FIELDS(TK_NUMBER, TK_TENSOR) &&
         items.begin(arguments[1], TK_MASK_FIELDS(TK_COUNT, TK_COUNT))
             TK_MASK_FIELDS(TK_NUMBER, TK_TENSOR) &&
         items.begin(arguments[2], TK_LAYOUT_FIELDS(TK_COUNT, TK_COUNT))
             TK_LAYOUT_FIELDS(TK_NUMBER, TK_TENSOR);
}

}  // namespace tk::direct
