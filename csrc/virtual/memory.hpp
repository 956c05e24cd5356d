// PyTorch's allocators for virtual GPUs: host memory, charged to an Account.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

namespace unisono::virtual_gpu {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* at);

// Fills new memory with a pattern that reveals reads of uninitialised memory: NaN, or invalid indices.
void set_poison(bool on);
void poison(void* at, size_t nbytes, c10::ScalarType type);
// Warns once if one of these floating-point numbers is that NaN, or what became of it in another type.
void warn_if_poison(const void* at, int64_t numel, c10::ScalarType type);

// Raises PyTorch's error for a GPU in the place of the host's: it refused memory.
void rethrow_out_of_memory(const c10::Error& error);

// Makes the memory of a CPU kernel's storage memory of `device`, and charges it there.
void adopt(c10::StorageImpl& storage, c10::Device device);

}  // namespace unisono::virtual_gpu
