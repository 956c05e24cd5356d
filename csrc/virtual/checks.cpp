#include "checks.hpp"

#include <ATen/core/op_registration/adaption.h>

#include <optional>
#include <string_view>
#include <unordered_map>

namespace unisono::virtual_gpu {

using at::Tensor;
using c10::Device;
using c10::IValue;

namespace {

struct OperationRow {
  const char *name, *method;
  bool iterator;
};
// From native_functions.yaml of the installed PyTorch, by unisono.virtual.build.
constexpr OperationRow kRows[] = {
#include "cuda_operations.inc"
};

// Calls f(tensor, index of the argument) for every tensor, also those in lists.
template <typename F>
void each_tensor(const torch::jit::Stack& stack, size_t base, size_t count, F f) {
  for (size_t i = 0; i < count; ++i) {
    const IValue& value = stack[base + i];
    if (value.isTensor()) {
      if (value.toTensor().defined()) f(value.toTensor(), i);
    } else if (value.isTensorList()) {
      for (const Tensor& x : value.toTensorList())
        if (x.defined()) f(x, i);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& x : value.toOptionalTensorList())
        if (x && x->defined()) f(*x, i);
    }
  }
}

[[noreturn]] void two_devices(Device common, Device other) {
  C10_THROW_ERROR(Error,
                  c10::str("Expected all tensors to be on the same device, but found at least two devices, ",
                           common, " and ", other, "!"));
}

// As TensorIterator does: a zero-dimensional CPU tensor is accepted.
void check_iterator(const ArgumentChecks& op, const torch::jit::Stack& stack, size_t base, size_t count) {
  std::optional<Device> common;
  bool other = false;
  each_tensor(stack, base, count, [&](const Tensor& x, size_t) {
    const Device device = x.device();
    if (!common && !device.is_cpu()) common = device;
    other = other || device.is_cpu() || device != *common;
  });
  if (!other || !common) return;
  each_tensor(stack, base, count, [&](const Tensor& x, size_t i) {
    if (x.device() == *common || (x.is_cpu() && x.dim() == 0 && !op.written[i])) return;
    two_devices(*common, x.device());
  });
}

void check_each(const ArgumentChecks& op, const torch::jit::Stack& stack, size_t base, size_t count) {
  std::optional<Device> common;
  each_tensor(stack, base, count, [&](const Tensor& x, size_t i) {
    c10::impl::check_and_update_common_device(common, x, op.method.c_str(), op.arguments[i].c_str());
  });
}

void check_index(const torch::jit::Stack& stack, size_t base, size_t count) {
  const Device self = stack[base].toTensor().device();
  each_tensor(stack, base, count, [&](const Tensor& x, size_t i) {
    if (i == 1) {
      TORCH_CHECK(x.is_cpu() || x.device() == self, "indices should be either on ", at::kCPU,
                  " or on the same device as the indexed tensor (", self, ")");
    } else if (x.device() != self && (x.dim() > 0 || !x.is_cpu())) {
      two_devices(self, x.device());
    }
  });
}

void check_convolution(const ArgumentChecks& op, const torch::jit::Stack& stack, size_t base, size_t count) {
  const char* const names[] = {"weight", "bias"};
  const bool backward = op.method.find("backward") != std::string::npos;
  const Tensor& input = stack[base].toTensor();
  for (size_t i = 1; i < (backward ? 1 : 3); ++i) {
    if (!stack[base + i].isTensor()) continue;
    const Tensor& x = stack[base + i].toTensor();
    TORCH_CHECK(!x.defined() || input.options().type_equal(x.options()), "Input type (", input.toString(),
                ") and ", names[i - 1], " type (", x.toString(), ") should be the same");
  }
  check_each(op, stack, base, count);
  TORCH_CHECK(input.scalar_type() != at::kLong, "getCudnnDataTypeFromScalarType() not supported for Long");
  TORCH_CHECK(!at::isIntegralType(input.scalar_type(), true),
              "GET was unable to find an engine to execute this computation");
}

}  // namespace

void ArgumentChecks::operator()(const torch::jit::Stack& stack, size_t base, size_t count) const {
  switch (kind) {
    case kNone:
      return;
    case kEach:
      return check_each(*this, stack, base, count);
    case kIndex:
      return check_index(stack, base, count);
    case kConvolution:
      return check_convolution(*this, stack, base, count);
    case kIterator:
      return check_iterator(*this, stack, base, count);
  }
}

CudaKernelEntry entry_of(const std::string& full_name) {
  static const auto rows = [] {
    std::unordered_map<std::string_view, const OperationRow*> made;
    for (const OperationRow& row : kRows) made.emplace(row.name, &row);
    return made;
  }();
  const auto found = rows.find(full_name);
  if (found == rows.end()) return {false, true, ""};
  return {true, found->second->iterator, found->second->method};
}

}  // namespace unisono::virtual_gpu
