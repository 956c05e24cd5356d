#include "protocol/shared_copy.hpp"

#include <algorithm>

#include "kernels/reduce.hpp"
#include "protocol/waiter.hpp"

namespace unisono {
namespace {

constexpr uint32_t kTimedEvery = 16;    // of the copies
constexpr uint32_t kOtherEvery = 128;   // the other way is tried: it is the slower one
constexpr double kForgotten = 1.0 / 4;  // of a cost that was lower than the last one
// After a non-temporal store the reader fetches lines from memory: the writer alone must gain this much.
constexpr double kGain = 3;

}  // namespace

void SharedCopy::copy_large(void* to, const void* from, size_t nbytes) {
  const uint32_t turn = copies_++;
  if (turn % kOtherEvery == kTimedEvery / 2)
    return timed(way_ == kCached ? kNontemporal : kCached, to, from, nbytes);
  if (turn % kTimedEvery == 0) return timed(way_, to, from, nbytes);
  (way_ == kCached ? kernels().copy : kernels().copy_nontemporal)(to, from, nbytes);
}

void SharedCopy::timed(Way way, void* to, const void* from, size_t nbytes) {
  const Nanoseconds began = now_ns();
  (way == kCached ? kernels().copy : kernels().copy_nontemporal)(to, from, nbytes);
  const double cost = static_cast<double>(now_ns() - began) / static_cast<double>(nbytes);
  double& known = cost_[way];
  // A thread that lost its core meanwhile says nothing.
  known = known == 0 || cost < known ? cost : known + std::min(cost - known, 3 * known) * kForgotten;
  if (cost_[kNontemporal] > 0) way_ = cost_[kCached] > kGain * cost_[kNontemporal] ? kNontemporal : kCached;
}

}  // namespace unisono
