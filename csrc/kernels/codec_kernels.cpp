// The kernels of codecs, and of Adam with compressed state: written once, compiled once per instruction set.
// As in reduce_kernels.cpp all but one name has internal linkage.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/codec_formats.hpp"
#include "kernels/copy.hpp"
#include "kernels/reduce.hpp"

#ifndef UNISONO_ISA
#define UNISONO_ISA base
#endif
#define UNISONO_CONCAT2(a, b) a##b
#define UNISONO_CONCAT(a, b) UNISONO_CONCAT2(a, b)

namespace unisono {
namespace {

// Splits [0, n) into ranges that share a key of random bits, and calls run(start, count, key, place) for
// each; `place`: the index of `start` within its key.
template <class Run>
inline void each_keyed(size_t n, uint64_t seed, uint64_t first, Run run) {
  for (size_t start = 0, count; start < n; start += count) {
    const uint64_t place = (first + start) % kKeyed;
    count = std::min<uint64_t>(n - start, kKeyed - place);
    if (!run(start, count, key_of(seed, first + start), static_cast<uint32_t>(place))) return;
  }
}

// ---- single numbers --------------------------------------------------------------------------------

// Below zero, -infinity included; not -0, not NaN.
inline uint32_t is_negative(float value) { return float_to_bits(value) - (kSign + 1) < kInfinite ? 1u : 0u; }

template <class F, bool kStochastic>
bool encode_range(typename F::Code* out, const float* in, size_t n, uint64_t key, uint32_t place) {
  const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  uint32_t refused = 0;
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < n; ++i) {
    const float value = get(in + i);
    const uint32_t random = kStochastic ? random_bits(low, high, place + static_cast<uint32_t>(i)) : 0;
    if constexpr (!F::kHasSign) refused |= is_negative(value);
    put(out + i, F::encode(value, random, kStochastic));
  }
  return refused == 0;
}

template <class F, bool kStochastic>
size_t encode_all(void* out, const float* in, size_t n, const EncodeOptions& coding) {
  auto* const to = static_cast<typename F::Code*>(out);
  size_t refused = n;
  each_keyed(n, coding.seed, coding.first, [&](size_t start, size_t count, uint64_t key, uint32_t place) {
    if (encode_range<F, kStochastic>(to + start, in + start, count, key, place)) return true;
    for (refused = start; is_negative(get(in + refused)) == 0;) ++refused;
    return false;
  });
  return refused;
}
template <class F>
size_t encode(void* out, const float* in, size_t n, const EncodeOptions& coding) {
  return coding.stochastic ? encode_all<F, true>(out, in, n, coding)
                           : encode_all<F, false>(out, in, n, coding);
}

template <bool kAdds>
inline void give(float* out, float value) {
  if constexpr (kAdds) value = get(out) + value;
  put(out, value);
}

template <class F, bool kAdds>
void decode(float* out, const void* in, size_t n, size_t) {
  const auto* const from = static_cast<const typename F::Code*>(in);
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < n; ++i) give<kAdds>(out + i, F::decode(get(from + i)));
}

// ---- blocks with a scale ---------------------------------------------------------------------------

// A block of k values: its scale as f32, then k codes of 8 bits; or (k + 1) / 2 bytes, of which byte i has
// value i in its lower half and value (k + 1) / 2 + i in its upper half.
constexpr size_t kScale = sizeof(float);
constexpr size_t kWidest = 64;             // values of each half that are rounded at a time
constexpr uint32_t kPlaces = 0x4b400000u;  // 1.5 * 2^23: adding it rounds an f32 to an integer

inline uint32_t largest_magnitude(const float* in, size_t n) {
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t magnitude = float_to_bits(get(in + i)) & ~kSign;
    largest = largest > magnitude ? largest : magnitude;
  }
  return largest;
}

template <bool kStochastic>
inline int32_t whole(float value, uint32_t random, int32_t most) {
  if constexpr (!kStochastic)
    return static_cast<int32_t>(float_to_bits(value + bits_to_float(kPlaces)) - kPlaces);
  const int32_t fixed = static_cast<int32_t>(value * 65536.0f) + static_cast<int32_t>(random & 0xffffu);
  const int32_t floor = fixed >> 16, below = floor < most ? floor : most;
  return below > -most ? below : -most;
}

template <bool kStochastic>
inline void round_block(int8_t* codes, const float* in, size_t n, float inverse, int32_t most,
                        const EncodeOptions& coding, uint64_t first) {
  const auto run = [&](size_t start, size_t count, uint64_t key, uint32_t place) {
    const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      const uint32_t random = kStochastic ? random_bits(low, high, place + static_cast<uint32_t>(i)) : 0;
      const float value = get(in + start + i) * inverse;
      codes[start + i] = static_cast<int8_t>(whole<kStochastic>(value, random, most));
    }
    return true;
  };
  if constexpr (kStochastic)
    each_keyed(n, coding.seed, first, run);
  else
    run(0, n, 0, 0);
}

