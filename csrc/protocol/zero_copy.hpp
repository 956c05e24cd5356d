// Zero copy, as UCX's zcopy: a message is not staged in shared memory. The sender publishes its own memory,
// and the bytes are copied from there straight to the receiver's buffer. Both ends copy in pieces: the
// receiver reads the sender's memory, and a waiting sender writes into the receiver's.
//
// Linux allows this between processes of one user (process_vm_readv). Whether it does here is tested when a
// group is made. This needs no further trust: such processes can harm each other anyway.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace unisono {

enum class FaultKind : uint32_t;

// The identity of a process: its pid, and a random token in its memory. A process with a recycled pid, a fork
// or an exec'ed program does not have the token.
struct ProcessIdentity {
  pid_t pid;
  uint64_t token_address;
  uint64_t token;
};
ProcessIdentity identity();  // this process's

class ArenaView;

// Access to another process's memory: by system calls, and directly where its arena is mapped (see
// arena.hpp).
struct PeerMemory {
  ProcessIdentity who;
  const ArenaView* view;  // nullptr: its arena is not mapped
};

constexpr uint64_t kAccessProbe = 0x6e69656c746f6e61;  // a known word before a process's token, see `reaches`

// A piece is half of the remaining units. So two copying ranks end at nearly the same time, whenever the
// second one began, and need few system calls. A call takes as long as copying about one unit: a piece has at
// least kFewUnits, or half of the message, and a message of two units is one piece. A rank that copies alone
// takes more at once.
constexpr size_t kUnitBytes = 32 * 1024;
constexpr uint32_t kFewUnits = 4, kMostUnits = 16, kMostUnitsAlone = 32;
constexpr uint32_t kClosed = 1u << 31;  // in `claimed`: no more pieces may be claimed

// kLarge: the sender copies a message of its own from this receiver meanwhile, and helps only after that.
enum class PieceSize { kHalf, kLarge };

// In shared memory; used by one message at a time. A receiver that stops early has to close it. It may use or
// free its buffer only after all claimed pieces are completed.
struct ZeroCopyTransfer {
  std::atomic<uint64_t> source;     // in the sender's memory
  std::atomic<uint64_t> target;     // in the receiver's memory; 0: the receiver has not arrived yet
  std::atomic<uint32_t> claimed;    // units of bytes (see zero_copy.cpp), in order
  std::atomic<uint32_t> completed;  // units whose copies are finished
  std::atomic<uint32_t> broken;     // a piece could not be copied: the process or its memory is gone

  // Sender: call before the message is announced.
  void publish_source(const void* from);
  // Receiver: call before `read_pieces`. Publishes the target, so that the sender can help. False: the sender
  // cannot help, need not, or the target is published already.
  bool publish_target(const PeerMemory& sender, void* into, size_t nbytes, PieceSize size);
  // Whether the receiver has published its identity and target. A sender checks this before it sleeps.
  bool target_published() const { return target.load(std::memory_order_seq_cst) != 0; }
  // Claims and copies pieces until none is left. `read_pieces`: the receiver, from `sender`. `write_pieces`:
  // the sender, after `target_published`, to `receiver`. Returns whether it copied any.
  bool read_pieces(const PeerMemory& sender, void* into, size_t nbytes, PieceSize size);
  bool write_pieces(const PeerMemory& receiver, size_t nbytes);
  // Whether all bytes have arrived. A receiver checks this before it sleeps.
  bool is_complete(size_t nbytes) const;
  // Whether all pieces are finished, and one could not be copied. The receiver then calls `repeat`.
  bool is_broken(size_t nbytes) const;
  bool failed() const { return broken.load(std::memory_order_acquire) != 0; }
  // Receiver: copies the whole message alone, after one end could not copy a piece: the system may refuse the
  // other end. kUnwritable, kUnreadable: the receiver's memory, or the sender's. kNoAccess: the system
  // refuses the copy. kPeerLost: the process is another one.
  static FaultKind repeat(const ProcessIdentity& sender, uint64_t from, void* into, size_t nbytes);
  // Receiver: call to stop early. Closes the zero-copy transfer, and waits briefly for the claimed pieces;
  // whether all are completed. `dead`: whether the sender is dead.
  bool cancel(const std::function<bool()>& dead);
};

// Leaks `value` on purpose: another process may still write into its memory, or this process uses it until it
// ends.
template <class T>
T& never_free(T&& value) {
  return *new T(std::move(value));
}

// Whether process_vm_readv can read this memory of this process: it cannot read what a device driver has
// mapped.
bool accessible(const void* data, size_t nbytes);
// Whether every page of this memory can be read; a page of a mapped file may be missing. Slow.
bool readable(const void* data, size_t nbytes);
// Whether the end of a caller's buffer is there. Touching a page that a mapped file has lost ends the process
// by SIGBUS. One system call, as a rule; buffers below kCheckedBytes are not worth it.
bool is_present(const void* data, size_t nbytes);
constexpr size_t kCheckedBytes = 256 * 1024;

// Copies bytes between this process's memory and another one's. kNone: it has. kPeerLost: the process is
// another one. kUnreadable, kUnwritable: a page is missing. kNoAccess: the system refuses it.
FaultKind copy_from(const PeerMemory& other, void* into, uint64_t from, size_t nbytes);
FaultKind copy_to(const PeerMemory& other, uint64_t into, const void* from, size_t nbytes);

// The address of kAccessProbe in this process; another process reads it to test its access.
uint64_t access_probe();
bool reaches(pid_t pid, uint64_t access_probe);
// Whether the process runs another program: its memory no longer has the token. False also where the system
// does not let this process look.
bool replaced(const ProcessIdentity& who);

}  // namespace unisono
