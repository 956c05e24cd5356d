// scaled_dot_product_attention: the CPU's fused kernel where a GPU takes a fused one, so that neither keeps
// L x L numbers a head. All else runs as PyTorch's matrix products and softmax.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/repeat_interleave_ops.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <mutex>

namespace unisono::virtual_gpu {
namespace {

using at::Tensor;

// A tensor with values, or one that stands for them in a dry run; no other subclass of Python's: DTensor has
// rules for a GPU's operations only.
bool is_plain(const Tensor& x) {
  if (!x.unsafeGetTensorImpl()->is_python_dispatch()) return true;
  return x.has_storage() && x.storage().device().is_meta();
}

// Whether a mask has the last two or all of these sizes, or 1 in their place.
bool fits(const Tensor& mask, std::array<int64_t, 4> sizes) {
  const int64_t dims = mask.dim();
  if (dims != 2 && dims != 4) return false;
  for (int64_t i = 0; i < dims; ++i)
    if (mask.size(i) != 1 && mask.size(i) != sizes[4 - dims + i]) return false;
  return true;
}

bool is_fused(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
              double dropout, bool causal, bool grouped) {
  const auto type = q.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  if (dropout != 0 || !(half || type == at::kFloat)) return false;
  for (const Tensor* x : {&q, &k, &v}) {
    if (x->dim() != 4 || x->scalar_type() != type || !x->is_cuda()) return false;
    if (x->layout() != at::kStrided || x->numel() == 0 || x->stride(3) != 1) return false;
  }
  if (q.size(0) != k.size(0) || k.size(0) != v.size(0) || k.size(1) != v.size(1)) return false;
  if (k.size(2) != v.size(2) || q.size(3) != k.size(3) || k.size(3) != v.size(3)) return false;
  if (causal && q.size(2) != k.size(2)) return false;
  if (q.size(1) != k.size(1) && !(grouped && half && q.size(1) % k.size(1) == 0)) return false;
  if (!mask || !mask->defined()) return true;
  const bool typed = mask->scalar_type() == at::kBool || mask->scalar_type() == type;
  return typed && !causal && !mask->requires_grad() && mask->is_cuda() &&
         fits(*mask, {q.size(0), q.size(1), q.size(2), k.size(2)});
}

// PyTorch asks the driver which fused kernel it may take, unless all are switched off. The switches are those
// of the process: the first of several threads switches them off, and the last one gives them back.
class MathOnly {
 public:
  MathOnly() {
    const std::lock_guard lock(shared().mutex);
    if (shared().threads++ > 0) return;
    const at::Context& now = at::globalContext();
    shared().kept = {now.userEnabledFlashSDP(), now.userEnabledMemEfficientSDP(), now.userEnabledCuDNNSDP()};
    set({false, false, false});
  }
  ~MathOnly() {
    const std::lock_guard lock(shared().mutex);
    if (--shared().threads == 0) set(shared().kept);
  }
  MathOnly(const MathOnly&) = delete;
  MathOnly& operator=(const MathOnly&) = delete;

 private:
  struct Switches {
    bool flash, efficient, cudnn;
  };
  struct Shared {
    std::mutex mutex;
    int threads = 0;
    Switches kept{};
  };
  static Shared& shared() {
    static auto* const made = new Shared();
    return *made;
  }
  static void set(Switches to) {
    at::globalContext().setSDPUseFlash(to.flash);
    at::globalContext().setSDPUseMemEfficient(to.efficient);
    at::globalContext().setSDPUseCuDNN(to.cudnn);
  }
};

// With the operations of a GPU, which virtual/attention.py computes.
Tensor of_subclass(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                   bool causal, std::optional<double> scale) {
  const bool masked = mask && mask->defined();
  if (!masked && q.scalar_type() != at::kFloat)
    return std::get<0>(
        at::_ops::_scaled_dot_product_flash_attention::call(q, k, v, 0.0, causal, false, scale));
  const bool gradients =
      at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad());
  return std::get<0>(
      at::_ops::_scaled_dot_product_efficient_attention::call(q, k, v, mask, gradients, 0.0, causal, scale));
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                 double dropout, bool causal, std::optional<double> scale, bool grouped) {
  if (!is_fused(q, k, v, mask, dropout, causal, grouped)) {
    const MathOnly products;
    return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, grouped);
  }
  if (!is_plain(q) || !is_plain(k) || !is_plain(v)) return of_subclass(q, k, v, mask, causal, scale);
  const int64_t shared = q.size(1) / k.size(1);  // heads of queries that share one of keys
  const auto repeated = [&](const Tensor& x) {
    return shared == 1 ? x : at::_ops::repeat_interleave_self_int::call(x, shared, 1, std::nullopt);
  };
  std::optional<Tensor> added = mask;  // the fused kernel adds its mask
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_ops::_scaled_dot_product_flash_attention_for_cpu::call(
      q, repeated(k), repeated(v), dropout, causal, added, scale));
}

}  // namespace

// Call after PyTorch has registered all its operations.
void register_attention() {
  using c10::DispatchKey;
  static std::array<torch::Library, 2> libraries{
      torch::Library(torch::Library::IMPL, "aten", DispatchKey::AutogradCUDA, __FILE__, __LINE__),
      torch::Library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__)};
  for (torch::Library& library : libraries) library.impl("scaled_dot_product_attention", &attention);
}

}  // namespace unisono::virtual_gpu
