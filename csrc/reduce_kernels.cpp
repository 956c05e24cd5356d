// The reduction kernels, written once and compiled once per instruction set (see CMakeLists.txt).
// Everything here has internal linkage but the table, so that no two compilations can be mixed up:
// an inline function with AVX-512 in it must never be linked into the base build.
#include <cstdint>
#include <cstring>

#include "copy_kernel.hpp"
#include "reduce.hpp"

#ifdef __F16C__
#include <immintrin.h>
#endif

#ifndef UNISONO_ISA
#define UNISONO_ISA base
#endif
#define UNISONO_CONCAT2(a, b) a##b
#define UNISONO_CONCAT(a, b) UNISONO_CONCAT2(a, b)
#define UNISONO_STRING2(a) #a
#define UNISONO_STRING(a) UNISONO_STRING2(a)

namespace unisono {
namespace {

// ---- element types: how one is stored, and in what it is accumulated -------------------------------

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

inline float load_bf16(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// Round to nearest even; a NaN keeps its sign and becomes quiet.
inline uint16_t store_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? ((bits >> 16) | 0x40u) : rounded);
}

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
  if (magnitude < 0x38800000u) {                        // subnormal: let the f32 adder round it
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
// Signed sums and products wrap, as NumPy's do: accumulate in the unsigned type of that width.
#define UNISONO_WRAPPING(Signed, Unsigned)                                          \
  template <>                                                                       \
  struct Traits<Signed> {                                                           \
    using Acc = Signed;                                                             \
    static Acc load(Signed value) { return value; }                                 \
    static Signed store(Acc value) { return value; }                                \
    static Acc add(Acc a, Acc b) {                                                  \
      return static_cast<Acc>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)); \
    }                                                                               \
    static Acc mul(Acc a, Acc b) {                                                  \
      return static_cast<Acc>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b)); \
    }                                                                               \
  };
UNISONO_WRAPPING(int8_t, uint32_t)
UNISONO_WRAPPING(int16_t, uint32_t)
UNISONO_WRAPPING(int32_t, uint32_t)
UNISONO_WRAPPING(int64_t, uint64_t)
#undef UNISONO_WRAPPING

// ---- operations on accumulated values --------------------------------------------------------------

template <class Real>
inline Complex<Real> operator+(Complex<Real> a, Complex<Real> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class Real>
inline Complex<Real> operator*(Complex<Real> a, Complex<Real> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

template <class A>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<float> = true;
template <>
constexpr bool kIsFloat<double> = true;

template <class T>
struct Sum {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) {
    if constexpr (requires { Traits<T>::add(a, b); })
      return Traits<T>::add(a, b);
    else
      return static_cast<A>(a + b);
  }
};
template <class T>
struct Product {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) {
    if constexpr (requires { Traits<T>::mul(a, b); })
      return Traits<T>::mul(a, b);
    else
      return static_cast<A>(a * b);
  }
};
// A NaN on any rank is the result, as in NumPy's minimum and maximum.
template <class T>
struct Min {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) {
    if constexpr (kIsFloat<A>)
      return (a < b || a != a) ? a : b;
    else
      return b < a ? b : a;
  }
};
template <class T>
struct Max {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) {
    if constexpr (kIsFloat<A>)
      return (a > b || a != a) ? a : b;
    else
      return a < b ? b : a;
  }
};
template <class T>
struct Band {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) { return static_cast<A>(a & b); }
};
template <class T>
struct Bor {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) { return static_cast<A>(a | b); }
};
template <class T>
struct Bxor {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) { return static_cast<A>(a ^ b); }
};

template <class A>
inline A divided(A value, double divisor) {
  return static_cast<A>(value / static_cast<A>(divisor));
}
template <class Real>
inline Complex<Real> divided(Complex<Real> value, double divisor) {
  return {value.re / static_cast<Real>(divisor), value.im / static_cast<Real>(divisor)};
}

// ---- loops -----------------------------------------------------------------------------------------

// A caller's buffer may begin at any address. (The compiler makes unaligned vector moves of these.)
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

constexpr size_t kTile = 512;  // accumulators of one tile stay in the first-level cache

template <class T>
void load_tile(typename Traits<T>::Acc* acc, const T* in, size_t n) {
  for (size_t i = 0; i < n; ++i) acc[i] = Traits<T>::load(get(in + i));
}
template <class T>
void store_tile(T* out, const typename Traits<T>::Acc* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) put(out + i, Traits<T>::store(acc[i]));
}
#ifdef __F16C__
template <>
void load_tile<F16>(float* acc, const F16* in, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  for (; i < n; ++i) acc[i] = load_f16(get(in + i).bits);
}
template <>
void store_tile<F16>(F16* out, const float* acc, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; ++i) put(out + i, F16{store_f16(acc[i])});
}
#endif

// Two or three inputs that need no widening: one pass, no tile. `out` may be an input, which the
// vectoriser allows for (each element is read before it is written).
template <class T, class Op>
void reduce_flat(T* out, const T* a, const T* b, const T* c, size_t n) {
  if (const size_t first = lead(out, n)) {
    reduce_flat<T, Op>(out, a, b, c, first);
    out += first, a += first, b += first, n -= first;
    if (c != nullptr) c += first;
  }
  if (c == nullptr) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i)
      put(out + i, Traits<T>::store(Op::apply(Traits<T>::load(get(a + i)), Traits<T>::load(get(b + i)))));
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i)
      put(out + i,
          Traits<T>::store(Op::apply(Op::apply(Traits<T>::load(get(a + i)), Traits<T>::load(get(b + i))),
                                     Traits<T>::load(get(c + i)))));
  }
}

