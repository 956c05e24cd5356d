#include "checks.hpp"

#include <c10/core/ScalarType.h>

namespace unisono::virtual_gpu {
namespace {

using at::ScalarType;

bool integral(ScalarType t) { return at::isIntegralType(t, true); }
bool not_floating(ScalarType t) { return !at::isFloatingType(t); }
bool int64(ScalarType t) { return t == at::kLong; }
bool uint8(ScalarType t) { return t == at::kByte; }
bool half(ScalarType t) { return t == at::kHalf || t == at::kBFloat16; }

// Seen on an H200 with PyTorch 2.11: what each operator of PyTorch's own list takes there and on a CPU.
constexpr RefusedTypes kRefusedTypes[] = {
    {"aten::mm", integral, "addmm_cuda"},
    {"aten::addmm", integral, "addmm_cuda"},
    {"aten::addbmm", integral, "addmm_cuda"},
    {"aten::_addmm_activation", integral, "addmm_cuda"},
    {"aten::bmm", integral, "baddbmm_cuda"},
    {"aten::baddbmm", integral, "baddbmm_cuda"},
    {"aten::addmv", integral, "addmv_impl_cuda"},
    {"aten::dot", integral, "dot"},
    {"aten::vdot", integral, "dot"},
    {"aten::avg_pool2d", int64, "avg_pool2d_out_cuda_frame"},
    {"aten::avg_pool3d", int64, "avg_pool3d_out_cuda"},
    {"aten::max_pool2d_with_indices", integral, "max_pool2d_with_indices_out_cuda_frame"},
    {"aten::max_pool3d_with_indices", integral, "max_pool3d_with_indices_out_frame"},
    {"aten::upsample_bilinear2d", uint8, "upsample_bilinear2d_out_frame"},
    {"aten::_upsample_bilinear2d_aa", uint8, "upsample_bilinear2d_out_frame"},
    {"aten::upsample_bicubic2d", uint8, "upsample_bicubic2d_out_frame"},
    {"aten::angle", half, "angle_cuda"},
    {"aten::igamma", half, "igamma_cuda"},
    {"aten::igammac", half, "igammac_cuda"},
    {"aten::native_dropout_backward", not_floating, "masked_scale"},
};

}  // namespace

const RefusedTypes* refused_types(const std::string& operation) {
  std::string name = operation.substr(0, operation.rfind(".out"));
  if (name.back() == '_') name.pop_back();  // in place
  for (const RefusedTypes& row : kRefusedTypes)
    if (name == row.operation) return &row;
  return nullptr;
}

void check_type(const RefusedTypes& refused, const c10::IValue* arguments) {
  const at::Tensor& x = arguments[0].toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(x.numel() == 0 || !refused.refused(x.scalar_type()), '"', refused.kernel,
                              "\" not implemented for '", toString(x.scalar_type()), "'");
}

void check_normalization(const c10::IValue* arguments) {
  const ScalarType type = arguments[0].toTensor().scalar_type();
  for (int i : {2, 3}) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const ScalarType other = arguments[i].toTensor().scalar_type();
    TORCH_CHECK(other == type, "expected scalar type ", toString(type), " but found ", toString(other));
  }
}

}  // namespace unisono::virtual_gpu
