#include "kernels/reduce.hpp"

namespace unisono {

// Each is defined by one compilation of reduce_kernels.cpp.
const KernelTable& kernels_base();
#ifdef UNISONO_HAVE_X86_LEVELS
const KernelTable& kernels_v3();
const KernelTable& kernels_v4();
#endif

namespace {

struct Runnable {
  const KernelTable* tables[3];
  size_t count = 0;
};

Runnable runnable() {
  Runnable found{{&kernels_base()}, 1};
#ifdef UNISONO_HAVE_X86_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("f16c"))
    found.tables[found.count++] = &kernels_v3();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("f16c"))
    found.tables[found.count++] = &kernels_v4();
#endif
  return found;
}

}  // namespace

std::span<const KernelTable* const> all_kernels() {
  static const Runnable found = runnable();
  return {found.tables, found.count};
}

const KernelTable& kernels() {
  static const KernelTable& table = *all_kernels().back();
  return table;
}

bool reducible(DType dtype, ReduceOp op) {
  return kernels().reduce[static_cast<size_t>(dtype)][static_cast<size_t>(op)] != nullptr;
}

}  // namespace unisono
