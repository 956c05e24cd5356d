// The bits of a float. Compiled with the kernels for each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace unisono {
namespace {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

}  // namespace
}  // namespace unisono
