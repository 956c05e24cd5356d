#include "protocol/zero_copy.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>

#include "kernels/reduce.hpp"
#include "protocol/arena.hpp"
#include "protocol/descriptor.hpp"
#include "protocol/region.hpp"

namespace unisono {
namespace {

// On a page of its own, which is zero in a forked child (MADV_WIPEONFORK).
struct ProcessToken {
  std::atomic<uint64_t> name;
  std::atomic<uint64_t> number;
};

ProcessToken& process_token() {
  static ProcessToken& token = [&]() -> ProcessToken& {
    void* const memory =
        mmap(nullptr, sizeof(ProcessToken), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, sizeof(ProcessToken), MADV_WIPEONFORK);
    return *new (memory) ProcessToken{};
  }();
  if (token.number.load(std::memory_order_acquire) != 0) return token;
  uint64_t number = 0, none = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number)
    throw std::system_error(errno, std::generic_category(), "no random numbers");
  token.number.compare_exchange_strong(none, number | 1);
  token.name.store(kAccessProbe, std::memory_order_release);
  return token;
}

using Clock = std::chrono::steady_clock;
constexpr auto kCompletionPatience = std::chrono::seconds(1);

uint32_t units(size_t nbytes) { return static_cast<uint32_t>((nbytes + kUnitBytes - 1) / kUnitBytes); }

iovec piece_at(uint64_t address, size_t nbytes) { return {reinterpret_cast<void*>(address), nbytes}; }

// Both are used within one process, too, where ranks are threads: a sender that has aborted may have freed
// its memory. These calls then return an error, where memcpy would crash. A call may copy only a part.

// The same call also reads the peer's identity token, so that both belong to one process. `here` is moved on
// to the first byte that could not be copied; returns 0, or the error's number: ESRCH for another process.
int read_from(const ProcessIdentity& who, uint64_t& here, uint64_t there, size_t nbytes) {
  while (nbytes > 0) {
    uint64_t token = 0;
    const iovec mine[] = {{&token, sizeof token}, piece_at(here, nbytes)};
    const iovec theirs[] = {piece_at(who.token_address, sizeof token), piece_at(there, nbytes)};
    const ssize_t moved = process_vm_readv(who.pid, mine, 2, theirs, 2, 0);
    if (moved < 0) return errno == EFAULT ? ESRCH : errno;
    if (moved < static_cast<ssize_t>(sizeof token) || token != who.token) return ESRCH;
    if (moved == sizeof token) return EFAULT;
    const size_t done = static_cast<size_t>(moved) - sizeof token;
    here += done;
    there += done;
    nbytes -= done;
  }
  return 0;
}

bool is_still(const ProcessIdentity& who) {
  uint64_t token = 0;
  const iovec mine{&token, sizeof token}, theirs = piece_at(who.token_address, sizeof token);
  return process_vm_readv(who.pid, &mine, 1, &theirs, 1, 0) == sizeof token && token == who.token;
}

// A sandbox may refuse this process to write to others. The receiver then copies alone.
std::atomic<bool> may_write{true};

// No system call both writes and checks the identity, so the token is checked right before each write.
bool write_to(const ProcessIdentity& who, uint64_t here, uint64_t there, size_t nbytes) {
  while (nbytes > 0) {
    const iovec mine = piece_at(here, nbytes), theirs = piece_at(there, nbytes);
    if (!is_still(who)) return false;
    const ssize_t moved = process_vm_writev(who.pid, &mine, 1, &theirs, 1, 0);
    if (moved < 0 && errno != EFAULT) may_write.store(false, std::memory_order_relaxed);
    if (moved <= 0) return false;
    here += static_cast<size_t>(moved);
    there += static_cast<size_t>(moved);
    nbytes -= static_cast<size_t>(moved);
  }
  return true;
}

// Whether a byte of this process can be written; it keeps its value.
bool writable(uint64_t address) {
  char byte;
  const iovec mine{&byte, 1}, there = piece_at(address, 1);
  return process_vm_readv(getpid(), &mine, 1, &there, 1, 0) == 1 &&
         process_vm_writev(getpid(), &mine, 1, &there, 1, 0) == 1;
}

void* seen(const PeerMemory& other, uint64_t address, size_t nbytes) {
  return other.view == nullptr ? nullptr : other.view->at(address, nbytes);
}

// Whether the receiver copies a message of so many units alone, in one call.
bool is_one_piece(uint32_t count, PieceSize size) {
  return count <= (size == PieceSize::kLarge ? kMostUnitsAlone : 2);
}

// The units of the next piece.
uint32_t piece_of(uint32_t left, uint32_t count, PieceSize size) {
  if (size == PieceSize::kLarge || is_one_piece(count, size)) return std::min(left, kMostUnitsAlone);
  const uint32_t few = std::min(kFewUnits, (count + 1) / 2);
  return std::min({left, kMostUnits, std::max(left / 2, few)});
}

template <class Copy>
bool work(ZeroCopyTransfer& transfer, uint64_t target, size_t nbytes, PieceSize size, Copy copy) {
  const uint32_t count = units(nbytes);
  bool worked = false;
  for (;;) {
    uint32_t next = transfer.claimed.load(std::memory_order_relaxed), piece;  // claiming publishes nothing
    do {
      if (next >= count) return worked;  // also when it is closed
      piece = piece_of(count - next, count, size);
    } while (!transfer.claimed.compare_exchange_weak(next, next + piece, std::memory_order_acquire));
    const size_t first = next * kUnitBytes;
    const uint64_t source = transfer.source.load(std::memory_order_relaxed) + first;
    if (!copy(source, target + first, std::min(piece * kUnitBytes, nbytes - first)))
      transfer.broken.store(1, std::memory_order_release);
    transfer.completed.fetch_add(piece, std::memory_order_seq_cst);  // R1: the bytes, and `broken`; R2
    worked = true;
  }
}

}  // namespace

