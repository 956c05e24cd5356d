// The device checks of PyTorch's CUDA kernels, with the same error texts.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace unisono::virtual_gpu {

// The checks of one operation. Made once, when its kernel is registered.
struct ArgumentChecks {
  enum CheckKind : uint8_t { kEach, kIterator, kIndex, kConvolution, kNone };
  // Raises unless the argument tensors are on devices that the operation accepts.
  void operator()(const torch::jit::Stack& stack, size_t base, size_t count) const;

  CheckKind kind = kIterator;
  std::string method;                  // such as "wrapper_CUDA_addmm"
  std::vector<std::string> arguments;  // their names
  std::vector<bool> written;
};

// The operation in PyTorch's CUDA build. `known`: it has a CUDA kernel there.
struct CudaKernelEntry {
  bool known, iterator;
  std::string method;
};
CudaKernelEntry entry_of(const std::string& full_name);

}  // namespace unisono::virtual_gpu
