// Operations on memory, and those that PyTorch has for CUDA only.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_like_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/ones_like_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>

#include "device.hpp"
#include "generator.hpp"
#include "host_arguments.hpp"
#include "memory.hpp"

namespace unisono::virtual_gpu {
namespace {

using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;

constexpr int64_t kLooked = 1024;  // numbers that come to the host, such as those that a program prints
const DispatchKeySet kCuda(DispatchKey::CUDA);

Device target(std::optional<Device> device) { return resolved(device.value_or(Device(c10::kCUDA))); }

ScalarType type_or_default(std::optional<ScalarType> type) {
  return type.value_or(at::get_default_dtype_as_scalartype());
}

// The values of new memory: those of PyTorch's deterministic mode, otherwise the poison.
Tensor filled(at::TensorBase made) {
  const at::Context& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && settings.deterministicFillUninitializedMemory()) [[unlikely]] {
    Tensor result(std::move(made));
    return at::native::fill_empty_deterministic_(result);
  }
  poison(made.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl()->mutable_data(),
         made.storage().nbytes(), made.scalar_type());
  return Tensor(std::move(made));
}

void check_factory(std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "expected a strided layout");
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<at::Layout> layout,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_factory(layout, pin);
  const DeviceGuard on(target(device));
  return filled(at::detail::empty_generic(size, device_allocator(), kCuda, type_or_default(type), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type,
                     std::optional<at::Layout> layout, std::optional<Device> device,
                     std::optional<bool> pin) {
  check_factory(layout, pin);
  const DeviceGuard on(target(device));
  return filled(
      at::detail::empty_strided_generic(size, stride, device_allocator(), kCuda, type_or_default(type)));
}

// What a program reads number by number, such as a loss.
Scalar item(const Tensor& x) {
  const Tensor host = host_view(x);
  if (x.numel() == 1) warn_if_poison(host.const_data_ptr(), 1, x.scalar_type());
  return at::_ops::_local_scalar_dense::redispatch(DispatchKeySet(DispatchKey::CPU), host);
}

// Between any two devices, or a device and the host.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  const at::AutoDispatchBelowADInplaceOrView below;
  HostArguments arguments;
  Tensor to = arguments.to_host(self);
  at::_ops::copy_::redispatch(DispatchKeySet(DispatchKey::CPU), to, arguments.to_host(source), non_blocking);
  if (self.is_cpu() && self.numel() <= kLooked && self.is_contiguous())
    warn_if_poison(self.const_data_ptr(), self.numel(), self.scalar_type());
  return self;
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const DeviceGuard on(self.device());
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  const DeviceGuard on(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

Tensor& set_empty(Tensor& self) {
  const DeviceGuard on(self.device());
  Storage none(Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(none), 0, {0}, {});
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0)
    return {at::_ops::mul_Scalar::call(x, 1), at::_ops::ones_like::call(x, at::kBool, {}, {}, {}, {})};
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(x.scalar_type()), "\"fused_dropout\" not implemented for '",
                              toString(x.scalar_type()), "'");
  const Tensor mask = at::_ops::bernoulli__float::call(
      const_cast<Tensor&>(
          static_cast<const Tensor&>(at::_ops::empty_like::call(x, at::kBool, {}, {}, {}, {}))),
      1 - p, std::nullopt);
  Tensor scaled = at::_ops::mul_Scalar::call(x, p == 1 ? 0.0 : 1 / (1 - p));
  at::_ops::mul__Tensor::call(scaled, mask);  // in place: a GPU has no further memory here
  return {scaled, mask};
}

void record_stream(Tensor&, c10::Stream) {}  // no work is under way when a tensor is freed

// Python's UntypedStorage.resize_, also to fewer bytes: 0 frees the memory. `x`: any tensor with this
// storage.
void resize_storage(const Tensor& x, int64_t nbytes) {
  const DeviceGuard on(x.device());
  c10::StorageImpl* const storage = x.storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr fresh = device_allocator()->allocate(nbytes);
  const size_t kept = std::min<size_t>(nbytes, storage->nbytes());
  if (kept) std::memcpy(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

// The four softmax kernels: on CUDA they read half precision and write float, as autocast requires.
template <typename Op>
Tensor softmax(const Tensor& x, int64_t dim, bool half_to_float) {
  const at::AutoDispatchBelowADInplaceOrView below;
  HostArguments arguments;
  Tensor host = arguments.to_host(x);
  if (half_to_float) host = host.to(at::kFloat);
  return arguments.to_device(Op::redispatch(DispatchKeySet(DispatchKey::CPU), host, dim, false), x.device());
}
template <typename Op>
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim, ScalarType type) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor product;  // CUDA's kernel makes one of gradient and output: aten/src/ATen/native/cuda/SoftMax.cu
  if (std::is_same_v<Op, at::_ops::_softmax_backward_data>) product = at::empty_like(grad);
  HostArguments arguments;
  Tensor host = Op::redispatch(DispatchKeySet(DispatchKey::CPU), arguments.to_host(grad),
                               arguments.to_host(output), dim, grad.scalar_type());
  return arguments.to_device(host.scalar_type() == type ? std::move(host) : host.to(type), grad.device());
}

Tensor host(const Tensor& x) { return host_view(x); }

// What a kernel in Python without a deterministic implementation calls; `kernel` is the name on a GPU.
void alert(std::string_view kernel) { at::globalContext().alertNotDeterministic(kernel); }

// CPU tensors over the memory of tensors: those that share a storage share one there.
std::vector<Tensor> hosts(at::TensorList given) {
  HostArguments arguments;
  std::vector<Tensor> made;
  for (const Tensor& x : given) made.push_back(arguments.to_host(x));
  return made;
}

// The results of a graph that ran on `hosts` of `given`, on GPU `places[i]` or, for -1, the CPU. A graph for
// the CPU alone omits copies between devices, so a result may have the memory of a tensor of another device.
std::vector<Tensor> devices(at::TensorList given, at::TensorList hosts, at::TensorList results,
                            IntArrayRef places) {
  HostArguments arguments;
  std::map<const void*, Device> owners;
  for (size_t i = 0; i < given.size(); ++i) {
    owners.emplace(hosts[i].storage().unsafeGetStorageImpl(), given[i].device());
    arguments.add(given[i], hosts[i]);
  }
  std::vector<Tensor> made;
  for (size_t i = 0; i < results.size(); ++i) {
    const Device place = places[i] < 0 ? Device(c10::kCPU) : Device(c10::kCUDA, places[i]);
    Tensor x = results[i];
    if (owners.emplace(x.storage().unsafeGetStorageImpl(), place).first->second != place) x = x.clone();
    made.push_back(place.is_cuda() ? arguments.to_device(std::move(x), place) : x);
  }
  return made;
}

}  // namespace

