#include "host_arguments.hpp"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/CPUAllocator.h>

#include "device.hpp"
#include "memory.hpp"

namespace unisono::virtual_gpu {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;
using c10::TensorImpl;

namespace {

void drop_storage(void* context) {
  c10::intrusive_ptr<StorageImpl>::reclaim(static_cast<StorageImpl*>(context));
}

// Another storage with the same memory, which it keeps alive.
DataPtr shared(const Storage& of, Device device) {
  void* const at = of.unsafeGetStorageImpl()->mutable_data();
  auto owner = of.getWeakStorageImpl().lock();
  return {at, owner.release(), &drop_storage, device};
}

Storage host_storage(const Storage& of) {
  return Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), of.nbytes(),
                                                  shared(of, Device(c10::kCPU)), c10::GetCPUAllocator(),
                                                  true));
}

Tensor tensor_over(Storage storage, DispatchKey key, const Tensor& like) {
  Tensor made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

at::SparseTensorImpl* coo(const Tensor& x) {
  return static_cast<at::SparseTensorImpl*>(x.unsafeGetTensorImpl());
}
at::SparseCsrTensorImpl* compressed(const Tensor& x) {
  return static_cast<at::SparseCsrTensorImpl*>(x.unsafeGetTensorImpl());
}

bool is_compressed(const Tensor& x) {
  const c10::Layout layout = x.layout();
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

// A sparse tensor on a device, whose parts are `part` of those of `x`.
template <typename F>
Tensor with_parts(const Tensor& x, Device device, F part) {
  if (x.is_sparse()) {
    const DispatchKey key = device.is_cuda() ? DispatchKey::SparseCUDA : DispatchKey::SparseCPU;
    Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(key), x.dtype());
    coo(made)->raw_resize_(coo(x)->sparse_dim(), coo(x)->dense_dim(), x.sizes());
    coo(made)->set_indices_and_values_unsafe(part(coo(x)->indices()), part(coo(x)->values()));
    coo(made)->set_coalesced(coo(x)->coalesced());
    return made;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_compressed(x), "A virtual GPU has no tensors of layout ", x.layout(),
                              ". See python -m pydoc unisono.virtual.");
  const DispatchKey key = device.is_cuda() ? DispatchKey::SparseCsrCUDA : DispatchKey::SparseCsrCPU;
  Tensor made =
      at::detail::make_tensor<at::SparseCsrTensorImpl>(DispatchKeySet(key), device, x.layout(), x.dtype());
  compressed(made)->set_member_tensors(part(compressed(x)->compressed_indices()),
                                       part(compressed(x)->plain_indices()), part(compressed(x)->values()),
                                       x.sizes());
  return made;
}

}  // namespace

Tensor host_view(const Tensor& x) {
  if (!x.is_cuda()) return x;
  return HostArguments().to_host(x);
}

const Storage* HostArguments::device_of(const StorageImpl* host) const {
  for (const StoragePair& each : storages_)
    if (each.host.unsafeGetStorageImpl() == host) return &each.device;
  return nullptr;
}

Tensor HostArguments::to_host(const Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  for (const TensorPair& pair : pairs_)
    if (pair.device.is_same(x)) return pair.host;
  Tensor host = x.layout() == c10::kStrided
                    ? dense_over(x)
                    : with_parts(x, Device(c10::kCPU), [this](const Tensor& part) { return to_host(part); });
  pairs_.push_back({x, host});
  return host;
}

void HostArguments::add(const Tensor& device, const Tensor& host) {
  if (!device.is_cuda()) return;
  pairs_.push_back({device, host});
  if (!device_of(host.storage().unsafeGetStorageImpl()))
    storages_.push_back({device.storage(), host.storage()});
}

// Tensors that share a storage also share one on the CPU: kernels check it to see whether tensors overlap.
Tensor HostArguments::dense_over(const Tensor& x) {
  const Storage& device = x.storage();
  for (const StoragePair& each : storages_)
    if (each.device.is_alias_of(device)) return tensor_over(each.host, DispatchKey::CPU, x);
  storages_.push_back({device, host_storage(device)});
  return tensor_over(storages_.back().host, DispatchKey::CPU, x);
}

Tensor HostArguments::to_device(Tensor result, Device device) {
  if (!result.defined() || !result.is_cpu()) return result;
  for (const TensorPair& pair : pairs_)
    if (pair.host.is_same(result)) return pair.device;
  if (result.layout() == c10::kStrided) return dense_back(std::move(result), device);
  return with_parts(result, device, [&](const Tensor& part) { return to_device(part, device); });
}

Tensor HostArguments::dense_back(Tensor result, Device device) {
  StorageImpl* const host = result.storage().unsafeGetStorageImpl();
  if (const Storage* const of = device_of(host)) return tensor_over(Storage(*of), DispatchKey::CUDA, result);
  if (result.use_count() == 1 && result.storage().use_count() == 1) {  // no other owner: no copy
    adopt(*host, device);
    TensorImpl* const impl = result.unsafeGetTensorImpl();
    impl->_change_backend_component_keys(device);
    impl->set_storage_keep_dtype(Storage(impl->storage()));
    return result;
  }
  Storage made = host_storage(result.storage());
  adopt(*made.unsafeGetStorageImpl(), device);
  storages_.push_back({made, result.storage()});
  return tensor_over(std::move(made), DispatchKey::CUDA, result);
}

void HostArguments::resize_dense(const TensorPair& pair) {
  TensorImpl* const device = pair.device.unsafeGetTensorImpl();
  const TensorImpl* const host = pair.host.unsafeGetTensorImpl();
  StorageImpl* const memory = device->unsafe_storage().unsafeGetStorageImpl();
  StorageImpl* const written = host->unsafe_storage().unsafeGetStorageImpl();
  if (written->data() != memory->data() || written->nbytes() != memory->nbytes()) {
    const Storage fresh = host_storage(host->unsafe_storage());
    adopt(*fresh.unsafeGetStorageImpl(), pair.device.device());
    memory->set_data_ptr_noswap(fresh.unsafeGetStorageImpl()->set_data_ptr(DataPtr()));
    memory->set_nbytes(written->nbytes());
  }
  if (host->sizes() != device->sizes() || host->strides() != device->strides() ||
      host->storage_offset() != device->storage_offset())
    device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
}

void HostArguments::resize_arguments() {
  for (size_t i = 0; i < pairs_.size(); ++i) {  // sparse tensors add pairs
    const TensorPair pair = pairs_[i];
    if (pair.device.layout() == c10::kStrided) {
      resize_dense(pair);
    } else if (pair.device.is_sparse()) {
      auto *const device = coo(pair.device), *const host = coo(pair.host);
      const Tensor indices = to_device(host->indices(), pair.device.device());
      const Tensor values = to_device(host->values(), pair.device.device());
      device->raw_resize_(host->sparse_dim(), host->dense_dim(), host->sizes());
      device->set_indices_and_values_unsafe(indices, values);
      device->set_coalesced(host->coalesced());
    } else {
      auto *const device = compressed(pair.device), *const host = compressed(pair.host);
      const Device where = pair.device.device();
      device->set_member_tensors(to_device(host->compressed_indices(), where),
                                 to_device(host->plain_indices(), where), to_device(host->values(), where),
                                 pair.host.sizes());
    }
  }
}

}  // namespace unisono::virtual_gpu