// The largest scale whose product with the largest code is finite.
constexpr uint32_t largest_scale(int32_t most) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  const float scale = kLargest / static_cast<float>(most);
  const auto bits = std::bit_cast<uint32_t>(scale);
  return static_cast<double>(scale) * most > kLargest ? bits - 1 : bits;
}

// An infinity or NaN in a block makes its scale NaN, and so all of its values: it must not be lost.
struct BlockScale {
  float scale, inverse;
};
template <int32_t kMost>
inline BlockScale scaled(uint32_t largest) {
  if (largest >= kInfinite) return {bits_to_float(kInfinite | 0x400000u), 0.0f};
  const float least = bits_to_float(power_of_two(-126)), most = bits_to_float(largest_scale(kMost));
  const float wanted = bits_to_float(largest) / static_cast<float>(kMost);
  const float scale = wanted < least ? least : wanted < most ? wanted : most;
  return {scale, 1.0f / scale};
}

template <int kBits>
constexpr int32_t kMost = (1 << (kBits - 1)) - 1;
template <int kBits>
constexpr size_t code_bytes(size_t n) {
  return kBits == 8 ? n : (n + 1) / 2;
}

template <int kBits, bool kStochastic>
inline void encode_block(unsigned char* out, const float* in, size_t n, const EncodeOptions& coding,
                         uint64_t first) {
  const BlockScale by = scaled<kMost<kBits>>(largest_magnitude(in, n));
  put(reinterpret_cast<float*>(out), by.scale);
  auto* const codes = reinterpret_cast<int8_t*>(out + kScale);
  if (by.inverse == 0.0f) {
    std::memset(codes, 0, code_bytes<kBits>(n));
  } else if constexpr (kBits == 8) {
    round_block<kStochastic>(codes, in, n, by.inverse, kMost<8>, coding, first);
  } else {
    const size_t half = (n + 1) / 2;
    for (size_t start = 0; start < half; start += kWidest) {
      const size_t lows = std::min(kWidest, half - start), highs = std::min(lows, n - half - start);
      int8_t low[kWidest], high[kWidest];
      round_block<kStochastic>(low, in + start, lows, by.inverse, kMost<4>, coding, first + start);
      round_block<kStochastic>(high, in + half + start, highs, by.inverse, kMost<4>, coding,
                               first + half + start);
      if (highs < lows) high[highs] = 0;
      for (size_t i = 0; i < lows; ++i)
        codes[start + i] = static_cast<int8_t>((low[i] & 15) | static_cast<uint8_t>(high[i]) << 4);
    }
  }
}

// `kBlock`: the block size as a compile-time constant, or 0.
template <int kBits, bool kStochastic, size_t kBlock>
size_t encode_blocks(void* out, const float* in, size_t n, const EncodeOptions& coding) {
  const size_t block = kBlock != 0 ? kBlock : coding.block;
  auto* to = static_cast<unsigned char*>(out);
  size_t start = 0;
  for (; start + block <= n; start += block, to += kScale + code_bytes<kBits>(block))
    encode_block<kBits, kStochastic>(to, in + start, block, coding, coding.first + start);
  if (start < n) encode_block<kBits, kStochastic>(to, in + start, n - start, coding, coding.first + start);
  return n;
}
template <int kBits>
size_t encode_scaled(void* out, const float* in, size_t n, const EncodeOptions& coding) {
  if (coding.stochastic) return encode_blocks<kBits, true, 0>(out, in, n, coding);
  return coding.block == 64 ? encode_blocks<kBits, false, 64>(out, in, n, coding)
                            : encode_blocks<kBits, false, 0>(out, in, n, coding);
}

template <int kBits, bool kAdds>
inline void decode_block(float* out, const unsigned char* in, size_t n) {
  const float scale = get(reinterpret_cast<const float*>(in));
  const auto* const codes = reinterpret_cast<const int8_t*>(in + kScale);
  const size_t half = kBits == 8 ? n : (n + 1) / 2;
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < half; ++i) {
    const int32_t code =
        kBits == 8 ? codes[i] : static_cast<int32_t>(static_cast<uint32_t>(codes[i]) << 28) >> 28;
    give<kAdds>(out + i, scale * static_cast<float>(code));
  }
  if constexpr (kBits == 4) {
    UNISONO_INDEPENDENT
    for (size_t i = 0; i < n - half; ++i)
      give<kAdds>(out + half + i, scale * static_cast<float>(codes[i] >> 4));
  }
}

