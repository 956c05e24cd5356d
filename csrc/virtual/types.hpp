// Types of numbers that PyTorch's CUDA kernels refuse and the CPU's accept.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace unisono::virtual_gpu {

struct RefusedTypes {
  const char* operation;
  bool (*refused)(at::ScalarType);
  const char* kernel;  // its name in PyTorch's error
};

// nullptr for an operation that takes on a GPU what it takes on the CPU.
const RefusedTypes* refused_types(const std::string& operation);

// Raises PyTorch's error if the first argument, a tensor, has such a type.
void check_type(const RefusedTypes& refused, const c10::IValue* arguments);

// Raises PyTorch's error if a normalization's weight or bias has another type than its input.
void check_normalization(const c10::IValue* arguments);

}  // namespace unisono::virtual_gpu
