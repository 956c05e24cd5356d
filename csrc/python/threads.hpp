// What the bindings share between threads of Python. With a GIL the locks of nanobind (`ft_mutex`) are empty.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

// An interned name, made at its first use. Not a guarded static: a thread that waits for the guard would keep
// the garbage collector of a free-threaded Python from stopping it, and the thread that makes the name may
// wait for the collector. Two threads that both make it get the same object.
class InternedName {
 public:
  constexpr explicit InternedName(const char* text) : text_(text) {}
  InternedName(const InternedName&) = delete;
  InternedName& operator=(const InternedName&) = delete;

  PyObject* get() {
    PyObject* known = interned_.load(std::memory_order_acquire);
    if (known != nullptr) [[likely]]
      return known;
    known = PyUnicode_InternFromString(text_);
    if (known == nullptr) throw nanobind::python_error();
    interned_.store(known, std::memory_order_release);
    return known;
  }

 private:
  const char* const text_;
  std::atomic<PyObject*> interned_{nullptr};
};

// An item of a list. Invalid: the list has become shorter.
inline nanobind::object list_item(PyObject* list, Py_ssize_t index) {
#ifdef Py_GIL_DISABLED
  PyObject* const item = PyList_GetItemRef(list, index);
  if (item == nullptr) PyErr_Clear();
  return nanobind::steal(item);
#else
  return index < PyList_GET_SIZE(list) ? nanobind::borrow(PyList_GET_ITEM(list, index)) : nanobind::object();
#endif
}

// The length of a list or a tuple.
inline Py_ssize_t length_of(PyObject* items) {
  return PyList_CheckExact(items) ? PyList_GET_SIZE(items) : PyTuple_GET_SIZE(items);
}
