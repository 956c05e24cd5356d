#include "windows/window_cell.hpp"

#include <cstring>

#include "kernels/reduce.hpp"

namespace unisono {
namespace {

// A rank that wants a lock alone could wait for ever while others that share it come and go. So after a while
// newcomers wait for it, but only briefly: it may itself wait for a rank that waits for a newcomer.
constexpr Nanoseconds kLongWait = 10 * kMillisecond, kCourtesy = 20 * kMillisecond;

}  // namespace

bool WindowCell::take_lock(int rank, bool shared, bool patient) {
  if (exclusive.load(std::memory_order_relaxed) != 0) return false;
  if (!shared && sharers.load(std::memory_order_relaxed) != 0) return false;
  if (shared && patient && wanted.load(std::memory_order_relaxed) != 0) return false;
  if (shared) {
    peer(rank).shares.store(1, std::memory_order_relaxed);
    sharers.fetch_add(1, std::memory_order_relaxed);
  } else {
    exclusive.store(static_cast<uint32_t>(rank) + 1, std::memory_order_relaxed);
  }
  return true;
}

void WindowCell::drop_lock(int rank) {
  if (exclusive.load(std::memory_order_relaxed) == static_cast<uint32_t>(rank) + 1)
    exclusive.store(0, std::memory_order_relaxed);
  if (peer(rank).shares.exchange(0, std::memory_order_relaxed) != 0)
    sharers.fetch_sub(1, std::memory_order_relaxed);
}

int WindowCell::lock_holder() {
  const uint32_t alone = exclusive.load(std::memory_order_relaxed);
  for (int rank = 0; alone == 0 && rank < static_cast<int>(ranks); ++rank)
    if (peer(rank).shares.load(std::memory_order_relaxed) != 0) return rank;
  return static_cast<int>(alone) - 1;
}

bool WindowCell::exposes(uint64_t address, uint64_t nbytes) {
  for (uint32_t i = 0; i < exposed; ++i) {
    const uint64_t offset = address - memory()[i].address;
    if (offset <= memory()[i].nbytes && nbytes <= memory()[i].nbytes - offset) return true;
  }
  return false;
}

bool WindowCell::attach(uint64_t address, uint64_t nbytes) {
  if (exposed == most_exposed) return false;
  memory()[exposed++] = {address, nbytes};
  return true;
}

bool WindowCell::detach(uint64_t address) {
  for (uint32_t i = 0; i < exposed; ++i) {
    if (memory()[i].address != address) continue;
    memory()[i] = memory()[--exposed];
    return true;
  }
  return false;
}

void combine(void* target, DType dtype, uint32_t op, const void* operand, void* former, size_t numel) {
  const size_t nbytes = numel * itemsize(dtype);
  if (former != nullptr) std::memcpy(former, target, nbytes);
  if (op == kNoOp) return;
  if (op == kReplaceOp) return kernels().copy(target, operand, nbytes);
  const void* const in[2] = {target, operand};
  kernels().reduce[static_cast<size_t>(dtype)][op](target, in, 2, numel, {});
}

void WindowCell::let_go(GroupState& group) {
  held.store(0, std::memory_order_seq_cst);
  if (waiting.load(std::memory_order_seq_cst) == 0) return;
  for (int rank = 0; rank < group.ranks(); ++rank)
    if (group.on_this_host(rank)) notify(group.cell(rank).window_event);
}

LockAttempt::~LockAttempt() {
  if (wants_) cell_.wanted.fetch_sub(1, std::memory_order_relaxed);
}

bool LockAttempt::operator()(int& holder) {
  const bool taken = cell_.exclusive.load(std::memory_order_relaxed) != 0 ||
                     (!shared_ && cell_.sharers.load(std::memory_order_relaxed) != 0);
  const bool first = began_ == 0, crowd = taken || cell_.wanted.load(std::memory_order_relaxed) != 0;
  if (first && crowd) began_ = now_ns();
  if (!first && !shared_ && !wants_ && now_ns() > began_ + kLongWait) {
    wants_ = true;
    cell_.wanted.fetch_add(1, std::memory_order_relaxed);
  }
  const bool patient = crowd && now_ns() < began_ + kCourtesy;
  if (taken || !cell_.try_hold(rank_)) {
    const int found = taken ? cell_.lock_holder() : cell_.holder();
    holder = found < 0 ? holder : found;
    return false;
  }
  const bool got = cell_.take_lock(rank_, shared_, patient);
  cell_.let_go(group_);
  return got;
}

}  // namespace unisono
