// What the files of the bindings share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "engine.hpp"

using Address = uintptr_t;

void bind_engine(nanobind::module_& m);
void bind_quick(nanobind::module_& m);
void bind_probe(nanobind::module_& m);

// (address, numel, dtype) of a C-contiguous buffer of a known dtype.
std::optional<std::tuple<Address, Py_ssize_t, int>> view(nanobind::handle object, bool writable);
// The same of a torch CPU tensor.
std::optional<std::tuple<Address, Py_ssize_t, int>> view_tensor(nanobind::handle tensor);

inline unisono::Nanoseconds duration(double timeout_s) {
  return timeout_s < 9e9 ? static_cast<unisono::Nanoseconds>(timeout_s * 1e9) : INT64_MAX;
}
inline unisono::Nanoseconds deadline_after(double timeout_s) { return unisono::later(duration(timeout_s)); }

// Waits with the GIL released; what a signal handler raised meanwhile goes on as what it is.
template <class Waiting>
int waiting(unisono::Engine& engine, Waiting wait) {
  unisono::FaultKind kind;
  engine.callers.fetch_add(1, std::memory_order_relaxed);
  {
    const nanobind::gil_scoped_release no_gil;
    kind = wait();
  }
  engine.callers.fetch_sub(1, std::memory_order_relaxed);
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return static_cast<int>(kind);
}

// The part of a call that does not depend on how its buffers are given.
struct Operation {
  const unisono::Program* program;
  uint8_t kind;
  unisono::DType dtype;
  unisono::ReduceOp op;

  unisono::Call call(int root, size_t numel, double factor, double timeout_s,
                     unisono::Binding binding) const {
    return {kind, dtype, op, root, numel, factor, program, std::move(binding), duration(timeout_s)};
  }
  unisono::Binding bind(Address out, size_t out_numel, Address in, size_t in_numel) const {
    using unisono::Space;
    return {cut(Space::kOut, out, out_numel), cut(Space::kIn, in, in_numel)};
  }

  unisono::Chunks cut(unisono::Space space, Address address, size_t numel) const {
    return unisono::Chunks(reinterpret_cast<unsigned char*>(address), numel, program->chunks(space),
                           unisono::itemsize(dtype), program->equal_blocks());
  }
};
