// Every operation of a virtual GPU without a kernel here: the CPU kernel runs on the same memory.
#pragma once
#include <string>

namespace unisono::virtual_gpu {

// Registers one kernel for every operation that PyTorch has for CUDA and for the CPU. Call it once.
void register_operations();

// The same for operations of other libraries that have come since: where one has kernels for both devices,
// the CPU's runs. `in_python`: " space::name ... ", whose kernels for CUDA are written in Python and stay.
void register_libraries(const std::string& in_python);

}  // namespace unisono::virtual_gpu
