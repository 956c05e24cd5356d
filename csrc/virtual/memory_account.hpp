// Models PyTorch's caching allocator for the memory of a GPU: blocks, segments, statistics. Only numbers: the
// memory itself comes from the host.
//
// Rules, as in c10/cuda/CUDACachingAllocator.cpp: sizes are rounded up to 512 bytes. Up to 1 MiB come from
// segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a segment of their own, rounded
// up to 2 MiB. A freed block is merged with its free neighbours and stays reserved until `empty` or until
// memory runs short.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace unisono::virtual_gpu {

constexpr int kMaxDevices = 64;

// The reserved bytes of every process of this machine that shares its devices. It lies in shared memory.
class DeviceUsage {
 public:
  // `descriptor`: of the launcher's memory (environment.py); -1: this process and its forks only.
  void open(int descriptor);
  void set(int device, int64_t reserved);
  std::vector<std::pair<int32_t, int64_t>> others(int device) const;  // pid and bytes of living processes
  int64_t of_others(int device) const;

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

using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::StatArray;

// The memory of one device that this process uses.
class MemoryAccount {
 public:
  // `physical`: its number on this machine, equal in every process; CUDA_VISIBLE_DEVICES may renumber it.
  void configure(int device, int physical, int64_t capacity, bool limited);
  // Raises PyTorch's error when memory runs out. `size` > 0.
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
  bool claim(int64_t size);
  [[noreturn]] void out_of_memory(int64_t requested) const;
  void count_allocated(const MemoryBlock& block, int64_t one);
  void count_split(const MemoryBlock& block, int64_t one);
  void count_segment(const MemoryBlock& block, int64_t one);
  template <typename F>
  void each_statistic(F f);
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
