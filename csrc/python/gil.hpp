// Python's global interpreter lock, and the end of the interpreter.
#pragma once

#include <Python.h>

#include "protocol/waiting.hpp"

// See take_gil.c.
extern "C" void unisono_take_gil(PyThreadState* state);

// A block without the GIL.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  ~NoGil() { unisono_take_gil(state_); }

 private:
  PyThreadState* const state_;
};

// The GIL. The thread that makes this object holds it.
class Gil final : public unisono::HeldLock {
 public:
  Gil() = default;
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  ~Gil() override {
    if (state_ != nullptr) unisono_take_gil(state_);
  }
  void let_go() override {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_ = nullptr;
};
