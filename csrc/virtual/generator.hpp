// Random numbers of a virtual GPU: a seed and an offset, as in CUDA's Philox generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace unisono::virtual_gpu {

class VirtualGenerator final : public c10::GeneratorImpl {
 public:
  explicit VirtualGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // A CPU generator with the numbers for one operation. It is seeded again each time, with seed and offset:
  // a restored state (activation checkpointing) repeats the numbers. Hold the mutex while it is used.
  const at::Generator& next();

 private:
  VirtualGenerator* clone_impl() const override;
  uint64_t seed_, offset_ = 0;
  at::Generator numbers_;
};

const at::Generator& default_generator(c10::DeviceIndex device);
// The implementation of `given`. Raises PyTorch's error when it is not a virtual GPU's generator.
VirtualGenerator& checked(const at::Generator& given);

}  // namespace unisono::virtual_gpu
