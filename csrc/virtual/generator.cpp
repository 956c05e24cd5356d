#include "generator.hpp"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <vector>

#include "device.hpp"
#include "memory_account.hpp"

namespace unisono::virtual_gpu {

namespace {

constexpr uint64_t kStep = 4;  // Philox produces four numbers at a time
constexpr int64_t kStateBytes = 16;

// splitmix64. With offset 0 the seed does not change: the first numbers are those of the CPU.
uint64_t mixed(uint64_t seed, uint64_t offset) {
  if (offset == 0) return seed;
  uint64_t z = seed + offset * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

}  // namespace

VirtualGenerator::VirtualGenerator(c10::DeviceIndex device, uint64_t seed)
    : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
      seed_(seed),
      numbers_(at::detail::createCPUGenerator(seed)) {}

void VirtualGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void VirtualGenerator::set_offset(uint64_t offset) {
  TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4");
  offset_ = offset;
}

uint64_t VirtualGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom(true));
  return seed_;
}

c10::intrusive_ptr<c10::TensorImpl> VirtualGenerator::get_state() const {
  at::TensorBase state = at::detail::empty_cpu({kStateBytes}, at::kByte);
  auto* const bytes = static_cast<uint8_t*>(state.mutable_data_ptr());
  std::memcpy(bytes, &seed_, sizeof seed_);
  std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
  return state.getIntrusivePtr();
}

void VirtualGenerator::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  const int64_t nbytes = state.numel();
  TORCH_CHECK(nbytes == kStateBytes || nbytes == 8, "RNG state is wrong size");
  const auto* const bytes = static_cast<const uint8_t*>(state.data());
  uint64_t offset = 0;
  std::memcpy(&seed_, bytes, sizeof seed_);
  if (nbytes == kStateBytes) std::memcpy(&offset, bytes + sizeof seed_, sizeof offset);
  set_offset(offset);
}

VirtualGenerator* VirtualGenerator::clone_impl() const {
  auto* const copy = new VirtualGenerator(device().index(), seed_);
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& VirtualGenerator::next() {
  numbers_.set_current_seed(mixed(seed_, offset_));
  offset_ += kStep;
  return numbers_;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const made = [] {
    auto* const all = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; ++i)
      all->push_back(at::make_generator<VirtualGenerator>(static_cast<c10::DeviceIndex>(i)));
    return all;
  }();
  const c10::DeviceIndex index = device < 0 ? current_device() : device;
  TORCH_CHECK(index < device_count(), "Invalid device index: ", static_cast<int>(index));
  return (*made)[index];
}

VirtualGenerator& checked(const at::Generator& given) {
  TORCH_CHECK(given.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              given.device().type(), "'");
  return *static_cast<VirtualGenerator*>(given.unsafeGetGeneratorImpl());
}

}  // namespace unisono::virtual_gpu
