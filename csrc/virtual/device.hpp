// The devices: which is current, streams, events. What PyTorch asks of a device guard.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

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
