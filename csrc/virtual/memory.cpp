#include "memory.hpp"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "device.hpp"
#include "memory_account.hpp"

namespace unisono::virtual_gpu {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;

namespace {

bool poisoning = true;

MemoryBlock* charge(DeviceIndex device, size_t nbytes) {
  if (nbytes == 0) return nullptr;
  return account(device).charge(static_cast<int64_t>(nbytes), current_stream(device).id());
}

// The context of a virtual GPU's DataPtr: the host memory and its block in the account.
struct DeviceAllocation {
  DataPtr memory;
  MemoryBlock* block;
};

void release(void* context) {
  auto* const held = static_cast<DeviceAllocation*>(context);
  if (void* const at = held->memory.get())
    trace([&](const auto& t) {
      t->trace_gpu_memory_deallocation(c10::kCUDA, reinterpret_cast<uintptr_t>(at));
    });
  if (held->block) account(held->block->device).release(held->block);
  delete held;
}

DataPtr hold(DataPtr memory, MemoryBlock* block, Device device) {
  void* const at = memory.get();
  if (at)
    trace(
        [&](const auto& t) { t->trace_gpu_memory_allocation(c10::kCUDA, reinterpret_cast<uintptr_t>(at)); });
  return {at, new DeviceAllocation{std::move(memory), block}, &release, device};
}

struct DeviceMemory final : c10::DeviceAllocator {
  DataPtr allocate(size_t nbytes) override {
    const DeviceIndex device = current_device();
    MemoryBlock* const block = charge(device, nbytes);
    try {
      return hold(c10::GetCPUAllocator()->allocate(nbytes), block, Device(c10::kCUDA, device));
    } catch (const c10::Error& error) {
      if (block) account(device).release(block);
      account(device).empty_cache();  // what was reserved for it only
      rethrow_out_of_memory(error);
      throw;
    }
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int i = 0; i < device_count(); ++i) account(i).empty_cache();
  }
  void recordStream(const DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(DeviceIndex device) override { return account(device).statistics(); }
  void resetAccumulatedStats(DeviceIndex device) override { account(device).reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { account(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {account(device).free_bytes(), account(device).capacity()};
  }
};

// ---- pinned host memory: host memory in a list ----

struct PinnedRanges {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};
PinnedRanges& pinned() {
  static auto* const made = new PinnedRanges();
  return *made;
}

void unpin(void* context) {
  auto* const pin = static_cast<DataPtr*>(context);
  {
    const std::lock_guard lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(pin->get()));
  }
  delete pin;
}

struct PinnedMemory final : c10::Allocator {
  DataPtr allocate(size_t nbytes) override {
    DataPtr memory = c10::GetCPUAllocator()->allocate(nbytes);
    void* const at = memory.get();
    if (!at) return memory;
    {
      const std::lock_guard lock(pinned().mutex);
      pinned().ranges[static_cast<const char*>(at)] = nbytes;
    }
    return {at, new DataPtr(std::move(memory)), &unpin, Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

}  // namespace

c10::DeviceAllocator* device_allocator() {
  static auto* const made = new DeviceMemory();
  return made;
}

c10::Allocator* pinned_allocator() {
  static auto* const made = new PinnedMemory();
  return made;
}

bool is_pinned(const void* at) {
  const auto* const byte = static_cast<const char*>(at);
  const std::lock_guard lock(pinned().mutex);
  auto after = pinned().ranges.upper_bound(byte);
  return after != pinned().ranges.begin() && (--after, byte < after->first + after->second);
}

void set_poison(bool on) { poisoning = on; }

void poison(void* at, size_t nbytes, c10::ScalarType type) {
  if (!poisoning || nbytes == 0 || at == nullptr) return;
  const bool number = c10::isFloatingType(type) || c10::isComplexType(type);
  const int pattern = number ? 0xff : type == c10::kBool ? 1 : 0x7f;
  std::memset(at, pattern, nbytes);
}

// Whether a number has the pattern of set_poison, or what becomes of it in a type with more bits.
template <typename Bits>
bool any_poison(const void* at, int64_t numel, std::initializer_list<Bits> patterns) {
  const auto* const bits = static_cast<const Bits*>(at);
  return std::find_first_of(bits, bits + numel, patterns.begin(), patterns.end()) != bits + numel;
}

void warn_if_poison(const void* at, int64_t numel, c10::ScalarType type) {
  if (!poisoning) return;
  const bool half = type == c10::kHalf || type == c10::kBFloat16;
  const bool found =
      type == c10::kFloat    ? any_poison<uint32_t>(at, numel, {0xffffffffU, 0xffffe000U, 0xffff0000U})
      : type == c10::kDouble ? any_poison<uint64_t>(at, numel, {~uint64_t{0}, 0xffffffffe0000000ULL})
                             : half && any_poison<uint16_t>(at, numel, {0xffff});
  if (found)
    TORCH_WARN_ONCE(
        "This NaN is memory that was read before it was written, as of torch.empty: virtual GPUs fill "
        "new memory with it. With --no-poison (UNISONO_VIRTUAL_POISON=0) it has some number, as on "
        "a GPU.");
}

void rethrow_out_of_memory(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (text.find("can't allocate memory") == std::string::npos &&
      text.find("not enough memory") == std::string::npos)
    return;
  throw c10::OutOfMemoryError(
      {__func__, __FILE__, __LINE__},
      "CUDA out of memory: the host, whose memory a virtual GPU has, refused it. " + text);
}

void adopt(c10::StorageImpl& storage, Device device) {
  MemoryBlock* const block = charge(device.index(), storage.nbytes());
  DataPtr memory = storage.set_data_ptr(DataPtr());
  storage.set_data_ptr_noswap(hold(std::move(memory), block, device));
  storage.set_allocator(device_allocator());
}

}  // namespace unisono::virtual_gpu
