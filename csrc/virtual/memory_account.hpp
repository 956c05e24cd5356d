// Models PyTorch's caching allocator for the memory of a GPU: blocks, segments, statistics. Only numbers: the
// memory itself comes from the host. Independent of PyTorch and Python.
//
// Rules, as in c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512 bytes. Up to 1 MiB come from
// segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of their own, rounded
// up to 2 MiB. A freed block is merged with its free neighbours and stays reserved until `empty` or until
// memory runs short.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

namespace unisono::virtual_gpu {

constexpr int kMaxDevices = 64;

// The reserved bytes of every process of this machine that shares its devices. It lies in shared memory.
class DeviceUsage {
 public:
  // `descriptor`: of the launcher's memory, `size()` bytes; -1: this process and its forks only.
  static size_t size();
  void open(int descriptor);
  void set(int device, int64_t reserved);
  int64_t others(int device) const;                                       // of living processes
  int64_t of(int device, int32_t* pids, int64_t* bytes, int most) const;  // how many; for error texts

 private:
  struct ProcessSlot {
    std::atomic<int32_t> pid;
    std::atomic<int64_t> reserved[kMaxDevices];
  };
  static constexpr int kSlots = 256;
  ProcessSlot& mine();
  ProcessSlot* slots_ = nullptr;
};
DeviceUsage& device_usage();

struct MemoryBlock {
  int64_t size, requested;
  int64_t address;  // invented; orders blocks of equal size
  int64_t stream;
  bool small, allocated;
  MemoryBlock *prev, *next;
  int device;
};

enum StatPool { kAll, kSmall, kLarge, kPools };
enum StatKind {
  kAllocation,
  kSegment,
  kActive,
  kInactiveSplit,
  kAllocatedBytes,
  kReservedBytes,
  kActiveBytes,
  kInactiveSplitBytes,
  kRequestedBytes,
  kCounted
};  // clang-format keeps it short
struct DeviceStat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void add(int64_t n);
};
struct DeviceStats {
  std::array<std::array<DeviceStat, kPools>, kCounted> counts{};
  int64_t retries = 0, ooms = 0, device_allocs = 0, device_frees = 0;
};

struct OutOfMemory {
  int64_t tried, capacity, free, others, used, allocated, cached;
};

// The memory of one device that this process uses.
class MemoryAccount {
 public:
  // `physical`: its number on this machine, equal in every process; CUDA_VISIBLE_DEVICES may renumber it.
  void configure(int device, int physical, int64_t capacity, bool limited);
  // Throws OutOfMemory. `size` > 0.
  MemoryBlock* charge(int64_t size, int64_t stream);
  void release(MemoryBlock* block);
  void empty_cache();
  DeviceStats statistics() const;
  void reset_peak();
  void reset_accumulated();
  void set_fraction(double fraction);
  double fraction() const { return fraction_; }
  int64_t capacity() const { return capacity_; }
  int64_t free_bytes() const;  // as cudaMemGetInfo returns it
  int physical() const { return physical_; }

 private:
  struct BlockOrder {
    bool operator()(const MemoryBlock* a, const MemoryBlock* b) const;
  };
  using Free = std::set<MemoryBlock*, BlockOrder>;
  MemoryBlock* segment(int64_t rounded, int64_t stream, int64_t requested);
  void count(StatKind what, bool small, int64_t n);
  void drop_cached();
  void absorb(MemoryBlock* block, MemoryBlock* other);
  Free& pool(bool small) { return small ? small_ : large_; }

  mutable std::mutex mutex_;
  int device_ = 0, physical_ = 0;
  int64_t capacity_ = 0, next_address_ = 1, reserved_ = 0;
  bool limited_ = false;
  double fraction_ = 1.0;
  Free small_, large_;
  DeviceStats statistics_;
};
MemoryAccount& account(int device);

}  // namespace unisono::virtual_gpu
