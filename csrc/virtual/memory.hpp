// PyTorch's allocators for virtual GPUs: host memory, charged to an Account.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

namespace unisono::virtual_gpu {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* at);

// Fill new memory with a pattern, so that reading it before writing shows: NaN, or numbers that index
// nothing.
void set_poison(bool on);
void poison(void* at, size_t nbytes, c10::ScalarType type);

// The memory of a storage that a CPU kernel made, from now on the memory of `device`, and charged to it.
void adopt(c10::StorageImpl& storage, c10::Device device);

}  // namespace unisono::virtual_gpu
