// Codecs: f32 to 8, 16 or 4 bits and back. docs/codecs.md has the exact definition of every format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace unisono {

// X(enumerator, name, bits of one code, whether blocks of codes share a scale). Python reads it through
// `_native.codecs()`.
#define UNISONO_CODECS(X)        \
  X(kBF16, "bf16", 16, false)    \
  X(kFP16, "fp16", 16, false)    \
  X(kE4M3, "fp8_e4m3", 8, false) \
  X(kE5M2, "fp8_e5m2", 8, false) \
  X(kF169, "1-6-9", 16, false)   \
  X(kU0610, "0-6-10", 16, false) \
  X(kInt8, "int8", 8, true)      \
  X(kInt4, "int4", 4, true)

enum class CodecFormat : uint8_t {
#define X(enumerator, name, bits, blocks) enumerator,
  UNISONO_CODECS(X)
#undef X
};

constexpr size_t kCodeBits[] = {
#define X(enumerator, name, bits, blocks) bits,
    UNISONO_CODECS(X)
#undef X
};
constexpr size_t kCodecCount = std::size(kCodeBits);

constexpr bool has_blocks(CodecFormat codec) {
  constexpr bool kBlocks[] = {
#define X(enumerator, name, bits, blocks) blocks,
      UNISONO_CODECS(X)
#undef X
  };
  return kBlocks[static_cast<size_t>(codec)];
}

// Bytes of the codes of n values. Blocks begin at multiples of `block` (0: no blocks). For n at such a
// multiple this is also the offset of the code of value n.
constexpr size_t code_bytes(CodecFormat codec, size_t block, size_t n) {
  const size_t bits = kCodeBits[static_cast<size_t>(codec)];
  if (block == 0) return n * bits / 8;
  const size_t full = n / block, rest = n % block;
  return full * (block * bits / 8 + sizeof(float)) + (rest > 0 ? (rest * bits + 7) / 8 + sizeof(float) : 0);
}

constexpr size_t kFirstCodec = 128;  // in CallRecord::dtype: below it a dtype, from it on a codec of float32
constexpr size_t kMostBlock = 65536;

// How values are rounded, and the size of a block.
struct EncodeOptions {
  size_t block = 0;  // of int8 and int4: a multiple of 16
  bool stochastic = false;
  uint64_t seed = 0;
  uint64_t first = 0;  // the index of the first value among those that share the seed
};

// Encodes in[0..n). Returns n, or the index of the first value that the format refuses: then `out` is
// incomplete. `out` and `in` do not overlap; both may begin at any address.
using EncodeKernel = size_t (*)(void* out, const float* in, size_t n, const EncodeOptions& coding);

// out[i] = value of code i; `accumulate`: out[i] += that value.
using DecodeKernel = void (*)(float* out, const void* in, size_t n, size_t block);

struct CodecKernels {
  EncodeKernel encode;
  DecodeKernel decode, accumulate;
};

// One step of Adam on parameters whose mean is kept in 1-6-9 and whose variance is kept in 0-6-10.
struct AdamStep {
  float beta1, beta2, eps;
  float decay;            // added to the gradient, times the parameter
  float shrink;           // the parameter times this, first: 1 - lr * decoupled decay
  float rate;             // lr / (1 - beta1^t)
  float root_correction;  // 1 / sqrt(1 - beta2^t)
  bool stochastic_mean;
  uint64_t seed, first;  // of the random bits; the index of the first value
};

// Returns how many means and variances were too large for their formats; they become the largest numbers.
using AdamKernel = size_t (*)(float* parameter, const float* gradient, uint16_t* mean, uint16_t* variance,
                              size_t n, const AdamStep& step);

}  // namespace unisono
