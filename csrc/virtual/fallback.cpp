#include "fallback.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>

#include "checks.hpp"
#include "device.hpp"
#include "generator.hpp"
#include "host_arguments.hpp"
#include "memory.hpp"

namespace unisono::virtual_gpu {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// Composite operations that choose among kernels by device: the CPU makes the choice.
constexpr std::string_view kWhole =
    " aten::convolution aten::convolution_backward aten::_convolution aten::convolution.out "
    "aten::convolution_backward.out aten::_convolution.out ";
// Operations that PyTorch has for the CPU only: attention.cpp calls them.
constexpr std::string_view kCpuOnly =
    " aten::_scaled_dot_product_flash_attention_for_cpu "
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward ";
// Operations with a kernel in kernels.cpp or attention.cpp.
constexpr std::string_view kOwn =
    " aten::copy_ aten::_local_scalar_dense aten::empty.memory_format aten::empty_strided aten::as_strided "
    "aten::view aten::_reshape_alias aten::resize_ aten::set_ aten::set_.source_Storage_storage_offset "
    "aten::native_dropout aten::scaled_dot_product_attention aten::set_.source_Tensor "
    "aten::set_.source_Storage aten::record_stream aten::_softmax aten::_log_softmax "
    "aten::_softmax_backward_data aten::_log_softmax_backward_data aten::_pin_memory aten::is_pinned ";
// Slow in float16 on a CPU: they run in float32 and are rounded once, as on a GPU.
constexpr std::string_view kProducts =
    " aten::mm aten::addmm aten::addmm_ aten::_addmm_activation aten::bmm aten::baddbmm aten::baddbmm_ "
    "aten::addbmm aten::addbmm_ aten::addmv aten::addmv_ aten::dot aten::convolution aten::_convolution "
    "aten::convolution_backward aten::convolution_overrideable ";

bool among(std::string_view words, const std::string& name) {
  return words.find(" " + name + " ") != std::string_view::npos;
}

// "aten::mm.out" -> true.
bool is_product(const std::string& name) {
  return name.find("dtype") == std::string::npos && among(kProducts, name.substr(0, name.find('.')));
}

bool is_cuda(const IValue& value) { return value.isDevice() && value.toDevice().is_cuda(); }

template <typename T>  // Tensor, std::optional<Tensor>
c10::List<T> to_host(HostArguments& arguments, const c10::List<T>& given) {
  c10::List<T> made;
  made.reserve(given.size());
  for (const std::optional<Tensor> x : given) made.push_back(x ? T(arguments.to_host(*x)) : T());
  return made;
}

ArgumentChecks checks_of(const std::string& name, const CudaKernelEntry& entry) {
  ArgumentChecks checks;
  checks.method = entry.method;
  if (name == "aten::index.Tensor" || name == "aten::_index_put_impl_" || name == "aten::index.Tensor_out") {
    checks.kind = ArgumentChecks::kIndex;
  } else if (among(kWhole, name)) {
    checks.kind = ArgumentChecks::kConvolution;
    checks.method = name.find("backward") == std::string::npos ? "wrapper_CUDA__cudnn_convolution"
                                                               : "wrapper_CUDA__cudnn_convolution_backward";
  } else {
    checks.kind = entry.iterator ? ArgumentChecks::kIterator : ArgumentChecks::kEach;
  }
  return checks;
}

// Half precision of one call as float32.
class WidenedArguments {
 public:
  // Widens the tensors, if all are float16.
  WidenedArguments(IValue* arguments, const std::vector<bool>& written) {
    for (size_t i = 0; i < written.size(); ++i)
      if (arguments[i].isTensor() && arguments[i].toTensor().defined() &&
          arguments[i].toTensor().scalar_type() != at::kHalf)
        return;
    for (size_t i = 0; i < written.size(); ++i) {
      if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
      Tensor half = arguments[i].toTensor();
      arguments[i] = half.to(at::kFloat);
      if (written[i]) written_.push_back({half, arguments[i].toTensor()});
      widened_ = true;
    }
  }
  void round_written() {
    for (auto& [half, wide] : written_) {
      if (half.sizes() != wide.sizes()) half.resize_(wide.sizes());
      half.copy_(wide);
    }
  }
  void round(IValue& result) {
    if (!widened_ || !result.isTensor() || !result.toTensor().defined()) return;
    for (const auto& [half, wide] : written_)
      if (wide.is_same(result.toTensor())) return void(result = half);
    result = result.toTensor().to(at::kHalf);
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> written_;
  bool widened_ = false;
};

// Operations whose weight and bias have the type of the input, on a GPU.
const std::string kNormalization = "aten::native_layer_norm";

class CpuKernel final : public c10::OperatorKernel {
 public:
  CpuKernel(const c10::FunctionSchema& schema, const std::string& name, DispatchKey key)
      : key_(key),
        checks_(checks_of(name, entry_of(name))),
        nondeterministic_(nondeterministic(name)),
        refused_(key == DispatchKey::CPU ? refused_types(name) : nullptr),
        normalizes_(name == kNormalization),
        multiplies_(is_product(name)) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::Argument& argument = schema.arguments()[i];
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      checks_.arguments.push_back(argument.name());
      checks_.written.push_back(written);
      writes_ = writes_ || written;
      const c10::Type* type = argument.type().get();
      if (const auto optional = argument.type()->cast<c10::OptionalType>())
        type = optional->getElementType().get();
      if (type->kind() == c10::TypeKind::GeneratorType) generator_ = static_cast<int>(i);
    }
    arguments_ = schema.arguments().size();
    results_ = schema.returns().size();
  }

