// The formats of single numbers, one value at a time, in a form that compilers vectorise: every branch is a
// choice between two values. Compiled with the kernels for each instruction set.
#pragma once

#include <cstdint>

#include "kernels/float_bits.hpp"

namespace unisono {
namespace {

constexpr uint32_t power_of_two(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }

constexpr uint32_t kSign = 0x80000000u, kInfinite = 0x7f800000u;

// What the codes above the largest number mean.
enum class SpecialCodes {
  kInfinity,
  kOneNaN
};  // infinity and NaNs as in IEEE 754; or only one NaN, the largest code

// A sign (or none), `kExponent` bits of exponent, `kFraction` bits of fraction.
template <class CodeType, int kExponent, int kFraction, int kBias, bool kSigned,
          SpecialCodes kTop = SpecialCodes::kInfinity>
struct FloatLayout {
  using Code = CodeType;
  static constexpr bool kHasSign = kSigned;
  static constexpr int kShift = 23 - kFraction;
  static constexpr int kSignPlace = kExponent + kFraction;
  static constexpr uint32_t kMagnitude = (1u << kSignPlace) - 1;
  static constexpr uint32_t kLowestNormal = power_of_two(1 - kBias);  // as f32
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << kFraction;
  // The first code beyond the largest number.
  static constexpr uint32_t kBeyond =
      kTop == SpecialCodes::kInfinity ? kMagnitude - ((1u << kFraction) - 1) : kMagnitude;
  static constexpr uint32_t kNaN =
      kTop == SpecialCodes::kInfinity ? kBeyond | 1u << (kFraction - 1) : kBeyond;
  // Subnormal numbers are multiples of 2^kUnit. A format with f32's exponents needs no special case for them.
  static constexpr int kUnit = 1 - kBias - kFraction;
  static constexpr bool kAsF32 = kBias == 127;

  // The code of a magnitude, rounded to nearest even. It may be beyond the largest number; `finished` handles
  // that, and NaN.
  static uint32_t nearest(uint32_t magnitude) {
    const uint32_t even = (magnitude >> kShift) & 1u;
    const uint32_t normal = ((magnitude + (1u << (kShift - 1)) - 1u + even) >> kShift) - kRebias;
    if constexpr (kAsF32) return normal;
    // The last place of 2^(kUnit + 23) is 2^kUnit: so the f32 addition rounds.
    constexpr uint32_t kPlace = power_of_two(kAsF32 ? 0 : kUnit + 23);
    const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + bits_to_float(kPlace)) - kPlace;
    return magnitude < kLowestNormal ? subnormal : normal;
  }

  // The same with stochastic rounding: the chance to round up is the distance to the lower neighbour.
  static uint32_t stochastic(uint32_t magnitude, uint32_t random) {
    const uint32_t normal = ((magnitude + (random & ((1u << kShift) - 1))) >> kShift) - kRebias;
    if constexpr (kAsF32) return normal;
    // As an integer, in units of 2^(kUnit - 16).
    const uint32_t low = magnitude < kLowestNormal ? magnitude : kLowestNormal;
    const float scaled = bits_to_float(low) * bits_to_float(power_of_two(kAsF32 ? 0 : 16 - kUnit));
    const uint32_t subnormal =
        (static_cast<uint32_t>(static_cast<int32_t>(scaled)) + (random & 0xffffu)) >> 16;
    return magnitude < kLowestNormal ? subnormal : normal;
  }

  // Handles values beyond the range and NaN, and adds the sign.
  static Code finished(uint32_t bits, uint32_t code) {
    const uint32_t magnitude = bits & ~kSign;
    code = code < kBeyond ? code : kBeyond;
    code = magnitude > kInfinite ? kNaN : code;
    if constexpr (kSigned) code |= (bits & kSign) >> (31 - kSignPlace);
    return static_cast<Code>(code);
  }

  static Code encode(float value, uint32_t random, bool rounds_stochastically) {
    const uint32_t bits = float_to_bits(value), magnitude = bits & ~kSign;
    return finished(bits, rounds_stochastically ? stochastic(magnitude, random) : nearest(magnitude));
  }

  static float decode(Code given) {
    const uint32_t code = given, magnitude = code & kMagnitude;
    uint32_t bits = (magnitude << kShift) + (kRebias << kShift);
    if constexpr (!kAsF32) {
      const float unit = bits_to_float(power_of_two(kUnit > -127 ? kUnit : 0));
      const uint32_t subnormal = float_to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * unit);
      bits = magnitude < (1u << kFraction) ? subnormal : bits;
      constexpr uint32_t kFractionMask = (1u << kFraction) - 1;
      if constexpr (kTop == SpecialCodes::kInfinity)
        bits = magnitude < kBeyond ? bits : kInfinite | (magnitude & kFractionMask) << kShift;
      else
        bits = magnitude < kBeyond ? bits : kInfinite | 0x400000u;
    }
    if constexpr (kSigned) bits |= (code << (31 - kSignPlace)) & kSign;
    return bits_to_float(bits);
  }
};

using BFloat16 = FloatLayout<uint16_t, 8, 7, 127, true>;
using Half = FloatLayout<uint16_t, 5, 10, 15, true>;
using E4M3 = FloatLayout<uint8_t, 4, 3, 7, true, SpecialCodes::kOneNaN>;
using E5M2 = FloatLayout<uint8_t, 5, 2, 15, true>;
using F169 = FloatLayout<uint16_t, 6, 9, 31, true>;
using U0610 = FloatLayout<uint16_t, 6, 10, 51, false>;

// The random bits of value `j` are a function of `j` and the seed, so that any part of an array can be
// rounded alone: a key for each 1024 values (splitmix64), and a 32-bit hash of the index within them
// (lowbias32).
constexpr uint64_t kKeyed = 1024;

constexpr uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t key_of(uint64_t seed, uint64_t j) { return mixed(mixed(seed) + j / kKeyed); }

inline uint32_t random_bits(uint32_t low, uint32_t high, uint32_t place) {
  uint32_t x = low + place;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15) ^ high) * 0x846ca68bu;
  return x ^ (x >> 16);
}

}  // namespace
}  // namespace unisono
