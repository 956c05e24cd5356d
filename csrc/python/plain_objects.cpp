// Objects of plain types as bytes: the small ones that most programs send. What is not plain is encoded by
// Python, see unisono/engine/encoding; docs/objects.md has the bytes.
//
// The decoder trusts no byte: it builds values of these types and nothing else, in memory proportional to
// what has come.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

constexpr std::string_view kHead("UO\x01\x02", 4);  // version 1, PayloadFormat.PLAIN
constexpr size_t kMostPlain = 64 << 10;             // bytes; larger objects gain nothing
constexpr int kMostDepth = 16;

enum class Tag : unsigned char {
  kNone,
  kFalse,
  kTrue,
  kInt,
  kFloat,
  kComplex,
  kStr,
  kBytes,
  kByteArray,
  kList,
  kTuple,
  kDict,
  kSet,
  kFrozenSet
};

// A value's bytes, in little-endian order.
template <class T>
std::array<char, sizeof(T)> little(T value) {
  auto bytes = std::bit_cast<std::array<char, sizeof(T)>>(value);
  if constexpr (std::endian::native == std::endian::big) std::ranges::reverse(bytes);
  return bytes;
}

class PlainEncoder {
 public:
  // False: it is not plain. Exact types only: a subclass would arrive as its base.
  bool write(PyObject* object, int depth) {
    if (out.size() > kMostPlain) return false;
    PyTypeObject* const type = Py_TYPE(object);
    if (type == &PyUnicode_Type) return write_text(object);
    if (type == &PyLong_Type) return write_int(object);
    if (type == &PyFloat_Type) return put(Tag::kFloat, little(PyFloat_AS_DOUBLE(object)));
    if (object == Py_None) return put(Tag::kNone);
    if (type == &PyBool_Type) return put(object == Py_True ? Tag::kTrue : Tag::kFalse);
    if (type == &PyBytes_Type)
      return put_bytes(Tag::kBytes, PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object));
    if (type == &PyByteArray_Type)
      return put_bytes(Tag::kByteArray, PyByteArray_AS_STRING(object), PyByteArray_GET_SIZE(object));
    if (type == &PyComplex_Type) {
      const Py_complex value = PyComplex_AsCComplex(object);
      return put(Tag::kComplex, little(value.real)) && append(little(value.imag));
    }
    return depth < kMostDepth && write_container(object, type, depth + 1);
  }
  std::string out{kHead};

 private:
  bool append(std::string_view bytes) {
    out.append(bytes);
    return true;
  }
  template <size_t n>
  bool append(const std::array<char, n>& bytes) {
    return append(std::string_view(bytes.data(), n));
  }
  bool put(Tag tag) {
    out.push_back(static_cast<char>(tag));
    return true;
  }
  template <size_t n>
  bool put(Tag tag, const std::array<char, n>& bytes) {
    return put(tag) && append(bytes);
  }
  bool put_count(Tag tag, Py_ssize_t count) {
    return static_cast<size_t>(count) <= kMostPlain && put(tag, little(static_cast<uint32_t>(count)));
  }
  bool put_bytes(Tag tag, const char* data, Py_ssize_t nbytes) {
    return put_count(tag, nbytes) && append({data, static_cast<size_t>(nbytes)});
  }
  bool write_text(PyObject* object) {
    Py_ssize_t nbytes = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(object, &nbytes);
    if (text == nullptr) PyErr_Clear();  // a half of a surrogate pair
    return text != nullptr && put_bytes(Tag::kStr, text, nbytes);
  }
  bool write_int(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0 && put(Tag::kInt, little(value));
  }
  bool write_container([[maybe_unused]] PyObject* object, [[maybe_unused]] PyTypeObject* type,
                       [[maybe_unused]] int depth) {
#ifdef Py_GIL_DISABLED
    return false;  // another thread may change it meanwhile
#else
    if (type == &PyList_Type || type == &PyTuple_Type) {
      const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
      bool plain = put_count(type == &PyList_Type ? Tag::kList : Tag::kTuple, count);
      for (Py_ssize_t i = 0; plain && i < count; ++i)
        plain = write(PySequence_Fast_GET_ITEM(object, i), depth);
      return plain;
    }
    if (type == &PyDict_Type) {
      bool plain = put_count(Tag::kDict, PyDict_GET_SIZE(object));
      PyObject *key, *value;
      for (Py_ssize_t at = 0; plain && PyDict_Next(object, &at, &key, &value) != 0;)
        plain = write(key, depth) && write(value, depth);
      return plain;
    }
    if (type != &PySet_Type && type != &PyFrozenSet_Type) return false;
    bool plain = put_count(type == &PySet_Type ? Tag::kSet : Tag::kFrozenSet, PySet_GET_SIZE(object));
    const nb::object items = nb::steal(PyObject_GetIter(object));
    if (!items.is_valid()) throw nb::python_error();
    while (plain) {
      const nb::object item = nb::steal(PyIter_Next(items.ptr()));
      if (!item.is_valid()) break;
      plain = write(item.ptr(), depth);
    }
    return plain;
#endif
  }
};

class PlainDecoder {
 public:
  explicit PlainDecoder(std::string_view bytes) : left_(bytes) {}

  nb::object whole() {
    nb::object object = read(0);
    if (!left_.empty()) refuse("bytes are left over");
    return object;
  }

