// The one table of element types and reduction operations. Python reads it through
// `_native.dtypes()` and `_native.reduce_ops()`; there is no second list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace unisono {

// X(enumerator, name, bytes per element)
#define UNISONO_DTYPES(X) \
  X(kBool, "bool", 1)     \
  X(kU8, "uint8", 1)      \
  X(kI8, "int8", 1)       \
  X(kI16, "int16", 2)     \
  X(kI32, "int32", 4)     \
  X(kI64, "int64", 8)     \
  X(kF16, "float16", 2)   \
  X(kBF16, "bfloat16", 2) \
  X(kF32, "float32", 4)   \
  X(kF64, "float64", 8)   \
  X(kC64, "complex64", 8) \
  X(kC128, "complex128", 16)

// X(enumerator, name)
#define UNISONO_REDUCE_OPS(X) \
  X(kSum, "SUM")              \
  X(kAvg, "AVG")              \
  X(kProduct, "PRODUCT")      \
  X(kMin, "MIN")              \
  X(kMax, "MAX")              \
  X(kBand, "BAND")            \
  X(kBor, "BOR")              \
  X(kBxor, "BXOR")            \
  X(kPremulSum, "PREMUL_SUM")

enum class DType : uint8_t {
#define X(enumerator, name, bytes) enumerator,
  UNISONO_DTYPES(X)
#undef X
};

enum class ReduceOp : uint8_t {
#define X(enumerator, name) enumerator,
  UNISONO_REDUCE_OPS(X)
#undef X
};

constexpr size_t kItemSizes[] = {
#define X(enumerator, name, bytes) bytes,
    UNISONO_DTYPES(X)
#undef X
};
constexpr size_t kDTypeCount = sizeof(kItemSizes) / sizeof(kItemSizes[0]);
constexpr size_t kReduceOpCount = 0
#define X(enumerator, name) +1
    UNISONO_REDUCE_OPS(X);
#undef X

inline size_t itemsize(DType dtype) { return kItemSizes[static_cast<size_t>(dtype)]; }

}  // namespace unisono
