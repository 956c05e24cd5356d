// Python's global interpreter lock, and the end of the interpreter.
#pragma once

#include <Python.h>

#include "protocol/waiter.hpp"

// See enter_python.c.
extern "C" {
void unisono_take_gil(PyThreadState* state);
PyObject* unisono_call(PyObject* function, PyObject* const* arguments, size_t count, PyObject* keywords);
PyObject* unisono_call_method(PyObject* name, PyObject* const* arguments, size_t count);
PyObject* unisono_next(PyObject* iterator);
PyObject* unisono_get_attribute(PyObject* object, const char* name);
}

// A block without the GIL.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() { unisono_take_gil(state_); }

 private:
  PyThreadState* const state_;
};

// The GIL. The thread that makes this object holds it.
class GilLock final : public unisono::ReleasableLock {
 public:
  GilLock() = default;
  GilLock(const GilLock&) = delete;
  GilLock& operator=(const GilLock&) = delete;
  ~GilLock() override {
    if (state_ != nullptr) unisono_take_gil(state_);
  }
  void release() override {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }
  bool held() const override { return state_ == nullptr; }

 private:
  PyThreadState* state_ = nullptr;
};
