// The reduction kernels, written once and compiled once per instruction set (see CMakeLists.txt).
// Everything except the table has internal linkage, so that the linker cannot mix compilations: an inline
// function with AVX-512 must never be linked into the base build.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/reduce.hpp"
#include "kernels/reduce_elements.hpp"

#ifndef UNISONO_ISA
#define UNISONO_ISA base
#endif
#define UNISONO_CONCAT2(a, b) a##b
#define UNISONO_CONCAT(a, b) UNISONO_CONCAT2(a, b)
#define UNISONO_STRING2(a) #a
#define UNISONO_STRING(a) UNISONO_STRING2(a)

namespace unisono {

// Defined by the compilation of codec_kernels.cpp for the same instruction set.
void UNISONO_CONCAT(add_codecs_, UNISONO_ISA)(KernelTable& table);

namespace {

// ---- operations on accumulated values --------------------------------------------------------------

template <class Real>
inline Complex<Real> operator+(Complex<Real> a, Complex<Real> b) {
  return {a.re + b.re, a.im + b.im};
}
// g++ 12 and newer make fused multiply-adds of a complex product, also where contraction is off; not of this.
template <class Real>
inline Real rounded(Real value) {
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(value);
#else
  return value;
#endif
}
template <class Real>
inline Complex<Real> operator*(Complex<Real> a, Complex<Real> b) {
  return {rounded(a.re * b.re) - rounded(a.im * b.im), rounded(a.re * b.im) + rounded(a.im * b.re)};
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
  static A apply(A a, A b) { return static_cast<A>(a + b); }
};
template <class T>
struct Product {
  using A = typename Traits<T>::Acc;
  static A apply(A a, A b) {
    if constexpr (sizeof(A) == 2)  // otherwise promoted to int, which does not wrap
      return static_cast<A>(static_cast<uint32_t>(a) * b);
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

// AVG is a sum that is divided at the end; integers have no mean.
template <class Op>
constexpr bool kDivides = false;
template <class T>
constexpr bool kDivides<Sum<T>> = !std::is_integral_v<typename Traits<T>::Acc>;

template <class A>
inline A divided(A value, double divisor) {
  return static_cast<A>(value / static_cast<A>(divisor));
}
template <class Real>
inline Complex<Real> divided(Complex<Real> value, double divisor) {
  return {value.re / static_cast<Real>(divisor), value.im / static_cast<Real>(divisor)};
}

// ---- loops -----------------------------------------------------------------------------------------

constexpr size_t kTile = 512;  // accumulators of one tile stay in the first-level cache

// out[i] = combine(i). `out` may be an input: each element is read before it is written, which g++ can
// vectorise. Clang does not vectorise a loop whose `out` may be an input, so whole blocks are read before
// they are written.
template <class T, class Combine>
void fill(T* out, size_t n, Combine combine) {
  size_t i = 0;
#ifdef __clang__
  constexpr size_t kBlock = sizeof(T) < 4 ? 128 / sizeof(T) : 32;  // measured
  for (T x[kBlock]; i + kBlock <= n; i += kBlock) {
    for (size_t j = 0; j < kBlock; ++j) x[j] = combine(i + j);
    std::memcpy(out + i, x, sizeof x);
  }
#endif
  UNISONO_INDEPENDENT
  for (size_t at = i; at < n; ++at) put(out + at, combine(at));
}

// Two or three inputs that need no widening: one pass, no tile.
template <class T, class Op>
void reduce_flat(T* out, const T* a, const T* b, const T* c, size_t n) {
  if (const size_t first = lead(out, n)) {
    reduce_flat<T, Op>(out, a, b, c, first);
    out += first, a += first, b += first, n -= first;
    if (c != nullptr) c += first;
  }
  const auto at = [](const T* from, size_t i) { return Traits<T>::load(get(from + i)); };
  if (c == nullptr)
    fill(out, n, [=](size_t i) { return Traits<T>::store(Op::apply(at(a, i), at(b, i))); });
  else
    fill(out, n,
         [=](size_t i) { return Traits<T>::store(Op::apply(Op::apply(at(a, i), at(b, i)), at(c, i))); });
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
    if constexpr (kDivides<Op>)
      if (divisor != 1.0)
        for (size_t i = 0; i < m; ++i) acc[i] = divided(acc[i], divisor);
    store_tile<T>(out + start, acc, m);
  }
}

// Clang unrolls a block before it vectorises, and then does not vectorise it: its tiles are faster.
#ifdef __clang__
constexpr bool kUnrollsFirst = true;
#else
constexpr bool kUnrollsFirst = false;
#endif

template <class T>
constexpr bool kWidens = sizeof(T) != sizeof(typename Traits<T>::Acc);

// Two inputs that are widened: in blocks small enough to stay in registers.
template <class T, class Op>
void reduce_pair(T* out, const T* a, const T* b, size_t n) {
  constexpr size_t kBlock = 64;
  const auto tiled = [&](size_t from, size_t count) {
    const void* const in[] = {a + from, b + from};
    reduce_tiled<T, Op>(out + from, in, 2, count, 1.0);
  };
  size_t i = lead(out, n);
  tiled(0, i);
  for (typename Traits<T>::Acc x[kBlock], y[kBlock]; i + kBlock <= n; i += kBlock) {
    load_tile<T>(x, a + i, kBlock);
    load_tile<T>(y, b + i, kBlock);
    for (size_t j = 0; j < kBlock; ++j) x[j] = Op::apply(x[j], y[j]);
    store_tile<T>(out + i, x, kBlock);
  }
  tiled(i, n - i);
}

// Runs the special loop for two or three inputs; returns whether the type has one.
template <class T, class Op>
bool reduce_few(T* out, const void* const* in, size_t k, size_t n) {
  const auto input = [&](size_t j) { return static_cast<const T*>(in[j]); };
  if constexpr (kWidens<T>) {
    if (k != 2 || kUnrollsFirst) return false;
    reduce_pair<T, Op>(out, input(0), input(1), n);
  } else {
    if (k != 2 && k != 3) return false;
    reduce_flat<T, Op>(out, input(0), input(1), k == 3 ? input(2) : nullptr, n);
  }
  return true;
}

template <class T, class Op>
void reduce(void* out, const void* const* in, size_t k, size_t n, PostOperation finish) {
  T* const dst = static_cast<T*>(out);
  const bool divides = kDivides<Op> && finish.divisor != 1.0;
  if (!divides && k == 1) {
    if (out != in[0]) std::memcpy(out, in[0], n * sizeof(T));
  } else if (divides || !reduce_few<T, Op>(dst, in, k, n)) {
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

// Sums and products of signed integers wrap, as in NumPy: they are computed in the unsigned type.
template <class T>
void add_integer(ReduceKernel* row) {
  using Bits = std::make_unsigned_t<T>;
  row[static_cast<size_t>(ReduceOp::kSum)] = reduce<Bits, Sum<Bits>>;
  row[static_cast<size_t>(ReduceOp::kProduct)] = reduce<Bits, Product<Bits>>;
  row[static_cast<size_t>(ReduceOp::kMin)] = reduce<T, Min<T>>;
  row[static_cast<size_t>(ReduceOp::kMax)] = reduce<T, Max<T>>;
  row[static_cast<size_t>(ReduceOp::kBand)] = reduce<Bits, Band<Bits>>;
  row[static_cast<size_t>(ReduceOp::kBor)] = reduce<Bits, Bor<Bits>>;
  row[static_cast<size_t>(ReduceOp::kBxor)] = reduce<Bits, Bxor<Bits>>;
}
// bool: SUM is "any", PRODUCT is "all", as NumPy's + and * on booleans; so are MAX and MIN.
void add_bool(ReduceKernel* row) {
  for (const ReduceOp any : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor})
    row[static_cast<size_t>(any)] = reduce<Bool, Bor<Bool>>;
  for (const ReduceOp all : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand})
    row[static_cast<size_t>(all)] = reduce<Bool, Band<Bool>>;
  row[static_cast<size_t>(ReduceOp::kBxor)] = reduce<Bool, Bxor<Bool>>;
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
  table.copy_nontemporal = copy_nontemporal;
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
  UNISONO_CONCAT(add_codecs_, UNISONO_ISA)(table);
  return table;
}

}  // namespace

const KernelTable& UNISONO_CONCAT(kernels_, UNISONO_ISA)();
const KernelTable& UNISONO_CONCAT(kernels_, UNISONO_ISA)() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace unisono
