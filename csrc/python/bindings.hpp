// Declarations shared by the files of the bindings.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <optional>
#include <system_error>
#include <tuple>

#include "engine/engine.hpp"
#include "python/gil.hpp"
#include "python/threads.hpp"

using Address = uintptr_t;

// Runs Python code: calls a function, or reads a property. See enter_python.c: nanobind's own calls leave C++
// frames with Python objects on the stack, which the end of a daemon thread would release without the GIL.
template <typename... Arguments>
nanobind::object call_python(nanobind::handle function, const Arguments&... arguments) {
  const std::array<nanobind::object, sizeof...(Arguments)> objects{nanobind::cast(arguments)...};
  std::array<PyObject*, sizeof...(Arguments)> pointers;
  for (size_t i = 0; i < objects.size(); ++i) pointers[i] = objects[i].ptr();
  nanobind::object result =
      nanobind::steal(unisono_call(function.ptr(), pointers.data(), pointers.size(), nullptr));
  if (!result.is_valid()) throw nanobind::python_error();
  return result;
}

inline nanobind::object property_of(nanobind::handle object, const char* name) {
  nanobind::object result = nanobind::steal(unisono_get_attribute(object.ptr(), name));
  if (!result.is_valid()) throw nanobind::python_error();
  return result;
}

void bind_engine(nanobind::module_& m);
void bind_combiner(nanobind::module_& m);
void bind_calls(nanobind::module_& m);
void bind_faults(nanobind::module_& m, nanobind::class_<unisono::Engine>& engine);
void bind_membership(nanobind::module_& m, nanobind::class_<unisono::Engine>& engine);
void bind_calibrate(nanobind::module_& m);
void bind_codecs(nanobind::module_& m);
// The index of the first value below zero, or `numel`. -0 and NaN are not below zero.
size_t first_negative(const float* values, size_t numel);
// Throws std::invalid_argument where the codec has no blocks of this size (0: no blocks).
void check_block(unisono::CodecFormat codec, size_t block);
void bind_fields(nanobind::module_& m);
void bind_storages(nanobind::module_& m);
// Daemon threads that the interpreter's end finds in C++ stop, and do not abort the process.
void stop_threads_at_the_end();
void bind_futures(nanobind::module_& m);
void bind_packets(nanobind::module_& m);
void bind_plain_objects(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_simulator(nanobind::module_& m);
void bind_windows(nanobind::module_& m);
void bind_queues(nanobind::module_& m);
void bind_requests(nanobind::module_& m);

// Raises an OSError with the errno of `error`.
void set_os_error(const std::system_error& error);
// The same in a call of a group; for a limit, Unisono's error that says what to do.
void set_limit_error(const std::system_error& error);

// A C-contiguous buffer of a known dtype.
struct BufferView {
  Address address;
  Py_ssize_t numel;
  int dtype;
  bool readonly;
  bool exported = false;  // by the buffer protocol: its owner may move it while no memoryview is alive
};
std::optional<BufferView> look(nanobind::handle object);
std::optional<BufferView> look_at_tensor(nanobind::handle tensor);
// The same for a NumPy array, where its layout is known.
std::optional<BufferView> look_at_array(nanobind::handle array);
// Whether it is a NumPy array whose values are not the bytes in its memory alone: its class computes with
// code of its own, as one with units, or has a mask.
bool is_array_of_its_own(nanobind::handle object);

inline unisono::Nanoseconds duration(double timeout_s) {
  if (!(timeout_s < 9e9)) return INT64_MAX;
  return timeout_s > 0 ? static_cast<unisono::Nanoseconds>(timeout_s * 1e9) : 0;
}
inline unisono::Nanoseconds deadline_after(double timeout_s) {
  return unisono::to_deadline(duration(timeout_s));
}

// Waits without the GIL. An exception that a signal handler raised meanwhile propagates unchanged. `brief`:
// apart from waiting the call takes only some microseconds, so that only a long wait releases the GIL.
template <class Waiting>
int waiting(unisono::Engine& engine, bool brief, Waiting wait) {
  struct CallerCount {
    explicit CallerCount(std::atomic<int>& calls_under_way) : calls_under_way(calls_under_way) {
      calls_under_way.fetch_add(1, std::memory_order_relaxed);
    }
    ~CallerCount() { calls_under_way.fetch_sub(1, std::memory_order_relaxed); }
    std::atomic<int>& calls_under_way;
  } const calling(engine.calls_under_way);
  unisono::FaultKind kind;
  {
    GilLock gil;
    if (!brief || engine.shares_process()) gil.release();
    kind = wait(gil);
  }
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return static_cast<int>(kind);
}

// The part of a call that does not depend on how its buffers are given.
struct OperationDescriptor {
  const unisono::Program* program;
  uint8_t kind;
  unisono::DType dtype;
  unisono::ReduceOp op;
  unisono::EdgeCoding coding{};
  // Whether the output or the input has to be checked for negative numbers, because the codec refuses them.
  bool checks_out = false, checks_in = false;
  const unisono::Combiner* combiner = nullptr;  // the operation's object keeps it alive

  unisono::CollectiveCall call(int root, size_t numel, double factor, double timeout_s,
                               unisono::BufferBinding binding) const {
    unisono::CollectiveCall made{
        kind, dtype, op, root, numel, factor, program, std::move(binding), duration(timeout_s)};
    made.combiner = combiner;
    return made;
  }
  unisono::BufferBinding bind(Address out, size_t out_numel, Address in, size_t in_numel) const {
    using unisono::Space;
    return {cut(Space::kOut, out, out_numel), cut(Space::kIn, in, in_numel)};
  }

  unisono::ChunkList cut(unisono::Space space, Address address, size_t numel) const {
    return unisono::ChunkList(reinterpret_cast<unsigned char*>(address), numel, program->chunks(space),
                              unisono::itemsize(dtype), program->equal_blocks(),
                              combiner == nullptr ? 0 : combiner->chunk(unisono::itemsize(dtype)));
  }
};