// Call after PyTorch has registered all its operations.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize);
  library.impl("set_", &set_empty);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&at::native::set_));
  library.impl("set_.source_Tensor",
               static_cast<Tensor& (*)(Tensor&, const Tensor&)>(&at::native::set_tensor_));
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&at::native::view));
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("_softmax", &softmax<at::_ops::_softmax>);
  library.impl("_log_softmax", &softmax<at::_ops::_log_softmax>);
  library.impl("_softmax_backward_data", &softmax_backward<at::_ops::_softmax_backward_data>);
  library.impl("_log_softmax_backward_data", &softmax_backward<at::_ops::_log_softmax_backward_data>);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
}

TORCH_LIBRARY(unisono_virtual, m) {
  m.def("host(Tensor(a) x) -> Tensor(a)");
  m.def("hosts(Tensor(a)[] given) -> Tensor(a)[]");
  m.def("devices(Tensor[] given, Tensor[] hosts, Tensor(a)[] results, int[] places) -> Tensor(a)[]");
  m.def("resize_storage(Tensor x, int nbytes) -> ()");
  m.def("alert(str kernel) -> ()");
  m.def("generator(int gpu) -> Generator?");
}
TORCH_LIBRARY_IMPL(unisono_virtual, CUDA, m) {
  m.impl("host", &host);
  m.impl("resize_storage", &resize_storage);
}
TORCH_LIBRARY_IMPL(unisono_virtual, CompositeExplicitAutograd, m) {
  m.impl("hosts", &hosts);
  m.impl("devices", &devices);
  m.impl("alert", &alert);
  m.impl("generator", [](int64_t gpu) { return default_generator(static_cast<c10::DeviceIndex>(gpu)); });
}

}  // namespace unisono::virtual_gpu
