#include "memory_account.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <sstream>
#include <tuple>

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

void add(StatArray& to, const MemoryBlock& block, int64_t n) {
  using c10::CachingDeviceAllocator::StatType;
  for (const StatType pool :
       {StatType::AGGREGATE, block.small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
    auto& each = to[static_cast<size_t>(pool)];
    n > 0 ? each.increase(n) : each.decrease(-n);
  }
}

// As PyTorch writes it: "1.50 GiB".
std::string size_text(int64_t bytes) {
  if (bytes <= 1024) return c10::str(bytes, " bytes");
  std::ostringstream text;
  text.precision(2);
  text.setf(std::ios::fixed);
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; unit < 2 && value > 1024; ++unit) value /= 1024;
  text << value << " " << "KMG"[unit] << "iB";
  return text.str();
}

bool alive(int32_t pid) { return kill(pid, 0) == 0 || errno == EPERM; }

}  // namespace

// ---- other processes ----

void DeviceUsage::open(int descriptor) {
  const int flags = descriptor < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  void* const at = mmap(nullptr, sizeof(ProcessSlot) * kSlots, PROT_READ | PROT_WRITE, flags, descriptor, 0);
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

std::vector<std::pair<int32_t, int64_t>> DeviceUsage::others(int device) const {
  std::vector<std::pair<int32_t, int64_t>> found;
  for (int i = 0; i < kSlots; ++i) {
    const int32_t pid = slots_[i].pid;
    const int64_t bytes = slots_[i].reserved[device];
    if (pid != 0 && pid != getpid() && bytes != 0 && alive(pid)) found.emplace_back(pid, bytes);
  }
  return found;
}

int64_t DeviceUsage::of_others(int device) const {
  int64_t sum = 0;
  for (const auto& [pid, bytes] : others(device)) sum += bytes;
  return sum;
}

DeviceUsage& device_usage() {
  static DeviceUsage made;
  return made;
}

// ---- one device ----

bool MemoryAccount::BlockOrder::operator()(const MemoryBlock* a, const MemoryBlock* b) const {
  return std::tie(a->stream, a->size, a->address) < std::tie(b->stream, b->size, b->address);
}

void MemoryAccount::configure(int device, int physical, int64_t capacity, bool limited) {
  device_ = device;
  physical_ = physical;
  capacity_ = capacity;
  limited_ = limited;
  statistics_.max_split_size = -1;
}

template <typename F>
void MemoryAccount::each_statistic(F f) {
  DeviceStats& s = statistics_;
  for (StatArray* const pools :
       {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
        &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
    for (auto& each : *pools) f(each);
}

// `one`: 1 or -1.
void MemoryAccount::count_allocated(const MemoryBlock& block, int64_t one) {
  add(statistics_.allocation, block, one);
  add(statistics_.active, block, one);
  add(statistics_.allocated_bytes, block, one * block.size);
  add(statistics_.active_bytes, block, one * block.size);
  add(statistics_.requested_bytes, block, one * block.requested);
}

// A free block that is part of a segment.
void MemoryAccount::count_split(const MemoryBlock& block, int64_t one) {
  if (!block.prev && !block.next) return;
  add(statistics_.inactive_split, block, one);
  add(statistics_.inactive_split_bytes, block, one * block.size);
}

void MemoryAccount::count_segment(const MemoryBlock& block, int64_t one) {
  ++(one > 0 ? statistics_.num_device_alloc : statistics_.num_device_free);
  reserved_ += one * block.size;
  add(statistics_.segment, block, one);
  add(statistics_.reserved_bytes, block, one * block.size);
}

// Claims first and looks then: of two processes that claim at once, at least one sees the other.
bool MemoryAccount::claim(int64_t size) {
  device_usage().set(physical_, reserved_ + size);
  if (!limited_ || (reserved_ + size <= fraction_ * static_cast<double>(capacity_) &&
                    reserved_ + size + device_usage().of_others(physical_) <= capacity_))
    return true;
  device_usage().set(physical_, reserved_);
  return false;
}

// The same text as in c10/cuda/CUDACachingAllocator.cpp.
void MemoryAccount::out_of_memory(int64_t requested) const {
  const auto others = device_usage().others(physical_);
  int64_t free = capacity_ - reserved_;
  for (const auto& [pid, bytes] : others) free -= bytes;
  const int64_t allocated = statistics_.allocated_bytes[0].current;
  std::ostringstream text;
  text << "CUDA out of memory. Tried to allocate " << size_text(requested) << ". GPU " << device_
       << " has a total capacity of " << size_text(capacity_) << " of which "
       << size_text(std::max<int64_t>(0, free)) << " is free. ";
  for (const auto& [pid, bytes] : others)
    text << "Process " << pid << " has " << size_text(bytes) << " memory in use. ";
  if (fraction_ < 1.0)
    text << size_text(static_cast<int64_t>(fraction_ * static_cast<double>(capacity_))) << " allowed; ";
  text << "Including non-PyTorch memory, this process has " << size_text(reserved_)
       << " memory in use. Of the allocated memory " << size_text(allocated)
       << " is allocated by PyTorch, and " << size_text(reserved_ - allocated)
       << " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
          "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
          "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
          "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";
  throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, text.str());
}

// A new segment as one free block. When memory runs short, cached segments are freed first.
MemoryBlock* MemoryAccount::segment(int64_t rounded, int64_t stream, int64_t requested) {
  const int64_t size = segment_size(rounded);
  if (!claim(size)) {
    ++statistics_.num_alloc_retries;
    drop_cached();
    if (!claim(size)) {
      ++statistics_.num_ooms;
      out_of_memory(requested);
    }
  }
  auto* const made = new MemoryBlock{size,  0,       next_address_, stream, rounded <= kSmallSize,
                                     false, nullptr, nullptr,       device_};
  count_segment(*made, 1);
  next_address_ += size + kRoundLarge;
  return made;
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
    count_split(*block, -1);
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
    count_split(*rest, 1);
  }
  block->allocated = true;
  block->requested = size;
  count_allocated(*block, 1);
  return block;
}

void MemoryAccount::absorb(MemoryBlock* block, MemoryBlock* other) {
  if (!other || other->allocated) return;
  pool(block->small).erase(other);
  count_split(*other, -1);
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
  count_allocated(*block, -1);
  block->allocated = false;
  absorb(block, block->prev);
  absorb(block, block->next);
  count_split(*block, 1);
  pool(block->small).insert(block);
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
      count_segment(*block, -1);
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
  each_statistic([](auto& each) { each.reset_peak(); });
}

void MemoryAccount::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  each_statistic([](auto& each) { each.reset_accumulated(); });
  statistics_.num_alloc_retries = statistics_.num_ooms = 0;
}

void MemoryAccount::set_fraction(double fraction) {
  const std::lock_guard lock(mutex_);
  fraction_ = fraction;
  limited_ = true;  // a program that sets a fraction wants the limit enforced
}

int64_t MemoryAccount::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return std::max<int64_t>(0, capacity_ - reserved_ - device_usage().of_others(physical_));
}

MemoryAccount& account(int device) {
  static auto* const accounts = new MemoryAccount[kMaxDevices];  // tensors outlive static objects
  return accounts[device];
}

}  // namespace unisono::virtual_gpu