  void operator()(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    const size_t base = stack->size() - arguments_;
    checks_(*stack, base, arguments_);
    if (nondeterministic_) check_deterministic(*nondeterministic_, &(*stack)[base]);
    if (refused_) check_type(*refused_, &(*stack)[base]);
    if (normalizes_) check_normalization(&(*stack)[base]);
    std::optional<Device> device;
    HostArguments arguments;
    for (size_t i = 0; i < arguments_; ++i) carry((*stack)[base + i], arguments, device);
    TORCH_CHECK(device || generator_ < 0 || !(*stack)[base + generator_].isGenerator(),
                "Expected a 'cpu' device type for generator but found 'cuda'");
    const Device where = device ? *device : Device(c10::kCUDA, current_device());
    {
      std::unique_lock<std::mutex> drawing;
      if (generator_ >= 0) drawing = seed((*stack)[base + generator_], where);
      run(op, stack, base);
    }
    if (writes_) arguments.resize_arguments();
    for (size_t i = stack->size() - results_; i < stack->size(); ++i) bring((*stack)[i], arguments, where);
  }

 private:
  void run(const OperatorHandle& op, Stack* stack, size_t base) try {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!multiplies_) return op.redispatchBoxed(DispatchKeySet(key_), stack);
    WidenedArguments arguments(&(*stack)[base], checks_.written);
    op.redispatchBoxed(DispatchKeySet(key_), stack);
    arguments.round_written();
    for (size_t i = stack->size() - results_; i < stack->size(); ++i) arguments.round((*stack)[i]);
  } catch (const c10::Error& error) {
    rethrow_out_of_memory(error);
    throw;
  }

  static void carry(IValue& value, HostArguments& arguments, std::optional<Device>& device) {
    if (value.isTensor()) {
      const Tensor& x = value.toTensor();
      if (!x.defined() || !x.is_cuda()) return;
      if (!device) device = x.device();
      value = arguments.to_host(x);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      for (const Tensor& x : list)
        if (!device && x.defined() && x.is_cuda()) device = x.device();
      value = to_host(arguments, list);
    } else if (value.isOptionalTensorList()) {
      value = to_host(arguments, value.toOptionalTensorList());
    } else if (is_cuda(value)) {
      device = resolved(value.toDevice());
      value = Device(c10::kCPU);
    }
  }

  static void bring(IValue& value, HostArguments& arguments, Device where) {
    if (value.isTensor()) {
      value = arguments.to_device(std::move(value).toTensor(), where);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      auto list = std::move(value).toTensorList().vec();
      for (Tensor& x : list) made.push_back(arguments.to_device(std::move(x), where));
      value = made;
    }
  }

  static std::unique_lock<std::mutex> seed(IValue& value, Device where) {
    const at::Generator given = value.isNone() ? default_generator(where.index()) : value.toGenerator();
    VirtualGenerator& ours = checked(given);
    std::unique_lock<std::mutex> lock(ours.mutex_);
    TORCH_CHECK(ours.device() == where, "Expected a '", where, "' generator device but found '",
                ours.device(), "'");
    value = ours.next();
    return lock;
  }

  DispatchKey key_;
  ArgumentChecks checks_;
  const NondeterministicKernel* nondeterministic_;  // nearly always nullptr
  const RefusedTypes* refused_;                     // likewise
  bool normalizes_, multiplies_;
  size_t arguments_, results_;
  int generator_ = -1;
  bool writes_ = false;
};