template <class T, class Op>
void reduce_tiled(T* out, const void* const* in, size_t k, size_t n, double divisor) {
  using Acc = typename Traits<T>::Acc;
  alignas(64) Acc acc[kTile];
  alignas(64) Acc next[kTile];
  for (size_t start = 0, m = lead(out, n); start < n; start += m, m = 0) {
    if (m == 0) m = n - start < kTile ? n - start : kTile;
    load_tile<T>(acc, static_cast<const T*>(in[0]) + start, m);
    for (size_t j = 1; j < k; ++j) {
      load_tile<T>(next, static_cast<const T*>(in[j]) + start, m);
      for (size_t i = 0; i < m; ++i) acc[i] = Op::apply(acc[i], next[i]);
    }
    if (divisor != 1.0)
      for (size_t i = 0; i < m; ++i) acc[i] = divided(acc[i], divisor);
    store_tile<T>(out + start, acc, m);
  }
}

template <class T>
constexpr bool kWidens = sizeof(T) != sizeof(typename Traits<T>::Acc);

template <class T, class Op>
void reduce(void* out, const void* const* in, size_t k, size_t n, Finish finish) {
  T* const dst = static_cast<T*>(out);
  if (!kWidens<T> && finish.divisor == 1.0 && (k == 2 || k == 3)) {
    reduce_flat<T, Op>(dst, static_cast<const T*>(in[0]), static_cast<const T*>(in[1]),
                       k == 3 ? static_cast<const T*>(in[2]) : nullptr, n);
  } else if (k == 1 && finish.divisor == 1.0) {
    if (out != in[0]) std::memcpy(out, in[0], n * sizeof(T));
  } else {
    reduce_tiled<T, Op>(dst, in, k, n, finish.divisor);
  }
}

template <class T>
void scale(void* out, const void* in, size_t n, double factor) {
  using Acc = typename Traits<T>::Acc;
  T* const dst = static_cast<T*>(out);
  const T* const src = static_cast<const T*>(in);
  for (size_t i = 0; i < n; ++i)
    put(dst + i,
        Traits<T>::store(static_cast<Acc>(static_cast<Acc>(factor) * Traits<T>::load(get(src + i)))));
}
template <class Real>
void scale_complex(void* out, const void* in, size_t n, double factor) {
  scale<Real>(out, in, 2 * n, factor);
}

// ---- the table -------------------------------------------------------------------------------------

template <class T>
void add_integer(ReduceKernel* row) {
  row[static_cast<size_t>(ReduceOp::kSum)] = reduce<T, Sum<T>>;
  row[static_cast<size_t>(ReduceOp::kProduct)] = reduce<T, Product<T>>;
  row[static_cast<size_t>(ReduceOp::kMin)] = reduce<T, Min<T>>;
  row[static_cast<size_t>(ReduceOp::kMax)] = reduce<T, Max<T>>;
  row[static_cast<size_t>(ReduceOp::kBand)] = reduce<T, Band<T>>;
  row[static_cast<size_t>(ReduceOp::kBor)] = reduce<T, Bor<T>>;
  row[static_cast<size_t>(ReduceOp::kBxor)] = reduce<T, Bxor<T>>;
}
// bool: SUM is "any", PRODUCT is "all", as NumPy's + and * on booleans.
void add_bool(ReduceKernel* row) {
  add_integer<Bool>(row);
  row[static_cast<size_t>(ReduceOp::kSum)] = reduce<Bool, Bor<Bool>>;
  row[static_cast<size_t>(ReduceOp::kProduct)] = reduce<Bool, Band<Bool>>;
}
template <class T>
void add_complex(ReduceKernel* row) {
  row[static_cast<size_t>(ReduceOp::kSum)] = reduce<T, Sum<T>>;
  row[static_cast<size_t>(ReduceOp::kAvg)] = reduce<T, Sum<T>>;
  row[static_cast<size_t>(ReduceOp::kPremulSum)] = reduce<T, Sum<T>>;
  row[static_cast<size_t>(ReduceOp::kProduct)] = reduce<T, Product<T>>;
}
template <class T>
void add_float(ReduceKernel* row) {
  add_complex<T>(row);
  row[static_cast<size_t>(ReduceOp::kMin)] = reduce<T, Min<T>>;
  row[static_cast<size_t>(ReduceOp::kMax)] = reduce<T, Max<T>>;
}

KernelTable make_table() {
  KernelTable table{};
  table.isa = UNISONO_STRING(UNISONO_ISA);
  table.copy = copy;
  const auto row = [&](DType dtype) { return table.reduce[static_cast<size_t>(dtype)]; };
  const auto scaler = [&](DType dtype) -> ScaleKernel& { return table.scale[static_cast<size_t>(dtype)]; };
  add_bool(row(DType::kBool));
  add_integer<uint8_t>(row(DType::kU8));
  add_integer<int8_t>(row(DType::kI8));
  add_integer<int16_t>(row(DType::kI16));
  add_integer<int32_t>(row(DType::kI32));
  add_integer<int64_t>(row(DType::kI64));
  add_float<F16>(row(DType::kF16));
  add_float<BF16>(row(DType::kBF16));
  add_float<float>(row(DType::kF32));
  add_float<double>(row(DType::kF64));
  add_complex<Complex<float>>(row(DType::kC64));
  add_complex<Complex<double>>(row(DType::kC128));
  scaler(DType::kF16) = scale<F16>;
  scaler(DType::kBF16) = scale<BF16>;
  scaler(DType::kF32) = scale<float>;
  scaler(DType::kF64) = scale<double>;
  scaler(DType::kC64) = scale_complex<float>;
  scaler(DType::kC128) = scale_complex<double>;
  return table;
}

}  // namespace

const KernelTable& UNISONO_CONCAT(kernels_, UNISONO_ISA)();
const KernelTable& UNISONO_CONCAT(kernels_, UNISONO_ISA)() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace unisono