void ZeroCopyTransfer::publish_source(const void* from) {
  source.store(reinterpret_cast<uint64_t>(from), std::memory_order_relaxed);
  target.store(0, std::memory_order_relaxed);
  claimed.store(0, std::memory_order_relaxed);
  completed.store(0, std::memory_order_relaxed);
  broken.store(0, std::memory_order_relaxed);
}

bool ZeroCopyTransfer::publish_target(const PeerMemory& sender, void* into, size_t nbytes, PieceSize size) {
  if (is_one_piece(units(nbytes), size) &&
      seen(sender, source.load(std::memory_order_relaxed), nbytes) == nullptr)
    return false;
  if (target.load(std::memory_order_relaxed) != 0 || !accessible(into, nbytes)) return false;
  target.store(reinterpret_cast<uint64_t>(into), std::memory_order_seq_cst);
  return true;
}

bool ZeroCopyTransfer::read_pieces(const PeerMemory& sender, void* into, size_t nbytes, PieceSize size) {
  const auto to = reinterpret_cast<uint64_t>(into);
  return work(*this, to, nbytes, size, [&](uint64_t from, uint64_t to, size_t n) {
    // A target that is not published may lack pages: a system call then returns an error.
    const void* const there = target_published() ? seen(sender, from, n) : nullptr;
    if (there == nullptr) return read_from(sender.who, to, from, n) == 0;
    kernels().copy(reinterpret_cast<void*>(to), there, n);
    return true;
  });
}

bool ZeroCopyTransfer::write_pieces(const PeerMemory& receiver, size_t nbytes) {
  if (!may_write.load(std::memory_order_relaxed)) return false;
  const uint64_t into = target.load(std::memory_order_relaxed);
  return work(*this, into, nbytes, PieceSize::kHalf, [&](uint64_t from, uint64_t to, size_t n) {
    void* const there = seen(receiver, to, n);
    if (there == nullptr) return write_to(receiver.who, from, to, n);
    kernels().copy(there, reinterpret_cast<const void*>(from), n);
    return true;
  });
}

bool ZeroCopyTransfer::is_complete(size_t nbytes) const {
  return completed.load(std::memory_order_seq_cst) == units(nbytes) && !failed();
}

bool ZeroCopyTransfer::is_broken(size_t nbytes) const {
  return completed.load(std::memory_order_seq_cst) == units(nbytes) && failed();
}

