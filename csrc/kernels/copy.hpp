// Copying, and the alignment of stores. Compiled with the reduction kernels for each instruction set.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Before a loop: iterations are independent, also where `out` is an input.
#ifdef __clang__
#define UNISONO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define UNISONO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace unisono {
namespace {

// A caller's buffer may begin at any address. (The compiler turns these into unaligned vector moves.)
template <class T>
inline T get(const T* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
inline void put(T* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

// Elements before the first cache line boundary in `out`. A store across two lines takes twice as long, and
// NumPy's arrays begin in the middle of a line. 0: none, or the buffer is too small for it to matter.
template <class T>
inline size_t lead(const T* out, size_t n) {
  constexpr size_t kLine = 64;
  const size_t bytes = -reinterpret_cast<uintptr_t>(out) % kLine;
  return n * sizeof(T) < 64 * kLine ? 0 : bytes / sizeof(T);
}

// Plain vector moves. For large copies memcpy uses `rep movsb`: vector moves are a fifth faster from the
// cache of another core, and slightly faster from memory.
inline void copy(void* out, const void* in, size_t nbytes) {
  typedef unsigned char Vector __attribute__((vector_size(32)));
  constexpr size_t kVectors = 4, kBlock = kVectors * sizeof(Vector);
  auto* to = static_cast<unsigned char*>(out);
  const auto* from = static_cast<const unsigned char*>(in);
  const size_t first = lead(to, nbytes);
  std::memcpy(to, from, first);
  to += first, from += first, nbytes -= first;
  for (const auto* const end = from + nbytes / kBlock * kBlock; from != end; from += kBlock, to += kBlock) {
    Vector v[kVectors];
    for (size_t i = 0; i < kVectors; ++i) std::memcpy(&v[i], from + i * sizeof(Vector), sizeof(Vector));
    for (size_t i = 0; i < kVectors; ++i) std::memcpy(to + i * sizeof(Vector), &v[i], sizeof(Vector));
    asm volatile("" ::: "memory");  // otherwise the compiler replaces the loop by memcpy
  }
  std::memcpy(to, from, nbytes % kBlock);
}

// As `copy`, by non-temporal stores: the lines of `out` are brought into no cache.
inline void copy_nontemporal(void* out, const void* in, size_t nbytes) {
#ifdef __x86_64__
  constexpr size_t kVectors = 4;  // a line
  auto* to = static_cast<unsigned char*>(out);
  const auto* from = static_cast<const unsigned char*>(in);
  const size_t first = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) % 64, nbytes);
  std::memcpy(to, from, first);
  to += first, from += first, nbytes -= first;
  for (const auto* const end = from + nbytes / 64 * 64; from != end; from += 64, to += 64) {
    __m128i v[kVectors];
    for (size_t i = 0; i < kVectors; ++i) v[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    for (size_t i = 0; i < kVectors; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, v[i]);
  }
  _mm_sfence();
  std::memcpy(to, from, nbytes % 64);
#else
  copy(out, in, nbytes);
#endif
}

}  // namespace
}  // namespace unisono
