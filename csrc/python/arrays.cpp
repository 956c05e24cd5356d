// Reads NumPy arrays without the buffer protocol. The buffer protocol describes the element type as text in
// every call: a view of an array takes 200 ns there, and 10 ns here.
#include <atomic>

#include "python/calls.hpp"

namespace nb = nanobind;

namespace {

using unisono::DType;

// The first fields of arrays and dtypes in NumPy 1.7 to 2.x. `known_type` checks them with an array whose
// values are known; where they differ, the buffer protocol is used.
struct NumpyDescr {
  PyObject_HEAD PyTypeObject* type_object;
  char kind, type, byteorder, unused;
  int type_num;
};
struct NumpyArray {
  PyObject_HEAD char* data;
  int ndim;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  NumpyDescr* descr;
  int flags;
};

constexpr int kContiguous = 0x1, kWriteable = 0x400, kWarnOnWrite = 1 << 31;

std::optional<DType> dtype_of(const NumpyDescr& descr) {
  if (descr.byteorder == '>') return std::nullopt;
  switch (descr.type) {
    case '?':
      return DType::kBool;
    case 'B':
      return DType::kU8;
    case 'b':
      return DType::kI8;
    case 'h':
      return DType::kI16;
    case 'i':
      return DType::kI32;
    case 'l':
      return sizeof(long) == 8 ? DType::kI64 : DType::kI32;
    case 'q':
      return DType::kI64;
    case 'H':
      return DType::kU16;
    case 'I':
      return DType::kU32;
    case 'L':
      return sizeof(long) == 8 ? DType::kU64 : DType::kU32;
    case 'Q':
      return DType::kU64;
    case 'e':
      return DType::kF16;
    case 'f':
      return DType::kF32;
    case 'd':
      return DType::kF64;
    case 'F':
      return DType::kC64;
    case 'D':
      return DType::kC128;
    default:
      return std::nullopt;
  }
}

const NumpyArray& as_array(nb::handle array) { return *reinterpret_cast<const NumpyArray*>(array.ptr()); }

// numpy.ndarray if its arrays have the layout above; otherwise nullptr.
PyTypeObject* known_type() {
  const nb::object numpy = nb::module_::import_("numpy");
  const nb::object type = numpy.attr("ndarray");
  auto* const found = reinterpret_cast<PyTypeObject*>(type.ptr());
  if (found->tp_basicsize < static_cast<Py_ssize_t>(sizeof(NumpyArray))) return nullptr;
  const nb::object probe = numpy.attr("zeros")(nb::make_tuple(3, 5), "int16");
  const nb::object dtype = probe.attr("dtype"), turned = probe.attr("T"), base = turned.attr("base");
  const NumpyArray &straight = as_array(probe), &across = as_array(turned);
  const auto address = nb::cast<Address>(probe.attr("ctypes").attr("data"));
  const bool fields = reinterpret_cast<Address>(straight.data) == address && straight.ndim == 2 &&
                      reinterpret_cast<PyObject*>(straight.descr) == dtype.ptr() && across.base == base.ptr();
  if (!fields) return nullptr;
  const bool elements = straight.descr->type == 'h' && straight.descr->kind == 'i';
  const bool shapes = straight.shape[0] == 3 && straight.shape[1] == 5 && across.strides[0] == 2;
  probe.attr("setflags")(nb::arg("write") = false);
  const bool flags = (straight.flags & (kContiguous | kWriteable)) == kContiguous &&
                     (across.flags & (kContiguous | kWriteable)) == kWriteable;
  return elements && shapes && flags ? reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()) : nullptr;
}

// numpy.ndarray, where its layout is known; not a guarded static: known_type runs Python code, which may
// release the GIL, and another thread would then wait for the guard while it holds the GIL. Two threads that
// both run it get the same result.
const PyTypeObject* array_type() {
  static std::atomic<const PyTypeObject*> known = nullptr;
  static std::atomic<bool> looked = false;
  if (!looked.load(std::memory_order_acquire)) {
    known.store(known_type(), std::memory_order_relaxed);
    looked.store(true, std::memory_order_release);
  }
  return known.load(std::memory_order_relaxed);
}

}  // namespace

bool is_array_of_its_own(nb::handle object) {
  auto* const array = const_cast<PyTypeObject*>(array_type());
  PyTypeObject* const type = Py_TYPE(object.ptr());
  if (array == nullptr || PyType_IsSubtype(type, array) == 0) return false;
  static InternedName ufunc{"__array_ufunc__"}, mask{"mask"};
  const nb::handle given(reinterpret_cast<PyObject*>(type));
  const nb::object own = nb::steal(PyObject_GetAttr(given.ptr(), ufunc.get()));
  const nb::object usual = nb::steal(PyObject_GetAttr(reinterpret_cast<PyObject*>(array), ufunc.get()));
  if (!own.is_valid() || !usual.is_valid()) PyErr_Clear();
  return !own.is(usual) || PyObject_HasAttr(given.ptr(), mask.get()) != 0;
}

std::optional<BufferView> look_at_array(nb::handle array) {
  if (Py_TYPE(array.ptr()) != array_type()) return std::nullopt;
  const NumpyArray& seen = as_array(array);
  const auto dtype = dtype_of(*seen.descr);
  if (!dtype || (seen.flags & kContiguous) == 0) return std::nullopt;
  Py_ssize_t numel = 1;
  for (int i = 0; i < seen.ndim; ++i) numel *= seen.shape[i];
  const bool readonly = (seen.flags & (kWriteable | kWarnOnWrite)) != kWriteable;
  return BufferView{reinterpret_cast<Address>(seen.data), numel, static_cast<int>(*dtype), readonly};
}

namespace {

// (first, *rest of `shape`); without `first` where it is negative.
nb::object shape_of(Py_ssize_t first, nb::handle shape, Py_ssize_t rest) {
  const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
  const nb::object tail = nb::steal(PyTuple_GetSlice(shape.ptr(), rest, ndim));
  if (!tail.is_valid()) throw nb::python_error();
  return first < 0 ? tail : nb::make_tuple(first) + tail;
}

}  // namespace

nb::object allocated(nb::handle input, ResultKind shape, int size) {
  const nb::object given = nb::steal(PySequence_Tuple(nb::object(input.attr("shape")).ptr()));
  if (!given.is_valid()) throw nb::python_error();
  nb::object wanted = given;
  if (shape == ResultKind::kGathered) wanted = shape_of(size, given, 0);
  if (shape == ResultKind::kBlock) {
    if (PyTuple_GET_SIZE(given.ptr()) == 0) return {};
    const Py_ssize_t first = PyNumber_AsSsize_t(PyTuple_GET_ITEM(given.ptr(), 0), nullptr);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (first % size != 0) return {};
    wanted = shape_of(first == size ? -1 : first / size, given, 1);
  }
  static InternedName new_empty{"new_empty"};
  if (look_at_array(input) || PyObject_HasAttr(input.ptr(), new_empty.get()) == 0) {
    static std::atomic<PyObject*> known = nullptr;  // not a guarded static: see `look_at_array`
    PyObject* empty = known.load(std::memory_order_acquire);
    if (empty == nullptr) {
      empty = nb::object(nb::module_::import_("numpy").attr("empty")).release().ptr();
      known.store(empty, std::memory_order_release);
    }
    const nb::object dtype = input.attr("dtype");
    return nb::handle(empty)(wanted, dtype);
  }
  const nb::object made =
      nb::steal(unisono_call_method(new_empty.get(), std::array{input.ptr(), wanted.ptr()}.data(), 2));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}
