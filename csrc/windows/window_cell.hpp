// What the ranks share of one rank's part of a window, beside its memory: who holds its locks, which memory
// it exposes, and what other ranks have signalled. It lies in its rank's arena, so that the ranks of its host
// change it directly. It starts as zeros.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "protocol/frames.hpp"
#include "protocol/group_state.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

// What one rank does at the window of another.
struct alignas(64) WindowPeer {
  std::atomic<uint64_t> posted, completed;  // its calls of post, and of complete, for this rank
  std::atomic<uint32_t> shares;             // whether it holds the lock with others
};

// Memory of the rank that others may use.
struct ExposedMemory {
  uint64_t address, nbytes;
};

struct alignas(kLineBytes) WindowCell {
  // Who updates, or changes the locks: 1 + its rank; 0: nobody. Held for the time of one update.
  std::atomic<uint32_t> held;
  std::atomic<uint32_t> waiting;    // threads that wait for `held` or the lock
  std::atomic<uint32_t> exclusive;  // 1 + the rank that holds the lock alone
  std::atomic<uint32_t> sharers;    // how many hold it together
  std::atomic<uint32_t> wanted;     // threads that have waited long to hold it alone
  uint32_t ranks, most_exposed, exposed;
  alignas(kLineBytes) std::atomic<uint64_t> fences;  // calls of fence that this rank has begun
  std::atomic<uint64_t> rounds[kWindowSignals - kFirstRound];
  alignas(kLineBytes) unsigned char rest[];  // WindowPeer by rank, then ExposedMemory

  static size_t bytes_needed(uint32_t ranks, uint32_t most_exposed) {
    return sizeof(WindowCell) + ranks * sizeof(WindowPeer) + most_exposed * sizeof(ExposedMemory);
  }
  WindowPeer& peer(int rank) { return reinterpret_cast<WindowPeer*>(rest)[rank]; }
  ExposedMemory* memory() { return reinterpret_cast<ExposedMemory*>(rest + ranks * sizeof(WindowPeer)); }

  bool try_hold(int rank) {
    uint32_t nobody = 0;
    return held.load(std::memory_order_relaxed) == 0 &&
           held.compare_exchange_strong(nobody, static_cast<uint32_t>(rank) + 1, std::memory_order_seq_cst);
  }
  int holder() const { return static_cast<int>(held.load(std::memory_order_relaxed)) - 1; }

  // Ends `try_hold`, and wakes the ranks of this host that wait.
  void let_go(GroupState& group);

  // ---- by the rank that holds it
  // Whether `rank` has got the lock. patient: it leaves the lock to others that have waited long.
  bool take_lock(int rank, bool shared, bool patient);
  void drop_lock(int rank);
  // A rank that has the lock, or -1.
  int lock_holder();
  bool exposes(uint64_t address, uint64_t nbytes);
  // False: there is no room, or no such memory.
  bool attach(uint64_t address, uint64_t nbytes);
  bool detach(uint64_t address);
};

// target[i] = target[i] op operand[i]; former: the values before, or nullptr.
void combine(void* target, DType dtype, uint32_t op, const void* operand, void* former, size_t numel);

// One rank's wait for a lock, from its beginning. A call tells whether it has got it, or who has it.
class LockAttempt {
 public:
  LockAttempt(GroupState& group, WindowCell& cell, int rank, bool shared)
      : group_(group), cell_(cell), rank_(rank), shared_(shared) {}
  ~LockAttempt();
  LockAttempt(const LockAttempt&) = delete;
  LockAttempt& operator=(const LockAttempt&) = delete;
  bool operator()(int& holder);

 private:
  GroupState& group_;
  WindowCell& cell_;
  const int rank_;
  const bool shared_;
  Nanoseconds began_ = 0;
  bool wants_ = false;
};

// Counts a thread that waits.
class CountedWait {
 public:
  explicit CountedWait(std::atomic<uint32_t>& count) : count_(count) { count_.fetch_add(1); }  // R2
  ~CountedWait() { count_.fetch_sub(1); }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

 private:
  std::atomic<uint32_t>& count_;
};

}  // namespace unisono
