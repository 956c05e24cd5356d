// Every operation of a virtual GPU without a kernel here: the CPU kernel runs on the same memory.
#pragma once

namespace unisono::virtual_gpu {

// Registers one kernel for every operation that PyTorch has for CUDA and for the CPU. Call it once.
void register_operations();

}  // namespace unisono::virtual_gpu
