// The tensors of one operation: from a virtual GPU to the CPU kernel that computes it, and back.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace unisono::virtual_gpu {

// A CPU tensor that shares the memory of a tensor of a virtual GPU, without a copy. It keeps the memory
// alive, not the tensor.
at::Tensor host_view(const at::Tensor& x);

class HostArguments {
 public:
  // The CPU tensor for `x` in this operation; `x` itself if it is not on a GPU.
  at::Tensor to_host(const at::Tensor& x);
  // `host` is the CPU tensor for `device`, from an earlier call of to_host.
  void add(const at::Tensor& device, const at::Tensor& host);
  // The GPU tensor for a result: one of the arguments, a view of one, or a new tensor on `device`.
  at::Tensor to_device(at::Tensor result, c10::Device device);
  // The kernel may have resized its outputs: resizes the arguments likewise.
  void resize_arguments();

 private:
  struct TensorPair {
    at::Tensor device, host;
  };
  struct StoragePair {
    c10::Storage device, host;
  };
  at::Tensor dense_over(const at::Tensor& x);
  at::Tensor dense_back(at::Tensor result, c10::Device device);
  void resize_dense(const TensorPair& pair);
  const c10::Storage* device_of(const c10::StorageImpl* host) const;

  c10::SmallVector<TensorPair, 4> pairs_;
  c10::SmallVector<StoragePair, 4> storages_;
};

}  // namespace unisono::virtual_gpu
