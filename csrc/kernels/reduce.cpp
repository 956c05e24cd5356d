#include "kernels/reduce.hpp"

#ifdef UNISONO_HAVE_X86_LEVELS
#include <cpuid.h>

#include <initializer_list>
#elif defined(UNISONO_HAVE_SVE)
#include <sys/auxv.h>
#endif

namespace unisono {

// Each is defined by one compilation of reduce_kernels.cpp.
const KernelTable& kernels_base();
#ifdef UNISONO_HAVE_X86_LEVELS
const KernelTable& kernels_v3();
const KernelTable& kernels_v4();
#elif defined(UNISONO_HAVE_SVE)
const KernelTable& kernels_sve();
#endif

namespace {

struct SupportedKernels {
  const KernelTable* tables[3];
  size_t count = 0;
};

#ifdef UNISONO_HAVE_X86_LEVELS
// The level of x86-64 that the processor and the operating system support: 4, 3, or less. Read with cpuid:
// __builtin_cpu_supports differs between compilers, and one of them does not know F16C.
int level() {
  unsigned a = 0, b = 0, c = 0, d = 0, unused = 0;
  const auto has = [](unsigned word, std::initializer_list<int> bits) {
    for (const int bit : bits)
      if ((word >> bit & 1) == 0) return false;
    return true;
  };
  if (__get_cpuid(1, &a, &unused, &c, &d) == 0 || __get_cpuid_count(7, 0, &a, &b, &unused, &d) == 0) return 1;
  if (!has(c, {12, 27, 28, 29}) || !has(b, {5, 8})) return 2;  // FMA, OSXSAVE, AVX, F16C; AVX2, BMI2
  unsigned low = 0, high = 0;                                  // which registers the operating system saves
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!has(low, {1, 2})) return 2;              // SSE, AVX
  if (!has(b, {16, 17, 28, 30, 31})) return 3;  // AVX-512: F, DQ, CD, BW, VL
  return has(low, {5, 6, 7}) ? 4 : 3;           // its masks and registers
}
#endif

SupportedKernels runnable() {
  SupportedKernels found{{&kernels_base()}, 1};
#ifdef UNISONO_HAVE_X86_LEVELS
  const int offered = level();
  if (offered >= 3) found.tables[found.count++] = &kernels_v3();
  if (offered >= 4) found.tables[found.count++] = &kernels_v4();
#elif defined(UNISONO_HAVE_SVE)
  constexpr unsigned long kSve = 1ul << 22;  // HWCAP_SVE, which the headers of old systems lack
  if ((getauxval(AT_HWCAP) & kSve) != 0) found.tables[found.count++] = &kernels_sve();
#endif
  return found;
}

}  // namespace

std::span<const KernelTable* const> all_kernels() {
  static const SupportedKernels found = runnable();
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
