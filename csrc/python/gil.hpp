// Python's global interpreter lock, and the end of the interpreter.
#pragma once

#include <Python.h>
#include <unistd.h>

#include "protocol/waiting.hpp"

// Takes the GIL back. Python before 3.14 ends a daemon thread that asks for the GIL while the interpreter
// ends, by unwinding its stack: a destructor on it would call std::terminate. Such a thread stops here
// instead, in a destructor: libc++, which wheels have, cannot catch this unwinding. Not inlined: a caller
// that is noexcept would skip the destructor.
[[gnu::noinline]] inline void take_gil(PyThreadState* state) {
  struct Taking {
    bool taken = false;
    ~Taking() {
      while (!taken) pause();
    }
  } taking;
  PyEval_RestoreThread(state);
  taking.taken = true;
}

// A block without the GIL.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;
  ~NoGil() { take_gil(state_); }

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
    if (state_ != nullptr) take_gil(state_);
  }
  void let_go() override {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* state_ = nullptr;
};
