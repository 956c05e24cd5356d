// Every operation on a virtual GPU that has no kernel of its own here: the CPU's, on the same memory.
#pragma once

namespace unisono::virtual_gpu {

// Registers one kernel for every operation that PyTorch has for CUDA and for the CPU. Call it once.
void register_operations();

}  // namespace unisono::virtual_gpu
