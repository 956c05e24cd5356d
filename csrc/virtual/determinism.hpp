// The operations that a GPU refuses under `torch.use_deterministic_algorithms(True)`, with the same error
// texts.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>

namespace unisono::virtual_gpu {

// An operation whose CUDA kernel gives results that depend on the order of its threads.
struct NondeterministicKernel {
  const char *operation, *kernel;          // kernel: as PyTorch's error names it
  bool (*when)(const c10::IValue* given);  // for which arguments; nullptr: for all
};

// nullptr: the CUDA kernel is deterministic, or becomes so under the flag.
const NondeterministicKernel* nondeterministic(const std::string& full_name);

// Raises, or warns with `warn_only=True`, if the user asked for deterministic algorithms.
void check_deterministic(const NondeterministicKernel& op, const c10::IValue* given);

}  // namespace unisono::virtual_gpu
