#include "checks.hpp"

#include <ATen/Context.h>
#include <ATen/core/Reduction.h>

#include <string_view>
#include <unordered_map>

namespace unisono::virtual_gpu {

using c10::IValue;

namespace {

bool accumulates(const IValue* given) { return given[3].toBool(); }  // otherwise the CPU's kernel raises
bool has_weights(const IValue* given) { return given[1].isTensor() && given[1].toTensor().defined(); }
bool is_floating(const IValue* given) { return given[0].toTensor().is_floating_point(); }
bool reduces(const IValue* given) { return given[3].toInt() != at::Reduction::None; }
bool multiplies(const IValue* given) { return given[4].toStringView() == "multiply"; }
bool is_product(const IValue* given) { return given[4].toStringView() == "prod"; }
bool is_maximum(const IValue& mode) { return mode.toInt() == 2; }
bool takes_maximum(const IValue* given) { return is_maximum(given[7]); }
bool takes_maximum_of_bags(const IValue* given) { return is_maximum(given[8]); }

// The calls of `alertNotDeterministic` in the CUDA kernels of PyTorch 2.12 to 2.15, which are the same but
// for cuDNN's. The kernels of max_unpool, and of put_ without accumulate, raise by themselves, on the CPU,
// too. Matrix products, cumsum, kthvalue and reflection_pad2d raise in none of these versions. A row
// without an overload holds for each overload that has no row.
constexpr NondeterministicKernel kRefused[] = {
    {"aten::_adaptive_avg_pool2d_backward", "adaptive_avg_pool2d_backward_cuda"},
    {"aten::_adaptive_avg_pool3d_backward", "adaptive_avg_pool3d_backward_cuda"},
    {"aten::adaptive_avg_pool3d_backward.grad_input", "adaptive_avg_pool3d_backward_out_cuda"},
    {"aten::adaptive_max_pool2d_backward", "adaptive_max_pool2d_backward_cuda"},
    {"aten::avg_pool3d_backward", "avg_pool3d_backward_cuda"},
    {"aten::max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward_cuda"},
    {"aten::max_pool3d_with_indices_backward.grad_input", "max_pool3d_with_indices_backward_out_cuda"},
    {"aten::fractional_max_pool2d_backward", "fractional_max_pool2d_backward_cuda"},
    {"aten::fractional_max_pool3d_backward", "fractional_max_pool3d_backward_cuda"},
    {"aten::fractional_max_pool3d_backward.grad_input", "fractional_max_pool3d_backward_out_cuda"},
    {"aten::reflection_pad1d_backward", "reflection_pad1d_backward_out_cuda"},
    {"aten::reflection_pad3d_backward", "reflection_pad3d_backward_out_cuda"},
    {"aten::replication_pad1d_backward", "replication_pad1d_backward_cuda"},
    {"aten::replication_pad2d_backward", "replication_pad2d_backward_cuda"},
    {"aten::replication_pad2d_backward.grad_input", "replication_pad2d_backward_out_cuda"},
    {"aten::replication_pad3d_backward", "replication_pad3d_backward_cuda"},
    {"aten::replication_pad3d_backward.grad_input", "replication_pad3d_backward_out_cuda"},
    {"aten::upsample_linear1d_backward", "upsample_linear1d_backward_out_cuda"},
    {"aten::upsample_bilinear2d_backward", "upsample_bilinear2d_backward_out_cuda"},
    {"aten::_upsample_bilinear2d_aa_backward", "upsample_bilinear2d_aa_backward_out_cuda"},
    {"aten::upsample_bicubic2d_backward", "upsample_bicubic2d_backward_out_cuda"},
    {"aten::_upsample_bicubic2d_aa_backward", "upsample_bicubic2d_aa_backward_out_cuda"},
    {"aten::upsample_trilinear3d_backward", "upsample_trilinear3d_backward_out_cuda"},
    {"aten::grid_sampler_2d_backward", "grid_sampler_2d_backward_cuda"},
    {"aten::grid_sampler_3d_backward", "grid_sampler_3d_backward_cuda"},
    {"aten::_ctc_loss_backward", "ctc_loss_backward_gpu"},
    {"aten::nll_loss2d_forward", "nll_loss2d_forward_out_cuda_template", reduces},
    {"aten::_embedding_bag_backward", "embedding_bag_backward_cuda_max", takes_maximum_of_bags},
    {"aten::_embedding_bag_dense_backward", "embedding_bag_backward_cuda_max", takes_maximum},
    {"aten::median.dim_values", "median CUDA with indices output"},
    {"aten::nanmedian.dim_values", "median CUDA with indices output"},
    {"aten::histc", "_histc_cuda with floating point input", is_floating},
    {"aten::bincount", "_bincount_cuda", has_weights},
    {"aten::put_", "put_", accumulates},
    {"aten::index_reduce", "index_reduce_cuda"},
    {"aten::index_reduce_", "index_reduce_cuda"},
    {"aten::scatter.reduce", "scatter_reduce_cuda_kernel", multiplies},
    {"aten::scatter_.reduce", "scatter_reduce_cuda_kernel", multiplies},
    {"aten::scatter.reduce_out", "scatter_reduce_cuda_kernel", multiplies},
    {"aten::scatter_reduce.two", "scatter_reduce_cuda_prod_", is_product},
    {"aten::scatter_reduce_.two", "scatter_reduce_cuda_prod_", is_product},
    {"aten::scatter_reduce.two_out", "scatter_reduce_cuda_prod_", is_product},
};

}  // namespace

const NondeterministicKernel* nondeterministic(const std::string& full_name) {
  static const auto rows = [] {
    std::unordered_map<std::string_view, const NondeterministicKernel*> made;
    for (const NondeterministicKernel& row : kRefused) made.emplace(row.operation, &row);
    return made;
  }();
  auto found = rows.find(full_name);
  if (found == rows.end()) found = rows.find(std::string_view(full_name).substr(0, full_name.find('.')));
  return found == rows.end() ? nullptr : found->second;
}

void check_deterministic(const NondeterministicKernel& op, const IValue* given) {
  const at::Context& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && (!op.when || op.when(given)))
    settings.alertNotDeterministic(op.kernel);
}

}  // namespace unisono::virtual_gpu
