// The functions that Python calls through ctypes, and the hooks that PyTorch finds registered for CUDA.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "device.hpp"
#include "fallback.hpp"
#include "generator.hpp"
#include "memory.hpp"
#include "memory_account.hpp"

namespace unisono::virtual_gpu {

void register_attention();
void register_kernels();

namespace {

using c10::Device;
using c10::DeviceIndex;

// What unisono_virtual_open has set. CUDA_VISIBLE_DEVICES counts until the first use of a device, as on a
// GPU.
struct MachineSettings {
  int gpus = 0;
  int64_t memory = 0;
  bool limited = false, used = false;
};
MachineSettings machine;

// The number on this machine of a device that CUDA_VISIBLE_DEVICES names, by number or UUID; -1: there is
// none.
int named(std::string word) {
  word.erase(0, word.find_first_not_of(" \t"));
  word.erase(word.find_last_not_of(" \t") + 1);
  const size_t uuid = word.rfind("GPU-", 0) == 0 ? word.rfind('-') + 1 : 0;
  if (word.size() == uuid || word.find_first_not_of("0123456789", uuid) != std::string::npos) return -1;
  const int number = std::atoi(word.c_str() + uuid);
  return number < machine.gpus ? number : -1;
}

// By CUDA's rules: of four, "2,0" -> 2, 0; "1,9,2" -> 1: those after an unknown one are hidden.
void find_devices() {
  if (machine.used) return;
  std::vector<int> found;
  if (const char* const text = std::getenv("CUDA_VISIBLE_DEVICES")) {
    std::stringstream words(text);
    for (std::string word; std::getline(words, word, ',');) {
      const int number = named(word);
      if (number < 0 || std::find(found.begin(), found.end(), number) != found.end()) break;
      found.push_back(number);
    }
  } else {
    for (int i = 0; i < machine.gpus; ++i) found.push_back(i);
  }
  for (size_t i = 0; i < found.size(); ++i)
    account(static_cast<int>(i)).configure(static_cast<int>(i), found[i], machine.memory, machine.limited);
  set_device_count(static_cast<int>(found.size()));
}

DeviceIndex visible_devices() {
  find_devices();
  return device_count();
}

struct VirtualCudaHooks final : at::CUDAHooksInterface {
  explicit VirtualCudaHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return visible_devices(); }
  int getNumGPUs() const override { return visible_devices(); }
  DeviceIndex current_device() const override { return virtual_gpu::current_device(); }
  DeviceIndex getCurrentDevice() const override { return virtual_gpu::current_device(); }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    return guard()->exchangeDevice(Device(c10::kCUDA, d)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, virtual_gpu::current_device()); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<VirtualGenerator>(resolved(Device(c10::kCUDA, d)).index());
  }
  void deviceSynchronize(DeviceIndex d) const override { guard()->synchronizeDevice(d); }
  std::string showConfig() const override { return "Virtual GPUs of Unisono"; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  long versionCUDART() const override { return 0; }
  double batchnormMinEpsilonCuDNN() const override { return 1e-5; }
  int64_t cuFFTGetPlanCacheMaxSize(DeviceIndex) const override { return 4096; }
  void cuFFTSetPlanCacheMaxSize(DeviceIndex, int64_t) const override {}
  int64_t cuFFTGetPlanCacheSize(DeviceIndex) const override { return 0; }
  void cuFFTClearPlanCache(DeviceIndex) const override {}
};

struct SilentWarningHandler final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Work runs synchronously, so the host's clock gives its times.
struct ReducerTimer final : c10d::Timer {
  explicit ReducerTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from == c10d::kUnsetTime || to == c10d::kUnsetTime || to < from) return std::nullopt;
    return to - from;
  }
};

// The events of torch.profiler, likewise.
struct ProfilerEvents final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  static int64_t time(const Event* event) { return *static_cast<const int64_t*>(event->get()); }
  void record(DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    if (device) *device = virtual_gpu::current_device();
    *event = std::make_shared<int64_t>(c10::getTime());
    if (cpu_ns) *cpu_ns = time(event);
  }
  float elapsed(const Event* from, const Event* to) const override {  // microseconds
    return static_cast<float>(time(to) - time(from)) / 1000;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    for (int i = 0; i < visible_devices(); ++i) op(i);
  }
  void synchronize() const override {}
};

}  // namespace
}  // namespace unisono::virtual_gpu

// PyTorch makes the hooks once, at their first use: so this library must be loaded before libtorch_python.
namespace at {
static RegistererCUDAHooksRegistry virtual_hooks(
    "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(),
    RegistererCUDAHooksRegistry::DefaultCreator<unisono::virtual_gpu::VirtualCudaHooks>, "virtual GPUs");
}
namespace c10d {
static RegistererTimerRegistry virtual_timer(
    c10::kCUDA, c10::REGISTRY_PREFERRED, TimerRegistry(),
    RegistererTimerRegistry::DefaultCreator<unisono::virtual_gpu::ReducerTimer>, "virtual GPUs");
}

using namespace unisono::virtual_gpu;

extern "C" {

// Before PyTorch is imported. `memory`: bytes of each device; `limited`: more is an error.
void unisono_virtual_open(int gpus, int64_t memory, int limited, int poisoned, int shared_descriptor) {
  machine = {gpus, memory, limited != 0};
  find_devices();
  set_poison(poisoned != 0);
  device_usage().open(shared_descriptor);
}

// From now on CUDA_VISIBLE_DEVICES does not count any more.
void unisono_virtual_use() {
  find_devices();
  machine.used = true;
}

// Call once PyTorch's libraries are loaded. Suppresses the warning that kernels of its CUDA build are
// replaced.
void unisono_virtual_register() {
  SilentWarningHandler silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  static const c10::impl::DeviceGuardImplRegistrar registered(c10::kCUDA, guard());
  c10::SetAllocator(c10::kCUDA, device_allocator(), 200);
  static ProfilerEvents events;
  torch::profiler::impl::registerCUDAMethods(&events);
  register_kernels();
  register_attention();
  register_operations();
  register_libraries("");
}

// After a library has been loaded. `in_python`: see register_libraries.
void unisono_virtual_register_libraries(const char* in_python) {
  SilentWarningHandler silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  register_libraries(in_python);
}

void unisono_virtual_trace(const c10::impl::PyInterpreter* interpreter) {
  c10::impl::GPUTrace::set_trace(interpreter);
}

int unisono_virtual_count() { return visible_devices(); }
int unisono_virtual_physical(int device) { return account(device).physical(); }
int unisono_virtual_current() { return current_device(); }
int64_t unisono_virtual_stream_handle(int device, int64_t id) {
  return stream_handle(
      c10::Stream(c10::Stream::UNSAFE, Device(c10::kCUDA, static_cast<DeviceIndex>(device)), id));
}

void unisono_virtual_set_fraction(int device, double fraction) { account(device).set_fraction(fraction); }
double unisono_virtual_fraction(int device) { return account(device).fraction(); }
int64_t unisono_virtual_free(int device) { return account(device).free_bytes(); }
int64_t unisono_virtual_capacity(int device) { return account(device).capacity(); }
}
