#include "memory.hpp"

#include <c10/core/CPUAllocator.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

#include "device.hpp"
#include "memory_account.hpp"

namespace unisono::virtual_gpu {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;

namespace {

bool poisoning = true;

std::string size_text(int64_t bytes) {
  std::ostringstream text;
  text.precision(2);
  text.setf(std::ios::fixed);
  if (bytes <= 1024)
    text << bytes << " bytes";
  else if (bytes <= 1048576)
    text << static_cast<double>(bytes) / 1024.0 << " KiB";
  else if (bytes <= 1073741824)
    text << static_cast<double>(bytes) / 1048576.0 << " MiB";
  else
    text << static_cast<double>(bytes) / 1073741824.0 << " GiB";
  return text.str();
}

// The same text as in c10/cuda/CUDACachingAllocator.cpp.
[[noreturn]] void out_of_memory(int device, const OutOfMemory& why) {
  std::ostringstream text;
  text << "CUDA out of memory. Tried to allocate " << size_text(why.tried) << ". GPU " << device
       << " has a total capacity of " << size_text(why.capacity) << " of which " << size_text(why.free)
       << " is free. ";
  int32_t pids[kMaxDevices];
  int64_t bytes[kMaxDevices];
  for (int64_t i = 0, n = device_usage().of(account(device).physical(), pids, bytes, kMaxDevices); i < n; ++i)
    text << "Process " << pids[i] << " has " << size_text(bytes[i]) << " memory in use. ";
  if (account(device).fraction() < 1.0)
    text << size_text(static_cast<int64_t>(account(device).fraction() * static_cast<double>(why.capacity)))
         << " allowed; ";
  text << "Including non-PyTorch memory, this process has " << size_text(why.used)
       << " memory in use. Of the allocated memory " << size_text(why.allocated)
       << " is allocated by PyTorch, and " << size_text(why.cached)
       << " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
          "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
          "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
          "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, text.str());
}

MemoryBlock* charge(DeviceIndex device, size_t nbytes) {
  if (nbytes == 0) return nullptr;
  try {
    return account(device).charge(static_cast<int64_t>(nbytes), current_stream(device).id());
  } catch (const OutOfMemory& why) {
    out_of_memory(device, why);
  }
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
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override { account(device).reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { account(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {account(device).free_bytes(), account(device).capacity()};
  }
};

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(DeviceIndex device) {
  const DeviceStats seen = account(device).statistics();
  c10::CachingDeviceAllocator::DeviceStats stats;
  c10::CachingDeviceAllocator::StatArray* const theirs[kCounted] = {
      &stats.allocation,      &stats.segment,        &stats.active,       &stats.inactive_split,
      &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes,
      &stats.requested_bytes};
  for (int what = 0; what < kCounted; ++what) {
    for (int pool = 0; pool < kPools; ++pool) {
      const DeviceStat& from = seen.counts[what][pool];
      auto& to = (*theirs[what])[pool];
      to.current = from.current;
      to.peak = from.peak;
      to.allocated = from.allocated;
      to.freed = from.freed;
    }
  }
  stats.num_alloc_retries = seen.retries;
  stats.num_ooms = seen.ooms;
  stats.num_device_alloc = seen.device_allocs;
  stats.num_device_free = seen.device_frees;
  stats.max_split_size = -1;
  return stats;
}

// ---- pinned host memory: host memory in a list ----

struct PinnedRanges {
  std::mutex mutex;
  std::map<const char*, size_t> ranges;
};
PinnedRanges& pinned() {
  static auto* const made = new PinnedRanges();
  return *made;
}

struct PinnedAllocation {
  DataPtr memory;
};

void unpin(void* context) {
  auto* const pin = static_cast<PinnedAllocation*>(context);
  {
    const std::lock_guard lock(pinned().mutex);
    pinned().ranges.erase(static_cast<const char*>(pin->memory.get()));
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
    return {at, new PinnedAllocation{std::move(memory)}, &unpin, Device(c10::kCPU)};
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

// The patterns of set_poison in f32, and what f16 and bf16 become there.
bool is_poison(uint32_t bits) { return bits == 0xffffffffU || bits == 0xffffe000U || bits == 0xffff0000U; }

void warn_if_poison(const void* at, int64_t numel, c10::ScalarType type) {
  if (!poisoning) return;
  bool found = false;
  for (int64_t i = 0; i < numel && !found; ++i) {
    if (type == c10::kFloat) {
      found = is_poison(static_cast<const uint32_t*>(at)[i]);
    } else if (type == c10::kHalf || type == c10::kBFloat16) {
      found = static_cast<const uint16_t*>(at)[i] == 0xffffU;
    } else if (type == c10::kDouble) {
      const uint64_t bits = static_cast<const uint64_t*>(at)[i];
      found = bits == ~uint64_t{0} || bits == 0xffffffffe0000000ULL;
    }
  }
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
