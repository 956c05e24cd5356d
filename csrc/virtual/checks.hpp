// What PyTorch's CUDA kernels refuse and the CPU's accept, with the same error texts: tensors of two devices,
// operations under `torch.use_deterministic_algorithms(True)`, types of numbers.
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

// ---- determinism ----

// An operation whose CUDA kernel gives results that depend on the order of its threads.
struct NondeterministicKernel {
  const char *operation, *kernel;          // kernel: as PyTorch's error names it
  bool (*when)(const c10::IValue* given);  // for which arguments; nullptr: for all
};

// nullptr: the CUDA kernel is deterministic, or becomes so under the flag.
const NondeterministicKernel* nondeterministic(const std::string& full_name);

// Raises, or warns with `warn_only=True`, if the user asked for deterministic algorithms.
void check_deterministic(const NondeterministicKernel& op, const c10::IValue* given);

// ---- types of numbers ----

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
