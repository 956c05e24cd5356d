#include "memory_account.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

namespace unisono::virtual_gpu {

namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kMinBlock = 512, kSmallSize = kMiB, kSmallSegment = 2 * kMiB;
constexpr int64_t kLargeSegment = 20 * kMiB, kMinLarge = 10 * kMiB, kRoundLarge = 2 * kMiB;

int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

int64_t segment_size(int64_t rounded) {
  if (rounded <= kSmallSize) return kSmallSegment;
  return rounded < kMinLarge ? kLargeSegment : up(rounded, kRoundLarge);
}

bool alive(int32_t pid) { return kill(pid, 0) == 0 || errno == EPERM; }

}  // namespace

// ---- other processes ----

size_t DeviceUsage::size() { return sizeof(ProcessSlot) * kSlots; }

void DeviceUsage::open(int descriptor) {
  const int flags = descriptor < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  void* const at = mmap(nullptr, size(), PROT_READ | PROT_WRITE, flags, descriptor, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  slots_ = static_cast<ProcessSlot*>(at);
}

// A slot is found by pid, so that a forked child gets its own.
DeviceUsage::ProcessSlot& DeviceUsage::mine() {
  const int32_t me = getpid();
  for (int i = 0; i < kSlots; ++i) {
    if (slots_[i].pid.load(std::memory_order_relaxed) == me) return slots_[i];
  }
  for (int i = 0; i < kSlots; ++i) {
    int32_t there = slots_[i].pid.load();
    if ((there == 0 || !alive(there)) && slots_[i].pid.compare_exchange_strong(there, me)) {
      for (auto& bytes : slots_[i].reserved) bytes = 0;
      return slots_[i];
    }
  }
  throw std::bad_alloc();
}

void DeviceUsage::set(int device, int64_t reserved) { mine().reserved[device] = reserved; }

int64_t DeviceUsage::of(int device, int32_t* pids, int64_t* bytes, int most) const {
  int found = 0;
  for (int i = 0; i < kSlots && found < most; ++i) {
    const int32_t pid = slots_[i].pid;
    if (pid == 0 || pid == getpid() || slots_[i].reserved[device] == 0 || !alive(pid)) continue;
    pids[found] = pid;
    bytes[found++] = slots_[i].reserved[device];
  }
  return found;
}

int64_t DeviceUsage::others(int device) const {
  int32_t pids[kSlots];
  int64_t bytes[kSlots], sum = 0;
  for (int64_t i = of(device, pids, bytes, kSlots); i > 0; --i) sum += bytes[i - 1];
  return sum;
}

DeviceUsage& device_usage() {
  static DeviceUsage made;
  return made;
}

// ---- one device ----

void DeviceStat::add(int64_t n) {
  current += n;
  peak = std::max(peak, current);
  (n > 0 ? allocated : freed) += n > 0 ? n : -n;
}

bool MemoryAccount::BlockOrder::operator()(const MemoryBlock* a, const MemoryBlock* b) const {
  if (a->stream != b->stream) return a->stream < b->stream;
  return a->size != b->size ? a->size < b->size : a->address < b->address;
}

void MemoryAccount::configure(int device, int physical, int64_t capacity, bool limited) {
  device_ = device;
  physical_ = physical;
  capacity_ = capacity;
  limited_ = limited;
}

void MemoryAccount::count(StatKind what, bool small, int64_t n) {
  auto& counts = statistics_.counts[what];
  counts[kAll].add(n);
  counts[small ? kSmall : kLarge].add(n);
}

// A new segment as one free block. When memory runs short, cached segments are freed first.
MemoryBlock* MemoryAccount::segment(int64_t rounded, int64_t stream, int64_t requested) {
  const int64_t size = segment_size(rounded);
  // Claims first and looks then: of two processes that claim at once, at least one sees the other.
  const auto fits = [&] {
    if (!limited_) return true;
    device_usage().set(physical_, reserved_ + size);
    const double allowed = fraction_ * static_cast<double>(capacity_);
    if (static_cast<double>(reserved_ + size) <= allowed &&
        reserved_ + size + device_usage().others(physical_) <= capacity_) {
      return true;
    }
    device_usage().set(physical_, reserved_);
    return false;
  };
  if (!fits()) {
    ++statistics_.retries;
    drop_cached();
    if (!fits()) {
      ++statistics_.ooms;
      const int64_t allocated = statistics_.counts[kAllocatedBytes][kAll].current;
      const int64_t others = device_usage().others(physical_);
      const int64_t free = std::max<int64_t>(0, capacity_ - reserved_ - others);
      throw OutOfMemory{requested, capacity_, free, others, reserved_, allocated, reserved_ - allocated};
    }
  }
  const bool small = rounded <= kSmallSize;
  ++statistics_.device_allocs;
  reserved_ += size;
  device_usage().set(physical_, reserved_);
  count(kSegment, small, 1);
  count(kReservedBytes, small, size);
  const int64_t address = next_address_;
  next_address_ += size + kRoundLarge;
  return new MemoryBlock{size, 0, address, stream, small, false, nullptr, nullptr, device_};
}

MemoryBlock* MemoryAccount::charge(int64_t size, int64_t stream) {
  const std::lock_guard lock(mutex_);
  const int64_t rounded = up(std::max(size, kMinBlock), kMinBlock);
  const bool small = rounded <= kSmallSize;
  Free& free = pool(small);
  MemoryBlock key{rounded, 0, 0, stream, small, false, nullptr, nullptr, device_};
  const auto found = free.lower_bound(&key);
  MemoryBlock* block = nullptr;
  if (found != free.end() && (*found)->stream == stream) {
    block = *found;
    free.erase(found);
    if (block->prev || block->next) {
      count(kInactiveSplit, small, -1);
      count(kInactiveSplitBytes, small, -block->size);
    }
  } else {
    block = segment(rounded, stream, size);
  }
  const int64_t left = block->size - rounded;
  if (small ? left >= kMinBlock : left > kSmallSize) {
    auto* const rest =
        new MemoryBlock{left, 0, block->address + rounded, stream, small, false, block, block->next, device_};
    if (rest->next) rest->next->prev = rest;
    block->next = rest;
    block->size = rounded;
    free.insert(rest);
    count(kInactiveSplit, small, 1);
    count(kInactiveSplitBytes, small, left);
  }
  block->allocated = true;
  block->requested = size;
  count(kAllocation, small, 1);
  count(kActive, small, 1);
  count(kAllocatedBytes, small, block->size);
  count(kActiveBytes, small, block->size);
  count(kRequestedBytes, small, size);
  return block;
}

void MemoryAccount::absorb(MemoryBlock* block, MemoryBlock* other) {
  if (!other || other->allocated) return;
  pool(block->small).erase(other);
  count(kInactiveSplit, block->small, -1);
  count(kInactiveSplitBytes, block->small, -other->size);
  if (other == block->prev) {
    block->address = other->address;
    block->prev = other->prev;
    if (block->prev) block->prev->next = block;
  } else {
    block->next = other->next;
    if (block->next) block->next->prev = block;
  }
  block->size += other->size;
  delete other;
}

void MemoryAccount::release(MemoryBlock* block) {
  const std::lock_guard lock(mutex_);
  const bool small = block->small;
  count(kAllocation, small, -1);
  count(kActive, small, -1);
  count(kAllocatedBytes, small, -block->size);
  count(kActiveBytes, small, -block->size);
  count(kRequestedBytes, small, -block->requested);
  block->allocated = false;
  absorb(block, block->prev);
  absorb(block, block->next);
  if (block->prev || block->next) {
    count(kInactiveSplit, small, 1);
    count(kInactiveSplitBytes, small, block->size);
  }
  pool(small).insert(block);
}

void MemoryAccount::drop_cached() {
  for (Free* const free : {&small_, &large_}) {
    for (auto it = free->begin(); it != free->end();) {
      MemoryBlock* const block = *it;
      if (block->prev || block->next) {
        ++it;
        continue;
      }
      it = free->erase(it);
      ++statistics_.device_frees;
      reserved_ -= block->size;
      count(kSegment, block->small, -1);
      count(kReservedBytes, block->small, -block->size);
      delete block;
    }
  }
  device_usage().set(physical_, reserved_);
}

void MemoryAccount::empty_cache() {
  const std::lock_guard lock(mutex_);
  drop_cached();
}

DeviceStats MemoryAccount::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void MemoryAccount::reset_peak() {
  const std::lock_guard lock(mutex_);
  for (auto& counts : statistics_.counts)
    for (auto& count : counts) count.peak = count.current;
}

void MemoryAccount::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  for (auto& counts : statistics_.counts)
    for (auto& count : counts) count.allocated = count.freed = 0;
  statistics_.retries = statistics_.ooms = 0;
}

void MemoryAccount::set_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  fraction_ = fraction;
  limited_ = true;  // a program that sets a fraction wants the limit enforced
}

int64_t MemoryAccount::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return std::max<int64_t>(0, capacity_ - reserved_ - device_usage().others(physical_));
}

MemoryAccount& account(int device) {
  static auto* const accounts = new MemoryAccount[kMaxDevices];  // tensors outlive static objects
  return accounts[device];
}

}  // namespace unisono::virtual_gpu
