#include "kernels/reduce.hpp"

namespace unisono {

// Each is defined by one compilation of reduce_kernels.cpp.
const KernelTable& kernels_base();
#ifdef UNISONO_HAVE_X86_LEVELS
const KernelTable& kernels_v3();
const KernelTable& kernels_v4();
#endif

namespace {

const KernelTable& choose() {
#ifdef UNISONO_HAVE_X86_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("f16c"))
    return kernels_v4();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("f16c"))
    return kernels_v3();
#endif
  return kernels_base();
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

bool reducible(DType dtype, ReduceOp op) {
  return kernels().reduce[static_cast<size_t>(dtype)][static_cast<size_t>(op)] != nullptr;
}

}  // namespace unisono
