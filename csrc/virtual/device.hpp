// The devices: the current one, streams, events. Implements PyTorch's device guard.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>

namespace unisono::virtual_gpu {

c10::DeviceIndex device_count();
void set_device_count(int count);
c10::DeviceIndex current_device();
// Raises PyTorch's "CUDA error: invalid device ordinal" for a device that does not exist.
void set_current_device(c10::DeviceIndex index);
// "cuda" is the current device, "cuda:7" of four raises.
c10::Device resolved(c10::Device device);

c10::Stream current_stream(c10::DeviceIndex device);
// The value for `cudaStream_t`: unique per stream, 0 for the default one.
int64_t stream_handle(c10::Stream stream);

const c10::impl::DeviceGuardImplInterface* guard();

// Hides a Python exception that is being raised from Python code that runs meanwhile: the frames that the
// exception leaves release tensors.
class PythonErrorScope {
 public:
  static bool python_runs();
  PythonErrorScope();
  ~PythonErrorScope();
  PythonErrorScope(const PythonErrorScope&) = delete;
  PythonErrorScope& operator=(const PythonErrorScope&) = delete;

 private:
  int lock_;
  void *type_, *value_, *traceback_;
};

// Reports the devices' actions to the Python code that requested it (--check-streams).
template <typename F>
void trace(F tell) {
  if (const c10::impl::PyInterpreter* const interpreter = c10::impl::GPUTrace::get_trace();
      interpreter && PythonErrorScope::python_runs()) {
    const PythonErrorScope kept;
    tell(*interpreter);
  }
}

// Makes `device` the current one during its lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(c10::Device device) : before_(current_device()) { set_current_device(device.index()); }
  ~DeviceGuard() { set_current_device(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  c10::DeviceIndex before_;
};

}  // namespace unisono::virtual_gpu
