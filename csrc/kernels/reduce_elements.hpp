// The element types of the reductions: how an element is stored, the type of its accumulator, and how tiles
// are loaded and stored. Compiled with the kernels for each instruction set.
#pragma once

#include <cstdint>

#include "kernels/copy.hpp"
#include "kernels/float_bits.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace unisono {
namespace {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct Bool {
  uint8_t byte;
};
template <class Real>
struct Complex {
  Real re, im;
};

inline float load_bf16(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; a NaN keeps its sign and becomes quiet. The upper half is the result.
inline uint32_t round_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  return value != value ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
}
inline uint16_t store_bf16(float value) { return static_cast<uint16_t>(round_bf16(value) >> 16); }

inline float load_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // 2^112 * (the same bits read as f32) is exact for normal and subnormal numbers alike.
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(sign | float_to_bits(scaled));
}

inline uint16_t store_f16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x1ffu);
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536 and more
  if (magnitude < 0x38800000u) {                        // subnormal: the f32 addition rounds it
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(float_to_bits(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return sign | static_cast<uint16_t>(rounded >> 13);
}

template <class T>
struct Traits {
  using Acc = T;
  static Acc load(T value) { return value; }
  static T store(Acc value) { return value; }
};
template <>
struct Traits<F16> {
  using Acc = float;
  static float load(F16 value) { return load_f16(value.bits); }
  static F16 store(float value) { return {store_f16(value)}; }
};
template <>
struct Traits<BF16> {
  using Acc = float;
  static float load(BF16 value) { return load_bf16(value.bits); }
  static BF16 store(float value) { return {store_bf16(value)}; }
};
template <>
struct Traits<Bool> {
  using Acc = uint8_t;
  static uint8_t load(Bool value) { return value.byte != 0; }
  static Bool store(uint8_t value) { return {value}; }
};
// ---- to accumulators and back ----------------------------------------------------------------------

// As one struct the compiler would move these through general registers.
template <class Real>
inline Complex<Real> get(const Complex<Real>* from) {
  const auto* const parts = reinterpret_cast<const Real*>(from);
  return {get(parts), get(parts + 1)};
}
template <class Real>
inline void put(Complex<Real>* to, Complex<Real> value) {
  auto* const parts = reinterpret_cast<Real*>(to);
  put(parts, value.re);
  put(parts + 1, value.im);
}

template <class T>
void load_tile(typename Traits<T>::Acc* acc, const T* in, size_t n) {
  for (size_t i = 0; i < n; ++i) acc[i] = Traits<T>::load(get(in + i));
}
template <class T>
void store_tile(T* out, const typename Traits<T>::Acc* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) put(out + i, Traits<T>::store(acc[i]));
}
// Two bf16 in one word become two f32 without a shuffle: one by a shift, one by a mask. So a tile holds the
// elements at even indices first, then those at odd ones.
template <>
void load_tile<BF16>(float* acc, const BF16* in, size_t n) {
  const size_t pairs = n / 2;
  for (size_t i = 0; i < pairs; ++i) {
    const uint32_t both = get(reinterpret_cast<const uint32_t*>(in + 2 * i));
    acc[i] = bits_to_float(both << 16);
    acc[pairs + i] = bits_to_float(both & 0xffff0000u);
  }
  if (n % 2 != 0) acc[n - 1] = load_bf16(get(in + n - 1).bits);
}
template <>
void store_tile<BF16>(BF16* out, const float* acc, size_t n) {
  const size_t pairs = n / 2;
  for (size_t i = 0; i < pairs; ++i)
    put(reinterpret_cast<uint32_t*>(out + 2 * i),
        round_bf16(acc[i]) >> 16 | (round_bf16(acc[pairs + i]) & 0xffff0000u));
  if (n % 2 != 0) put(out + n - 1, BF16{store_bf16(acc[n - 1])});
}
#if defined(__F16C__) || defined(__ARM_NEON)
#if defined(__ARM_NEON)
constexpr size_t kHalves = 4;  // converted by one instruction
inline void widen(float* to, const F16* from) {
  vst1q_f32(to, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
}
inline void narrow(F16* to, const float* from) {
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from))));
}
#elif defined(__AVX512F__)
constexpr size_t kHalves = 16;  // converted by one instruction
inline void widen(float* to, const F16* from) {
  _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
inline void narrow(F16* to, const float* from) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#else
constexpr size_t kHalves = 8;
inline void widen(float* to, const F16* from) {
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void narrow(F16* to, const float* from) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#endif
template <>
void load_tile<F16>(float* acc, const F16* in, size_t n) {
  size_t i = 0;
  for (; i + kHalves <= n; i += kHalves) widen(acc + i, in + i);
  for (; i < n; ++i) acc[i] = load_f16(get(in + i).bits);
}
template <>
void store_tile<F16>(F16* out, const float* acc, size_t n) {
  size_t i = 0;
  for (; i + kHalves <= n; i += kHalves) narrow(out + i, acc + i);
  for (; i < n; ++i) put(out + i, F16{store_f16(acc[i])});
}
#endif

}  // namespace
}  // namespace unisono
