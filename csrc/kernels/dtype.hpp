// The one table of element types and reduction operations. Python reads it through
// `_native.dtypes()` and `_native.reduce_ops()`; there is no second list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace unisono {

// X(enumerator, name, bytes per element). Those behind complex128 are moved only; PyTorch alone has them.
#define UNISONO_DTYPES(X)               \
  X(kBool, "bool", 1)                   \
  X(kU8, "uint8", 1)                    \
  X(kI8, "int8", 1)                     \
  X(kI16, "int16", 2)                   \
  X(kI32, "int32", 4)                   \
  X(kI64, "int64", 8)                   \
  X(kF16, "float16", 2)                 \
  X(kBF16, "bfloat16", 2)               \
  X(kF32, "float32", 4)                 \
  X(kF64, "float64", 8)                 \
  X(kC64, "complex64", 8)               \
  X(kC128, "complex128", 16)            \
  X(kU16, "uint16", 2)                  \
  X(kU32, "uint32", 4)                  \
  X(kU64, "uint64", 8)                  \
  X(kC32, "complex32", 4)               \
  X(kBC32, "bcomplex32", 4)             \
  X(kF8E4M3FN, "float8_e4m3fn", 1)      \
  X(kF8E4M3FNUZ, "float8_e4m3fnuz", 1)  \
  X(kF8E5M2, "float8_e5m2", 1)          \
  X(kF8E5M2FNUZ, "float8_e5m2fnuz", 1)  \
  X(kF8E8M0FNU, "float8_e8m0fnu", 1)    \
  X(kF4E2M1FNX2, "float4_e2m1fn_x2", 1) \
  X(kU1, "uint1", 1)                    \
  X(kU2, "uint2", 1)                    \
  X(kU3, "uint3", 1)                    \
  X(kU4, "uint4", 1)                    \
  X(kU5, "uint5", 1)                    \
  X(kU6, "uint6", 1)                    \
  X(kU7, "uint7", 1)                    \
  X(kI1, "int1", 1)                     \
  X(kI2, "int2", 1)                     \
  X(kI3, "int3", 1)                     \
  X(kI4, "int4", 1)                     \
  X(kI5, "int5", 1)                     \
  X(kI6, "int6", 1)                     \
  X(kI7, "int7", 1)                     \
  X(kBits1x8, "bits1x8", 1)             \
  X(kBits2x4, "bits2x4", 1)             \
  X(kBits4x2, "bits4x2", 1)             \
  X(kBits8, "bits8", 1)                 \
  X(kBits16, "bits16", 2)

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
  X(kPremulSum, "PREMUL_SUM") \
  X(kFunction, "FUNCTION")

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
