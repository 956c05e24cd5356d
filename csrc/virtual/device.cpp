#include "device.hpp"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>

#include "memory_account.hpp"

// Functions of Python, which loads this library.
extern "C" {
int Py_IsInitialized();
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Fetch(void**, void**, void**);
void PyErr_Restore(void*, void*, void*);
}

namespace unisono::virtual_gpu {

bool PythonErrorScope::python_runs() { return Py_IsInitialized() != 0; }
PythonErrorScope::PythonErrorScope() : lock_(PyGILState_Ensure()) {
  PyErr_Fetch(&type_, &value_, &traceback_);
}
PythonErrorScope::~PythonErrorScope() {
  PyErr_Restore(type_, value_, traceback_);
  PyGILState_Release(lock_);
}

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {

constexpr int32_t kInvalidDevice = 101;           // cudaErrorInvalidDevice
constexpr int kPoolStreams = 32;                  // of each priority, as in c10/cuda/CUDAStream.cpp
constexpr int64_t kFirstHandle = 0x560000000000;  // not an address of any program

DeviceIndex count = 1;
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kMaxDevices> streams{};
std::array<std::atomic<uint32_t>, kMaxDevices> used[2];  // by priority

[[noreturn]] void invalid_device() {
  throw c10::AcceleratorError(
      {__func__, __FILE__, __LINE__}, kInvalidDevice,
      "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
      "Search for `cudaErrorInvalidDevice' in "
      "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
      "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
      "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
      "Device-side assertions were explicitly omitted for this error check; the error probably arose while "
      "initializing the DSA handlers.");
}

// An event. Work runs synchronously, so a recorded event is complete.
struct VirtualEvent {
  std::chrono::steady_clock::time_point at;
};

using Tracer = c10::impl::PyInterpreter;
uintptr_t number(const void* event) { return reinterpret_cast<uintptr_t>(event); }

struct VirtualDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device d) const override {
    const Device before(c10::kCUDA, current);
    set_current_device(d.index());
    return before;
  }
  Device getDevice() const override { return Device(c10::kCUDA, current); }
  void setDevice(Device d) const override { set_current_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < count) current = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return count; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device d) const override { return current_stream(d.has_index() ? d.index() : current); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, resolved(d)); }
  Stream getStreamFromGlobalPool(Device d, bool high) const override {
    return getNewStream(d, high ? -1 : 0);
  }
  Stream getNewStream(Device d, int priority) const override {
    d = resolved(d);
    const bool high = priority < 0;
    const int64_t id = 1 + (high ? kPoolStreams : 0) + used[high][d.index()]++ % kPoolStreams;
    const Stream made(Stream::UNSAFE, d, id);
    trace([&](const Tracer& t) { t->trace_gpu_stream_creation(c10::kCUDA, stream_handle(made)); });
    return made;
  }
  Stream exchangeStream(Stream s) const override {
    const DeviceIndex d = s.device_index();
    const Stream before = current_stream(d);
    streams[d] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return reinterpret_cast<void*>(stream_handle(s));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override {
    trace([&](const Tracer& t) { t->trace_gpu_stream_synchronization(c10::kCUDA, stream_handle(s)); });
  }
  void synchronizeDevice(const DeviceIndex) const override {
    trace([&](const Tracer& t) { t->trace_gpu_device_synchronization(c10::kCUDA); });
  }

  void record(void** event, const Stream& s, const DeviceIndex d, const c10::EventFlag) const override {
    TORCH_CHECK(d == -1 || d == s.device_index(), "Event device index ", static_cast<int>(d),
                " does not match recording stream's device index ", static_cast<int>(s.device_index()), ".");
    if (*event == nullptr) {
      *event = new VirtualEvent{};
      trace([&](const Tracer& t) { t->trace_gpu_event_creation(c10::kCUDA, number(*event)); });
    }
    static_cast<VirtualEvent*>(*event)->at = std::chrono::steady_clock::now();
    trace([&](const Tracer& t) { t->trace_gpu_event_record(c10::kCUDA, number(*event), stream_handle(s)); });
  }
  void block(void* event, const Stream& s) const override {
    if (event)
      trace([&](const Tracer& t) { t->trace_gpu_event_wait(c10::kCUDA, number(event), stream_handle(s)); });
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) trace([&](const Tracer& t) { t->trace_gpu_event_synchronization(c10::kCUDA, number(event)); });
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (!event) return;
    trace([&](const Tracer& t) { t->trace_gpu_event_deletion(c10::kCUDA, number(event)); });
    delete static_cast<VirtualEvent*>(event);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    const std::chrono::duration<double, std::milli> between =
        static_cast<VirtualEvent*>(end)->at - static_cast<VirtualEvent*>(begin)->at;
    return between.count();
  }
};

}  // namespace

DeviceIndex device_count() { return count; }
void set_device_count(int n) { count = static_cast<DeviceIndex>(n); }
DeviceIndex current_device() { return current; }

void set_current_device(DeviceIndex index) {
  if (index < 0) return;
  if (index >= count) invalid_device();
  current = index;
}

Device resolved(Device device) {
  if (device.index() >= count) invalid_device();
  return device.has_index() ? device : Device(c10::kCUDA, current);
}

Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), streams[device]);
}

int64_t stream_handle(Stream stream) {
  if (stream.id() == 0) return 0;
  return kFirstHandle + (int64_t{stream.device_index()} << 20) + 64 * stream.id();
}

const c10::impl::DeviceGuardImplInterface* guard() {
  static const auto* const made = new VirtualDeviceGuard();  // PyTorch never deletes one
  return made;
}

}  // namespace unisono::virtual_gpu
