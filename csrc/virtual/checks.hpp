// The device checks that PyTorch's CUDA kernels make, with their texts.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace unisono::virtual_gpu {

// What an operation is known by. Made once, when its kernel is registered.
struct Checks {
  enum Kind : uint8_t { kEach, kIterator, kIndex, kConvolution, kNone };
  // Raises unless the arguments' tensors are where the operation takes them.
  void operator()(const torch::jit::Stack& stack, size_t base, size_t count) const;

  Kind kind = kIterator;
  std::string method;                  // as in "wrapper_CUDA_addmm"
  std::vector<std::string> arguments;  // their names
  std::vector<bool> written;
};

// How PyTorch's CUDA build treats the operation. `known`: it has a CUDA kernel there.
struct Entry {
  bool known, iterator;
  std::string method;
};
Entry entry_of(const std::string& full_name);

}  // namespace unisono::virtual_gpu
