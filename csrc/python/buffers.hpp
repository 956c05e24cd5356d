// The buffers of a call, read without Python code.
#pragma once

#include <array>
#include <span>
#include <string_view>
#include <vector>

#include "python/bindings.hpp"
#include "python/numbers.hpp"

constexpr size_t kMostBuffers = 16;  // of one side of a call; Python handles calls with more

// Makes a view. The owner cannot resize or free the memory while the view is alive. Invalid: there is no
// view.
inline nanobind::object view_of(nanobind::handle buffer) {
  PyObject* const view = PyMemoryView_FromObject(buffer.ptr());
  if (view == nullptr) PyErr_Clear();
  return nanobind::steal(view);
}

// One side of a call: no buffer, one, or one for each rank. All are of one dtype. Or a number.
struct CallBuffers {
  int dtype = -1;
  bool readonly = false;
  bool number = false;   // the buffer holds a copy of it
  bool several = false;  // given as a list, also of one
  size_t count = 0;
  std::array<unisono::BufferExtent, kMostBuffers> extents;

  CallBuffers() = default;
  CallBuffers(const CallBuffers&) = delete;
  CallBuffers& operator=(const CallBuffers&) = delete;
  ~CallBuffers() {
    for (size_t i = 0; i < kept_count_; ++i) Py_DECREF(kept_[i]);
  }

  // False: Python has to read these buffers. Inlined: every call does this two or three times.
  [[gnu::always_inline]] bool see(nanobind::handle given) {
    if (given.is_none()) return true;
    const bool list = PyList_CheckExact(given.ptr());
    several = list || PyTuple_CheckExact(given.ptr());
    if (!several) return is_number(given) ? add_number(given) : add(given);
    const auto length = static_cast<size_t>(length_of(given.ptr()));
    if (length == 0 || length > kMostBuffers) return false;
    for (size_t i = 0; i < length; ++i) {
      if (static_cast<size_t>(length_of(given.ptr())) != length) return false;
      const auto index = static_cast<Py_ssize_t>(i);
      if (list && !keep_item(given.ptr(), index)) return false;
      if (!add(list ? kept_[kept_count_ - 1] : PyTuple_GET_ITEM(given.ptr(), index))) return false;
    }
    return true;
  }
  // The items of a list, views that pin memory, or a number's memory, as a tuple; invalid: there are none.
  nanobind::object kept() const {
    if (kept_count_ == 0) return {};
    PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(kept_count_));
    if (tuple == nullptr) throw nanobind::python_error();
    for (size_t i = 0; i < kept_count_; ++i)
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), Py_NewRef(kept_[i]));
    return nanobind::steal(tuple);
  }
  std::span<const unisono::BufferExtent> all() const { return {extents.data(), count}; }
  size_t nbytes() const {
    size_t numel = 0;
    for (const unisono::BufferExtent& extent : all()) numel += extent.numel;
    return count > 0 ? numel * unisono::itemsize(static_cast<unisono::DType>(dtype)) : 0;
  }

 private:
  bool keep_item(PyObject* list, Py_ssize_t index) {
    nanobind::object one = list_item(list, index);
    if (!one.is_valid()) return false;
    kept_[kept_count_++] = one.release().ptr();
    return true;
  }

  bool add(nanobind::handle buffer) {
    const auto seen = look(buffer);
    if (!seen || (count > 0 && seen->dtype != dtype)) return false;
    if (seen->exported) {
      PyObject* const one = buffer.ptr();  // NumPy's scalars: Python makes numbers of them
      if (PyFloat_Check(one) || PyComplex_Check(one) || PyLong_Check(one) || is_numpy_scalar(one)) return false;
      nanobind::object view = view_of(buffer);
      if (!view.is_valid()) return false;
      kept_[kept_count_++] = view.release().ptr();
    }
    dtype = seen->dtype;
    readonly |= seen->readonly;
    extents[count++] = {reinterpret_cast<unsigned char*>(seen->address), static_cast<size_t>(seen->numel)};
    return true;
  }

  static bool is_numpy_scalar(PyObject* one) {
    const std::string_view name = Py_TYPE(one)->tp_name;
    return name.starts_with("numpy.") && name != "numpy.ndarray";
  }

  // The copy lies in a private bytes object.
  bool add_number(nanobind::handle given) {
    PyObject* const memory = PyBytes_FromStringAndSize(nullptr, kNumberBytes);
    if (memory == nullptr) throw nanobind::python_error();
    kept_[kept_count_++] = memory;
    const auto stored = store_number(given, PyBytes_AS_STRING(memory));
    if (!stored) return false;
    number = true;
    dtype = static_cast<int>(*stored);
    extents[count++] = {reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(memory)), 1};
    return true;
  }

  // The items of a list, which another thread may change while the bytes move; views that pin memory; or a
  // number's memory.
  size_t kept_count_ = 0;
  std::array<PyObject*, 2 * kMostBuffers> kept_;
};

// One side of a coalesced call: buffers of any dtypes.
class BufferList {
 public:
  struct TypedExtent {
    unisono::BufferExtent extent;
    int dtype;
    bool readonly;
  };

  // False: Python has to read these buffers.
  bool see(nanobind::handle given) {
    if (given.is_none()) return true;
    const bool list = PyList_CheckExact(given.ptr());
    if (!list && !PyTuple_CheckExact(given.ptr())) return false;
    const Py_ssize_t length = length_of(given.ptr());
    seen_.reserve(static_cast<size_t>(length));
    kept_.reserve(static_cast<size_t>(length));
    for (Py_ssize_t i = 0; i < length; ++i) {
      if (length_of(given.ptr()) != length) return false;
      kept_.push_back(list ? list_item(given.ptr(), i) : nanobind::borrow(PyTuple_GET_ITEM(given.ptr(), i)));
      if (!kept_.back().is_valid()) return false;
      const auto seen = look(kept_.back());
      if (!seen) return false;
      seen_.push_back({{reinterpret_cast<unsigned char*>(seen->address), static_cast<size_t>(seen->numel)},
                       seen->dtype,
                       seen->readonly});
      if (!seen->exported) continue;
      kept_.push_back(view_of(kept_.back()));
      if (!kept_.back().is_valid()) return false;
    }
    return true;
  }
  const std::vector<TypedExtent>& all() const { return seen_; }
  // The items, and the views that pin memory.
  const std::vector<nanobind::object>& kept() const { return kept_; }

 private:
  std::vector<TypedExtent> seen_;
  std::vector<nanobind::object> kept_;
};