template <int kBits, bool kAdds, size_t kBlock>
void decode_blocks(float* out, const void* in, size_t n, size_t given) {
  const size_t block = kBlock != 0 ? kBlock : given;
  const auto* from = static_cast<const unsigned char*>(in);
  size_t start = 0;
  for (; start + block <= n; start += block, from += kScale + code_bytes<kBits>(block))
    decode_block<kBits, kAdds>(out + start, from, block);
  if (start < n) decode_block<kBits, kAdds>(out + start, from, n - start);
}
template <int kBits, bool kAdds>
void decode_scaled(float* out, const void* in, size_t n, size_t block) {
  block == 64 ? decode_blocks<kBits, kAdds, 64>(out, in, n, block)
              : decode_blocks<kBits, kAdds, 0>(out, in, n, block);
}

// ---- Adam ------------------------------------------------------------------------------------------

// A finite value beyond the range becomes the largest number, and is counted: an infinite variance would stop
// its parameter.
template <class F>
inline uint16_t saturated(float value, uint32_t code, uint32_t& beyond) {
  const uint32_t bits = float_to_bits(value), finite = (bits & ~kSign) < kInfinite ? 1u : 0u;
  const uint32_t outside = finite & (code >= F::kBeyond ? 1u : 0u);
  beyond += outside;
  return F::finished(bits, outside != 0 ? F::kBeyond - 1 : code);
}

template <bool kStochasticMean>
size_t adam_range(float* parameter, const float* gradient, uint16_t* mean, uint16_t* variance, size_t n,
                  const AdamStep step, uint64_t key, uint32_t place) {
  const auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  uint32_t beyond = 0;
  UNISONO_INDEPENDENT
  for (size_t i = 0; i < n; ++i) {
    const float p = get(parameter + i), g = get(gradient + i) + step.decay * p;
    float m = F169::decode(get(mean + i)), v = U0610::decode(get(variance + i));
    m = m + (g - m) * (1.0f - step.beta1);
    v = v * step.beta2 + g * g * (1.0f - step.beta2);
    put(parameter + i, p * step.shrink - step.rate * m / (std::sqrt(v) * step.root_correction + step.eps));
    const uint32_t random = random_bits(low, high, place + static_cast<uint32_t>(i));
    const uint32_t m_bits = float_to_bits(m) & ~kSign;
    const uint32_t m_code = kStochasticMean ? F169::stochastic(m_bits, random) : F169::nearest(m_bits);
    put(mean + i, saturated<F169>(m, m_code, beyond));
    put(variance + i,
        saturated<U0610>(v, U0610::stochastic(float_to_bits(v) & ~kSign, random >> 16), beyond));
  }
  return beyond;
}

size_t adam(float* parameter, const float* gradient, uint16_t* mean, uint16_t* variance, size_t n,
            const AdamStep& step) {
  size_t beyond = 0;
  each_keyed(n, step.seed, step.first, [&](size_t start, size_t count, uint64_t key, uint32_t place) {
    const auto run = step.stochastic_mean ? adam_range<true> : adam_range<false>;
    beyond +=
        run(parameter + start, gradient + start, mean + start, variance + start, count, step, key, place);
    return true;
  });
  return beyond;
}

template <class F>
constexpr CodecKernels kPlain = {encode<F>, decode<F, false>, decode<F, true>};
template <int kBits>
constexpr CodecKernels kScaledBlocks = {encode_scaled<kBits>, decode_scaled<kBits, false>,
                                        decode_scaled<kBits, true>};

}  // namespace

void UNISONO_CONCAT(add_codecs_, UNISONO_ISA)(KernelTable& table);
void UNISONO_CONCAT(add_codecs_, UNISONO_ISA)(KernelTable& table) {
  const auto row = [&](CodecFormat codec) -> CodecKernels& {
    return table.codecs[static_cast<size_t>(codec)];
  };
  row(CodecFormat::kBF16) = kPlain<BFloat16>;
  row(CodecFormat::kFP16) = kPlain<Half>;
  row(CodecFormat::kE4M3) = kPlain<E4M3>;
  row(CodecFormat::kE5M2) = kPlain<E5M2>;
  row(CodecFormat::kF169) = kPlain<F169>;
  row(CodecFormat::kU0610) = kPlain<U0610>;
  row(CodecFormat::kInt8) = kScaledBlocks<8>;
  row(CodecFormat::kInt4) = kScaledBlocks<4>;
  table.adam = adam;
}

}  // namespace unisono
