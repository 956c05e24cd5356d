// A message that is not copied into shared memory: its sender lends its own memory, and the bytes go from
// there straight to where the receiver wants them. Either end may copy: the receiver reads the lender's
// memory, a waiting lender writes into the receiver's, piece by piece.
//
// The system lets a process do this to another one of its user (process_vm_readv); whether it does here is
// tried when a group is made. It needs no trust beyond that: such processes can do worse to each other.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace unisono {

// The identity of a process: its pid, and a random token in its memory. A process with a recycled pid, a fork
// or an exec'ed program does not have the token.
struct Identity {
  pid_t pid;
  uint64_t token_address;
  uint64_t token;
};
Identity identity();  // this process's

class ArenaView;

// Another process's memory: by system calls, and what of it this one has mapped (see arena.hpp) without.
struct PeerMemory {
  Identity who;
  const ArenaView* view;  // nullptr: nothing
};

constexpr uint64_t kLandmark = 0x6e69656c746f6e61;  // stands before a process's token

// A piece is half of the remaining units: two copying ranks end at nearly the same time, whenever the second
// began, after few system calls.
constexpr size_t kUnitBytes = 32 * 1024;
constexpr uint32_t kMostUnits = 16;
constexpr uint32_t kClosed = 1u << 31;  // in `claimed`: no more pieces are begun

// In shared memory, in a place that one message at a time uses. A receiver that stops early has to close
// it, and its memory is its own again only when all pieces that were begun are settled.
struct Loan {
  std::atomic<uint64_t> source;   // in the lender's memory
  std::atomic<uint64_t> target;   // in the receiver's memory; 0: the receiver has not come yet
  std::atomic<uint32_t> claimed;  // units of bytes (see loan.cpp), in order
  std::atomic<uint32_t> settled;  // units whose copies are finished
  std::atomic<uint32_t> broken;   // a piece could not be copied: a process is gone, or its memory

  // The lender, before it announces the message.
  void offer(const void* from);
  // The receiver, before it takes: where the bytes go. False where the lender cannot help, or is invited to
  // already.
  bool open(void* into);
  // Whether the receiver has arrived: only then is its identity known. A lender asks before it sleeps.
  bool opened() const { return target.load(std::memory_order_seq_cst) != 0; }
  // Copies unclaimed pieces until there are none: the receiver from `lender`, or the lender, once it is
  // opened, to `receiver`. Returns whether it copied any.
  bool take(const PeerMemory& lender, void* into, size_t nbytes);
  bool help(const PeerMemory& receiver, size_t nbytes);
  // Whether all has arrived. A receiver asks before it sleeps.
  bool whole(size_t nbytes) const;
  bool failed() const { return broken.load(std::memory_order_acquire) != 0; }
  // The receiver, when it stops early: no more pieces are begun. Waits a moment for those that were; whether
  // all are settled. `dead`: whether the lender is.
  bool end(const std::function<bool()>& dead);
};

// Leaks `value` on purpose: another process may still write into its memory, or
// this one uses it until it ends.
template <class T>
T& never_free(T&& value) {
  return *new T(std::move(value));
}

// Whether others can reach this piece of memory of this process, given that they can reach any: not what a
// device driver has mapped.
bool accessible(const void* data, size_t nbytes);

// Where others look to see that they can read this process's memory.
uint64_t landmark();
bool reaches(pid_t pid, uint64_t landmark);

}  // namespace unisono
