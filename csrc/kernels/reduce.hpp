// Reductions over k inputs in one pass. The instruction set is chosen once, at start.
#pragma once

#include <cstddef>
#include <span>

#include "kernels/codec.hpp"
#include "kernels/dtype.hpp"

namespace unisono {

// The last step of a reduction, applied to the accumulated value before it is rounded and stored.
struct PostOperation {
  double divisor = 1.0;  // AVG: the number of ranks, on the step that completes the sum
};

// out[i] = ((in[0][i] op in[1][i]) op in[2][i]) ... for i < n; `out` may be any one of the inputs.
// 16-bit floats accumulate in f32 and round once. k >= 1; k == 1 copies (and divides).
using ReduceKernel = void (*)(void* out, const void* const* in, size_t k, size_t n, PostOperation finish);

// out[i] = factor * in[i]; `out` may be `in`.
using ScaleKernel = void (*)(void* out, const void* in, size_t n, double factor);

// As memcpy.
using CopyKernel = void (*)(void* out, const void* in, size_t nbytes);

// A function of the program's, in place of a kernel. All cuts of a buffer fall between its items.
class Combiner {
 public:
  // item: elements of an item.
  explicit Combiner(size_t item) : item_(item) {}
  virtual ~Combiner() = default;
  Combiner(const Combiner&) = delete;
  Combiner& operator=(const Combiner&) = delete;

  // As a ReduceKernel. False: a signal handler of this thread raised. Throws std::domain_error: it failed.
  virtual bool combine(void* out, const void* const* in, size_t k, size_t nbytes) const = 0;
  // The largest number of whole items within `numel` elements, but at least one.
  size_t whole_items(size_t numel) const { return numel < item_ ? item_ : numel / item_ * item_; }
  // Smaller chunks are not worth a call.
  static constexpr size_t kChunkBytes = 16 * 1024;
  // The elements of such a chunk. `itemsize`: of an element.
  size_t chunk(size_t itemsize) const { return whole_items(kChunkBytes / itemsize); }

 private:
  const size_t item_;
};

struct KernelTable {
  const char* isa;
  CopyKernel copy;
  // By stores that fetch no lines; what they write is visible before a later store of this thread.
  CopyKernel copy_nontemporal;
  ReduceKernel reduce[kDTypeCount][kReduceOpCount];  // nullptr: this pair has no meaning
  ScaleKernel scale[kDTypeCount];
  CodecKernels codecs[kCodecCount];
  AdamKernel adam;
};

// The table for this processor. Throws nothing; a missing pair is a nullptr in it.
const KernelTable& kernels();

// The tables that this processor can run, the slowest first.
std::span<const KernelTable* const> all_kernels();

// Whether (dtype, op) has a meaning: complex numbers have no order, floats no bits, integers no mean.
bool reducible(DType dtype, ReduceOp op);

}  // namespace unisono