FaultKind ZeroCopyTransfer::repeat(const ProcessIdentity& sender, uint64_t from, void* into, size_t nbytes) {
  auto to = reinterpret_cast<uint64_t>(into);
  switch (read_from(sender, to, from, nbytes)) {
    case 0:
      return FaultKind::kNone;
    case EFAULT:
      return writable(to) ? FaultKind::kUnreadable : FaultKind::kUnwritable;
    case ESRCH:
      return FaultKind::kPeerLost;
    default:
      return FaultKind::kNoAccess;
  }
}

bool ZeroCopyTransfer::cancel(const std::function<bool()>& dead) {
  const uint32_t begun = claimed.fetch_or(kClosed) & ~kClosed;
  const auto cancel = Clock::now() + kCompletionPatience;
  while (completed.load(std::memory_order_acquire) < begun) {
    if (dead()) return true;
    if (Clock::now() > cancel) return false;
    sched_yield();
  }
  return true;
}

FaultKind copy_from(const PeerMemory& other, void* into, uint64_t from, size_t nbytes) {
  if (const void* const there = seen(other, from, nbytes)) {
    kernels().copy(into, there, nbytes);
    return FaultKind::kNone;
  }
  return ZeroCopyTransfer::repeat(other.who, from, into, nbytes);
}

FaultKind copy_to(const PeerMemory& other, uint64_t into, const void* from, size_t nbytes) {
  if (void* const there = seen(other, into, nbytes)) {
    kernels().copy(there, from, nbytes);
    return FaultKind::kNone;
  }
  if (write_to(other.who, reinterpret_cast<uint64_t>(from), into, nbytes)) return FaultKind::kNone;
  if (!is_still(other.who)) return FaultKind::kPeerLost;
  return may_write.load(std::memory_order_relaxed) ? FaultKind::kUnwritable : FaultKind::kNoAccess;
}

bool accessible(const void* data, size_t nbytes) {
  char ends[2];
  const auto* const from = static_cast<const char*>(data);
  const iovec here{ends, sizeof ends};
  const iovec there[2] = {{const_cast<char*>(from), 1}, {const_cast<char*>(from + nbytes - 1), 1}};
  return process_vm_readv(getpid(), &here, 1, there, 2, 0) == sizeof ends;
}

// The kernel reads the bytes of a write, and returns an error where the process itself would get SIGBUS.
bool readable(const void* data, size_t nbytes) {
  constexpr size_t kPage = 4096, kMost = 1024;
  const FileDescriptor sink(memfd_create("unisono-probe", MFD_CLOEXEC));
  const auto first = reinterpret_cast<uint64_t>(data), end = first + nbytes;
  iovec bytes[kMost];
  for (uint64_t at = first; at < end;) {
    int count = 0;
    for (; count < static_cast<int>(kMost) && at < end; at = (at / kPage + 1) * kPage)
      bytes[count++] = piece_at(at, 1);
    if (pwritev(sink, bytes, count, 0) != count) return false;
  }
  return true;
}

bool is_present(const void* data, size_t nbytes) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14: as a read, but EFAULT for SIGBUS
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t last = reinterpret_cast<uintptr_t>(data) + nbytes - 1;
  if (madvise(reinterpret_cast<void*>(last / page * page), page, kPopulateRead) == 0) return true;
  return accessible(data, nbytes) || readable(data, nbytes);
}

ProcessIdentity identity() {
  ProcessToken& token = process_token();
  return {getpid(), reinterpret_cast<uint64_t>(&token.number), token.number.load()};
}

uint64_t access_probe() { return reinterpret_cast<uint64_t>(&process_token().name); }

bool replaced(const ProcessIdentity& who) {
  uint64_t token = 0;
  const iovec mine{&token, sizeof token}, theirs = piece_at(who.token_address, sizeof token);
  const ssize_t got = process_vm_readv(who.pid, &mine, 1, &theirs, 1, 0);
  return got < 0 ? errno == EFAULT : token != who.token;
}

bool reaches(pid_t pid, uint64_t access_probe) {
  uint64_t word = 0;
  const iovec mine{&word, sizeof word}, theirs = piece_at(access_probe, sizeof word);
  return process_vm_readv(pid, &mine, 1, &theirs, 1, 0) == sizeof word && word == kAccessProbe;
}

}  // namespace unisono
