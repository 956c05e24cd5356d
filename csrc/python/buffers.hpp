// The buffers of a call, read without Python code.
#pragma once

#include <array>
#include <span>

#include "python/bindings.hpp"

constexpr size_t kMostBuffers = 16;  // of one side of a call; Python handles calls with more

// One side of a call: no buffer, one, or one for each rank. All are of one dtype.
struct CallBuffers {
  int dtype = -1;
  bool readonly = false;
  size_t count = 0;
  std::array<unisono::Extent, kMostBuffers> extents;

  CallBuffers() = default;
  CallBuffers(const CallBuffers&) = delete;
  CallBuffers& operator=(const CallBuffers&) = delete;
  ~CallBuffers() {
    for (size_t i = 0; i < kept_count_; ++i) Py_DECREF(kept_[i]);
  }

  // False: Python has to read these buffers.
  bool see(nanobind::handle given) {
    if (given.is_none()) return true;
    const bool list = PyList_CheckExact(given.ptr()), several = list || PyTuple_CheckExact(given.ptr());
    if (!several) return add(given);
    const auto length = static_cast<size_t>(Py_SIZE(given.ptr()));
    if (length == 0 || length > kMostBuffers) return false;
    for (size_t i = 0; i < length; ++i) {
      if (static_cast<size_t>(Py_SIZE(given.ptr())) != length) return false;
      const auto place = static_cast<Py_ssize_t>(i);
      PyObject* const one = list ? PyList_GET_ITEM(given.ptr(), place) : PyTuple_GET_ITEM(given.ptr(), place);
      if (list) kept_[kept_count_++] = Py_NewRef(one);
      if (!add(one)) return false;
    }
    return true;
  }
  // The items of a list, and the views that pin memory, as a tuple; invalid: there are none.
  nanobind::object kept() const {
    if (kept_count_ == 0) return {};
    PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(kept_count_));
    if (tuple == nullptr) throw nanobind::python_error();
    for (size_t i = 0; i < kept_count_; ++i)
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), Py_NewRef(kept_[i]));
    return nanobind::steal(tuple);
  }
  std::span<const unisono::Extent> all() const { return {extents.data(), count}; }
  size_t nbytes() const {
    size_t numel = 0;
    for (const unisono::Extent& extent : all()) numel += extent.numel;
    return count > 0 ? numel * unisono::itemsize(static_cast<unisono::DType>(dtype)) : 0;
  }

 private:
  bool add(nanobind::handle buffer) {
    const auto seen = look(buffer);
    if (!seen || (count > 0 && seen->dtype != dtype)) return false;
    if (seen->exported && !pin(buffer)) return false;
    dtype = seen->dtype;
    readonly |= seen->readonly;
    extents[count++] = {reinterpret_cast<unsigned char*>(seen->address), static_cast<size_t>(seen->numel)};
    return true;
  }

  // Makes a view. The owner cannot resize or free the memory while the view is alive.
  bool pin(nanobind::handle buffer) {
    PyObject* const view = PyMemoryView_FromObject(buffer.ptr());
    if (view == nullptr) {
      PyErr_Clear();
      return false;
    }
    kept_[kept_count_++] = view;
    return true;
  }

  // The items of a list, which another thread may change while the bytes move; and views that pin memory.
  size_t kept_count_ = 0;
  std::array<PyObject*, 2 * kMostBuffers> kept_;
};
