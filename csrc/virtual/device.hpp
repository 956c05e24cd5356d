// The devices: which is current, streams, events. What PyTorch asks of a device guard.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>

namespace unisono::virtual_gpu {

c10::DeviceIndex device_count();
void set_device_count(int count);
c10::DeviceIndex current_device();
// Raises PyTorch's "CUDA error: invalid device ordinal" for a device that is not there.
void set_current_device(c10::DeviceIndex index);
// "cuda" is the current device, "cuda:7" of four raises.
c10::Device resolved(c10::Device device);

c10::Stream current_stream(c10::DeviceIndex device);
// What `cudaStream_t` would be: unique per stream, 0 for the default one.
int64_t stream_handle(c10::Stream stream);

const c10::impl::DeviceGuardImplInterface* guard();

// An exception of Python that is on its way is kept from Python code that runs meanwhile. The frames it
// leaves let go of tensors.
class PythonError {
 public:
  static bool python_runs();
  PythonError();
  ~PythonError();
  PythonError(const PythonError&) = delete;
  PythonError& operator=(const PythonError&) = delete;

 private:
  int lock_;
  void *type_, *value_, *traceback_;
};

// Tells what the devices do to who asked for it (--check-streams), which is Python code.
template <typename F>
void trace(F tell) {
  if (const c10::impl::PyInterpreter* const interpreter = c10::impl::GPUTrace::get_trace();
      interpreter && PythonError::python_runs()) {
    const PythonError kept;
    tell(*interpreter);
  }
}

// Makes `device` the current one for a while.
class On {
 public:
  explicit On(c10::Device device) : before_(current_device()) { set_current_device(device.index()); }
  ~On() { set_current_device(before_); }
  On(const On&) = delete;
  On& operator=(const On&) = delete;

 private:
  c10::DeviceIndex before_;
};

}  // namespace unisono::virtual_gpu