torch::Library& library(const OperatorHandle& op, DispatchKey key) {
  const std::string space(op.schema().getNamespace().value_or("aten"));
  static std::map<std::pair<std::string, DispatchKey>, std::unique_ptr<torch::Library>> made;
  auto& entry = made[{space, key}];
  if (!entry) entry = std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__);
  return *entry;
}

void register_on_cpu(const OperatorHandle& op, const std::string& name, DispatchKey from, DispatchKey to) {
  auto kernel = std::make_unique<CpuKernel>(op.schema(), name, to);
  library(op, from).impl(name.c_str(),
                         torch::CppFunction::makeFromBoxedFunctor<CpuKernel>(std::move(kernel)));
}

// In PyTorch's CUDA build: kernels that would need a real device.
void refuse(const OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "Could not run '", op.operator_name(),
      "' on a virtual GPU: it has a kernel in CUDA only. Give it CPU tensors or another "
      "operation; see python -m pydoc unisono.virtual.");
}

// Likewise: CUDA kernels of operations that PyTorch can also compose of others.
void compose(const OperatorHandle& op, Stack* stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU),
                     stack);  // the composite one: the CPU has no other
}

void register_operation(const OperatorHandle& op, const std::string& name) {
  const bool cpu = op.hasKernelForDispatchKey(DispatchKey::CPU);
  const bool cuda = op.hasKernelForDispatchKey(DispatchKey::CUDA);  // in PyTorch's CUDA build
  if (among(kWhole, name) || among(kCpuOnly, name) || (cpu && (cuda || entry_of(name).known)))
    register_on_cpu(op, name, DispatchKey::CUDA, DispatchKey::CPU);
  else if (cuda && op.hasComputedKernelForDispatchKey(DispatchKey::CPU))
    library(op, DispatchKey::CUDA).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&compose>());
  else if (cuda)
    library(op, DispatchKey::CUDA).impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&refuse>());
  if (op.hasKernelForDispatchKey(DispatchKey::SparseCPU))
    register_on_cpu(op, name, DispatchKey::SparseCUDA, DispatchKey::SparseCPU);
  if (op.hasKernelForDispatchKey(DispatchKey::SparseCsrCPU))
    register_on_cpu(op, name, DispatchKey::SparseCsrCUDA, DispatchKey::SparseCsrCPU);
}

// Calls f(operation, its name with the overload, its namespace) for all that have a schema.
template <typename F>
void each_operation(F f) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& each : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(each);
    if (op && op->hasSchema())
      f(*op, each.overload_name.empty() ? each.name : each.name + "." + each.overload_name,
        each.name.substr(0, each.name.find(':')));
  }
}

}  // namespace

void register_operations() {
  each_operation([](const OperatorHandle& op, const std::string& name, const std::string& space) {
    // fully_shard's operations: PyTorch's CUDA build has a kernel of its own for one of them.
    if ((space == "aten" || space == "fsdp") && !among(kOwn, name)) register_operation(op, name);
  });
}

void register_libraries(const std::string& in_python) {
  static std::set<std::string> seen;
  const bool first = seen.empty();  // PyTorch's own: those of c10d pass on to process groups
  each_operation([&](const OperatorHandle& op, const std::string& name, const std::string& space) {
    if (among(" aten fsdp prim unisono_virtual ", space) || !op.hasKernelForDispatchKey(DispatchKey::CUDA))
      return;
    if (among(in_python, op.operator_name().name) || !seen.insert(name).second) return;
    if (!first) register_operation(op, name);
  });
}

}  // namespace unisono::virtual_gpu
