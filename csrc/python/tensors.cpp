// Torch tensors seen without Python: through the table of C functions that the tensor's type carries
// (`__dlpack_c_exchange_api__`, of DLPack 1.2). Asking the tensor's methods instead costs ten times as much.
#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

using unisono::DType;

// What DLPack 1.x lays down in memory, as far as it is looked at here.
struct Described {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; may be null: row after row
  uint64_t byte_offset;
};
struct Exchange {
  uint32_t major, minor;
  const Exchange* older;
  void* make_new;
  void* own;
  void* give;
  int (*look)(void* object, void* result);  // a view that lives as long as the object does
};

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;

std::optional<DType> dtype_of(const Described& seen) {
  enum : uint8_t { kInt, kUInt, kFloat, kOpaque, kBfloat, kComplex, kBool };
  if (seen.lanes != 1) return std::nullopt;
  switch (seen.code << 8 | seen.bits) {
    case kBool << 8 | 8:
      return DType::kBool;
    case kUInt << 8 | 8:
      return DType::kU8;
    case kInt << 8 | 8:
      return DType::kI8;
    case kInt << 8 | 16:
      return DType::kI16;
    case kInt << 8 | 32:
      return DType::kI32;
    case kInt << 8 | 64:
      return DType::kI64;
    case kFloat << 8 | 16:
      return DType::kF16;
    case kBfloat << 8 | 16:
      return DType::kBF16;
    case kFloat << 8 | 32:
      return DType::kF32;
    case kFloat << 8 | 64:
      return DType::kF64;
    case kComplex << 8 | 64:
      return DType::kC64;
    case kComplex << 8 | 128:
      return DType::kC128;
    default:
      return std::nullopt;
  }
}

// The number of elements when they lie row after row, or -1.
int64_t contiguous_numel(const Described& seen) {
  int64_t numel = 1;
  bool dense = true;
  for (int32_t i = seen.ndim - 1; i >= 0; --i) {
    dense = dense && (seen.strides == nullptr || seen.shape[i] == 1 || seen.strides[i] == numel);
    numel *= seen.shape[i];
  }
  return dense || numel == 0 ? numel : -1;
}

// Names that are looked up in every call: made once, and found by identity.
struct Names {
  PyObject* exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* is_conj = PyUnicode_InternFromString("is_conj");
};
const Names& names() {
  static const Names made;
  return made;
}

// What a method without arguments answers; anything but False counts as true.
bool answers_true(nb::handle tensor, PyObject* method) {
  const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), method));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
}

// Lazy conjugates and negatives: their memory holds something else than they say. What has no such
// methods is no tensor of torch, and may be read-only without a way to tell.
bool lazy(nb::handle tensor, DType dtype) {
  const bool complex = dtype == DType::kC64 || dtype == DType::kC128;
  return answers_true(tensor, names().is_neg) || (complex && answers_true(tensor, names().is_conj));
}

const Exchange* exchange_of(nb::handle type) {
  const nb::object capsule = nb::steal(PyObject_GetAttr(type.ptr(), names().exchange));
  if (!capsule.is_valid()) PyErr_Clear();
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* table =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table != nullptr && table->major > kMajor) table = table->older;
  const bool usable = table != nullptr && table->major == kMajor && table->look != nullptr;
  return usable ? table : nullptr;  // it belongs to the module that defines the type
}

}  // namespace

// A wrapper around other tensors, or a recording of what would be done with one, has no memory.
std::optional<BufferView> look_at_tensor(nb::handle tensor) {
  const Exchange* const exchange = exchange_of(reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr())));
  if (exchange == nullptr) return std::nullopt;
  Described seen{};
  if (exchange->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<DType> dtype = dtype_of(seen);
  const int64_t numel = contiguous_numel(seen);
  if (seen.device_type != kCpu || !dtype || numel < 0 || lazy(tensor, *dtype)) return std::nullopt;
  if (numel > 0 && seen.data == nullptr) return std::nullopt;
  return BufferView{reinterpret_cast<Address>(seen.data) + seen.byte_offset, static_cast<Py_ssize_t>(numel),
                    static_cast<int>(*dtype), false};
}
