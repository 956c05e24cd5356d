// Reads torch tensors without Python code, through the table of C functions of the tensor's type
// (`__dlpack_c_exchange_api__`, DLPack 1.2). The tensor's methods would take ten times as long.
#include <atomic>

#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

using unisono::DType;

// The structs of DLPack 1.x, as far as they are read here.
struct DlpackTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; null: C-contiguous
  uint64_t byte_offset;
};
struct DlpackExchange {
  uint32_t major, minor;
  const DlpackExchange* older;
  void* make_new;
  void* own;
  void* give;
  int (*look)(void* object, void* result);  // a view that lives as long as the object does
};

constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1;

std::optional<DType> dtype_of(const DlpackTensor& seen) {
  enum : uint8_t { kInt, kUInt, kFloat, kOpaque, kBfloat, kComplex, kBool };
  enum : uint8_t { kE4M3FN = 10, kE4M3FNUZ, kE5M2, kE5M2FNUZ, kE8M0FNU, kE2M1FN = 17 };
  if (seen.code == kE2M1FN && seen.bits == 4 && seen.lanes == 2) return DType::kF4E2M1FNX2;
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
    case kUInt << 8 | 16:
      return DType::kU16;
    case kUInt << 8 | 32:
      return DType::kU32;
    case kUInt << 8 | 64:
      return DType::kU64;
    case kComplex << 8 | 32:
      return DType::kC32;
    case kE4M3FN << 8 | 8:
      return DType::kF8E4M3FN;
    case kE4M3FNUZ << 8 | 8:
      return DType::kF8E4M3FNUZ;
    case kE5M2 << 8 | 8:
      return DType::kF8E5M2;
    case kE5M2FNUZ << 8 | 8:
      return DType::kF8E5M2FNUZ;
    case kE8M0FNU << 8 | 8:
      return DType::kF8E8M0FNU;
    default:
      return std::nullopt;
  }
}

// The number of elements if they are C-contiguous, or -1.
int64_t contiguous_numel(const DlpackTensor& seen) {
  int64_t numel = 1;
  bool dense = true;
  for (int32_t i = seen.ndim - 1; i >= 0; --i) {
    dense = dense && (seen.strides == nullptr || seen.shape[i] == 1 || seen.strides[i] == numel);
    numel *= seen.shape[i];
  }
  return dense || numel == 0 ? numel : -1;
}

// Names that are looked up in every call: interned once, so that they are found by identity.
constinit InternedName exchange_name{"__dlpack_c_exchange_api__"}, neg_name{"is_neg"}, conj_name{"is_conj"};

// The result of a method without arguments; everything but False, an error too, counts as true.
bool answers_true(nb::handle tensor, InternedName& method) {
  const nb::object answer = nb::steal(unisono_call_method(method.get(), std::array{tensor.ptr()}.data(), 1));
  if (!answer.is_valid()) PyErr_Clear();
  return answer.ptr() != Py_False;
}

// Whether the memory does not hold the tensor's values: a lazy conjugate or negative. An object without these
// methods is not a tensor of torch; it counts as lazy, because it may be read-only and does not say so.
bool lazy(nb::handle tensor, DType dtype) {
  const bool complex = dtype == DType::kC64 || dtype == DType::kC128 || dtype == DType::kC32;
  return answers_true(tensor, neg_name) || (complex && answers_true(tensor, conj_name));
}

const DlpackExchange* read_exchange(nb::handle type) {
  const nb::object capsule = nb::steal(PyObject_GetAttr(type.ptr(), exchange_name.get()));
  if (!capsule.is_valid()) PyErr_Clear();
  if (!capsule.is_valid() || !PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* table =
      static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (table != nullptr && table->major > kMajor) table = table->older;
  const bool usable = table != nullptr && table->major == kMajor && table->look != nullptr;
  return usable ? table : nullptr;  // it belongs to the module that defines the type
}

// The module, None where the program has not imported it.
nb::object loaded_torch() { return nb::module_::import_("sys").attr("modules").attr("get")("torch"); }

// Whether tensors of this type compute with code of their own: a DTensor, a MaskedTensor, a trace's tensors.
bool has_own_dispatch(nb::handle type) {
  constexpr const char* const kDispatch = "__torch_dispatch__";
  const nb::object torch = loaded_torch();
  return torch.is_none() || !nb::getattr(type, kDispatch, nb::none()).is(torch.attr("Tensor").attr(kDispatch));
}

// The table of a type whose tensors are the bytes in their memory; otherwise nullptr. The first types are
// remembered: reading attributes of a type takes longer than all the rest.
const DlpackExchange* exchange_of(PyTypeObject* type) {
  struct KnownType {
    PyTypeObject* type;  // kept for ever: no other type gets its address
    const DlpackExchange* exchange;
  };
  static std::atomic<const KnownType*> known[4];
  for (const auto& slot : known) {
    const KnownType* const one = slot.load(std::memory_order_acquire);
    if (one == nullptr) break;
    if (one->type == type) return one->exchange;
  }
  const nb::handle given(reinterpret_cast<PyObject*>(type));
  const DlpackExchange* const exchange = read_exchange(given);
  if (exchange == nullptr || has_own_dispatch(given)) return nullptr;
  const auto* const made = new KnownType{type, exchange};
  for (auto& slot : known) {
    const KnownType* free = nullptr;
    if (!slot.compare_exchange_strong(free, made, std::memory_order_acq_rel)) continue;
    given.inc_ref();
    return exchange;
  }
  delete made;
  return exchange;
}

// Whether the dtype is the one that DLPack names: it shows PyTorch's integers of 1 to 7 bits as 8 bits.
bool is_whole_byte(nb::handle tensor, DType dtype) {
  static InternedName dtype_name{"dtype"};
  static std::atomic<PyObject*> known[2];  // uint8, int8; kept for ever
  auto& slot = known[dtype == DType::kI8 ? 1 : 0];
  if (slot.load(std::memory_order_acquire) == nullptr)
    slot.store(nb::object(loaded_torch().attr(dtype == DType::kI8 ? "int8" : "uint8")).release().ptr(),
               std::memory_order_release);
  const nb::object named = nb::steal(PyObject_GetAttr(tensor.ptr(), dtype_name.get()));
  if (!named.is_valid()) PyErr_Clear();
  return named.ptr() == slot.load(std::memory_order_acquire);
}

}  // namespace

// nullopt also for tensors without memory of their own: wrapper subclasses, and fake tensors of a trace.
std::optional<BufferView> look_at_tensor(nb::handle tensor) {
  const DlpackExchange* const exchange = exchange_of(Py_TYPE(tensor.ptr()));
  if (exchange == nullptr) return std::nullopt;
  DlpackTensor seen{};
  if (exchange->look(tensor.ptr(), &seen) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<DType> dtype = dtype_of(seen);
  const int64_t numel = contiguous_numel(seen);
  if (seen.device_type != kCpu || !dtype || numel < 0 || lazy(tensor, *dtype)) return std::nullopt;
  if (numel > 0 && seen.data == nullptr) return std::nullopt;
  if ((*dtype == DType::kU8 || *dtype == DType::kI8) && !is_whole_byte(tensor, *dtype)) return std::nullopt;
  return BufferView{reinterpret_cast<Address>(seen.data) + seen.byte_offset, static_cast<Py_ssize_t>(numel),
                    static_cast<int>(*dtype), false};
}