 private:
  [[noreturn]] static void refuse(const char* why) {
    PyErr_Format(
        PyExc_ValueError,
        "cannot decode: %s. These are not the bytes of an object, or not all of them; the sender must use "
        "the *_object call that matches this one",
        why);
    throw nb::python_error();
  }
  std::string_view take(size_t nbytes) {
    if (nbytes > left_.size()) refuse("a piece goes beyond the end");
    const std::string_view piece = left_.substr(0, nbytes);
    left_.remove_prefix(nbytes);
    return piece;
  }
  template <class T>
  T number() {
    std::array<char, sizeof(T)> bytes;
    std::memcpy(bytes.data(), take(sizeof(T)).data(), sizeof(T));
    return std::bit_cast<T>(little(std::bit_cast<T>(bytes)));
  }
  // Of items that take at least `each` bytes: so a wrong number allocates no more than has come.
  Py_ssize_t count(size_t each) {
    const auto items = number<uint32_t>();
    if (items > left_.size() / each) refuse("more items than bytes");
    return items;
  }
  static nb::object checked(PyObject* made) {
    if (made != nullptr) return nb::steal(made);
    if (PyErr_ExceptionMatches(PyExc_MemoryError) != 0) throw nb::python_error();
    PyErr_Clear();
    refuse("a value is damaged");
  }
  nb::object read(int depth) {
    if (depth > kMostDepth) refuse("it is nested too deep");
    const auto tag = static_cast<Tag>(take(1)[0]);
    switch (tag) {
      case Tag::kNone:
        return nb::none();
      case Tag::kFalse:
      case Tag::kTrue:
        return nb::bool_(tag == Tag::kTrue);
      case Tag::kInt:
        return checked(PyLong_FromLongLong(number<int64_t>()));
      case Tag::kFloat:
        return checked(PyFloat_FromDouble(number<double>()));
      case Tag::kComplex: {
        const auto real = number<double>(), imaginary = number<double>();
        return checked(PyComplex_FromDoubles(real, imaginary));
      }
      case Tag::kStr:
      case Tag::kBytes:
      case Tag::kByteArray:
        return bytes(tag);
      case Tag::kList:
      case Tag::kTuple:
        return sequence(tag, depth + 1);
      case Tag::kDict:
        return dictionary(depth + 1);
      case Tag::kSet:
      case Tag::kFrozenSet:
        return set(tag, depth + 1);
    }
    refuse("there is no such type");
  }
  nb::object bytes(Tag tag) {
    const std::string_view piece = take(number<uint32_t>());
    const auto nbytes = static_cast<Py_ssize_t>(piece.size());
    if (tag == Tag::kBytes) return checked(PyBytes_FromStringAndSize(piece.data(), nbytes));
    if (tag == Tag::kByteArray) return checked(PyByteArray_FromStringAndSize(piece.data(), nbytes));
    return checked(PyUnicode_DecodeUTF8(piece.data(), nbytes, nullptr));
  }
  nb::object sequence(Tag tag, int depth) {
    const Py_ssize_t items = count(1);
    nb::object made = checked(tag == Tag::kList ? PyList_New(items) : PyTuple_New(items));
    for (Py_ssize_t i = 0; i < items; ++i) {
      PyObject* const item = read(depth).release().ptr();
      if (tag == Tag::kList)
        PyList_SET_ITEM(made.ptr(), i, item);
      else
        PyTuple_SET_ITEM(made.ptr(), i, item);
    }
    return made;
  }
  nb::object dictionary(int depth) {
    const Py_ssize_t items = count(2);
    nb::object made = checked(PyDict_New());
    for (Py_ssize_t i = 0; i < items; ++i) {
      const nb::object key = read(depth), value = read(depth);
      require(PyDict_SetItem(made.ptr(), key.ptr(), value.ptr()));
    }
    return made;
  }
  nb::object set(Tag tag, int depth) {
    const Py_ssize_t items = count(1);
    nb::object made = checked(tag == Tag::kSet ? PySet_New(nullptr) : PyFrozenSet_New(nullptr));
    for (Py_ssize_t i = 0; i < items; ++i) require(PySet_Add(made.ptr(), read(depth).ptr()));
    return made;
  }
  static void require(int result) {
    if (result != 0) checked(nullptr);  // a key that cannot be hashed
  }

  std::string_view left_;
};

// Reads containers while nothing changes them: before Python 3.12 an allocation may run the collector, and so
// finalizers.
struct CollectorPause {
  CollectorPause() = default;
  CollectorPause(const CollectorPause&) = delete;
  CollectorPause& operator=(const CollectorPause&) = delete;
#if PY_VERSION_HEX < 0x030C0000
  ~CollectorPause() {
    if (was_enabled_ != 0) PyGC_Enable();
  }

 private:
  const int was_enabled_ = PyGC_Disable();
#endif
};

nb::object encode_plain(nb::handle object) {
  [[maybe_unused]] const CollectorPause pause;
  PlainEncoder encoder;
  if (!encoder.write(object.ptr(), 0)) return nb::none();
  return nb::bytes(encoder.out.data(), encoder.out.size());
}

nb::object decode_plain(nb::handle data) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const struct Release {
    Py_buffer& view;
    ~Release() { PyBuffer_Release(&view); }
  } release{view};
  const std::string_view bytes(static_cast<const char*>(view.buf), static_cast<size_t>(view.len));
  if (!bytes.starts_with(kHead)) return nb::borrow(Py_NotImplemented);
  return PlainDecoder(bytes.substr(kHead.size())).whole();
}

}  // namespace

void bind_plain_objects(nb::module_& m) {
  m.def("encode_plain", &encode_plain, nb::arg("object").none(),
        nb::sig("def encode_plain(object: typing.Any) -> bytes | None"),
        "The bytes of a small object of plain types; None: it is none.");
  m.def("decode_plain", &decode_plain, nb::arg("data"),
        nb::sig("def decode_plain(data: typing.Any) -> typing.Any"),
        "The object of these bytes; NotImplemented: they are of another format.");
}
