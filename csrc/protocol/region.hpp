// The memory that the ranks of one group on one host share, and its layout. It is one mapping of one unnamed
// memfd: nothing remains after a kill.
//
//   header | one RankCell per rank | one FIFO per ordered pair | Channels | staging per rank | Channels'
//   buffers
//
// Fields that different ranks write lie on different cache lines (128 bytes apart: the prefetcher
// fetches lines in pairs). A field that is added here goes into the table of region_layout.hpp, too.
//
// Who writes and reads each field, in which memory order and why: docs/protocol.md. Its rules are named in
// comments: R1 publish, R2 store then load, R3 read and check, R4 single writer.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "protocol/arena.hpp"
#include "protocol/descriptor.hpp"
#include "protocol/frame_error.hpp"
#include "protocol/zero_copy.hpp"

namespace unisono {

constexpr size_t kLineBytes = 128;
constexpr size_t kPageBytes = 4096;
constexpr uint32_t kHistory = 16;    // operations a rank remembers of itself, for error messages
constexpr uint32_t kFifoSlots = 16;  // messages in flight on one edge
constexpr size_t kInlineBytes = 40;  // a message this small travels inside its FIFO slot
constexpr size_t kReportBytes = 240;
constexpr uint32_t kEagerRanks = 64;    // with more ranks on a host, a FIFO gets memory when a plan uses it
constexpr size_t kProposalBytes = 896;  // the longest proposal of a membership

// What went wrong; also the values that reach Python.
enum class FaultKind : uint32_t {
  kNone,
  kTimeout,
  kPeerLost,
  kPeerLeft,
  kMismatch,
  kInterrupted,
  kAborted,
  kNoMemory,
  kBadFrame,
  kHostSilent,
  kStopped,
  kUnreadable,  // a buffer of `rank`
  kUnwritable,
  kNoAccess,  // the system refuses `found_by` to copy from the memory of `rank`
  kReplaced   // the process of `rank` runs another program
};

// A message that differs from what its receiver expected. `seq`: the collective in which only sizes differ;
// 0: a message between two ranks, or different calls. With 0 bytes expected and sent: only that there was one
// too many.
struct SizeMismatch {
  int32_t tag = 0;  // of a collective: the number of the chunk
  uint32_t expected_form = 0, sent_form = 0;
  uint64_t expected_nbytes = 0, sent_nbytes = 0;
  uint64_t seq = 0;
  uint32_t more = 0;     // whether more bytes may have followed
  uint32_t scratch = 0;  // whether the chunk is in scratch memory: its receiver only forwards it
};

// What a call of a window waits for, in a rank.
enum class WindowWait : uint32_t { kNone, kLock, kUpdate, kFence, kPost, kComplete, kAnswer };

struct Fault {
  FaultKind kind = FaultKind::kNone;
  int32_t found_by = -1;  // the rank that found the fault
  int32_t rank = -1;      // the rank that died, differed or did not come
  int32_t signal = 0;     // what ended `rank`, when known
  int32_t exit_code = -1;
  uint64_t seq = 0;  // the operation of `found_by` that was running; 0: a message, or a window
  WindowWait window = WindowWait::kNone;  // kTimeout: what `found_by` awaited of `rank`
  SizeMismatch size_mismatch{};           // kMismatch of sizes
  FrameError frame{};                     // kBadFrame: what `rank` sent
};

// The group's abort cell. The first fault counts, and the group stays aborted. One compare-exchange decides,
// so a rank that dies during an abort leaves nothing half done.
struct alignas(kLineBytes) AbortCell {
  std::atomic<uint32_t> state;  // 0: fine; else 1 + the place of the rank in whose cell the fault is
};

// One operation as a rank called it.
struct CallRecord {
  uint64_t seq;
  uint64_t fingerprint;
  uint64_t numel;
  int32_t root;
  uint8_t kind, dtype, op, algorithm;  // dtype: from kFirstCodec on a codec
  uint32_t block;                      // of the codec; 0: it has none
  uint32_t coding;  // which edges carry codes, and whether errors are fed back: see CodingBits
};
static_assert(sizeof(CallRecord) == 40);

enum CodingBits : uint32_t { kCodesBetweenHosts = 1, kCodesFedBack = 2, kCodings = 4 };

// A futex word, and the number of threads that sleep on it.
struct alignas(kLineBytes) EventCount {
  std::atomic<uint32_t> epoch;
  std::atomic<uint32_t> sleepers;
};

// A rank's text for the other ranks: about the fault that ended the group, or why it leaves. Written once: by
// the rank, or, if it is late, by one that waits for it.
struct alignas(kLineBytes) RankReport {
  std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 set
  uint64_t seq;  // the operation it is about; 0: a message; 2^64-1: why this rank leaves; 2^64-2: where it is
  char text[kReportBytes];  // ends with a zero
};

// What a rank proposes as the next membership, for the other ranks. It has two slots, used in turn: if the
// rank dies while it writes one slot, the other slot has its last complete proposal. The engine does not read
// the bytes.
struct alignas(kLineBytes) ProposalSlots {
  std::atomic<uint64_t> version;  // counted from 1; it is in slot `version % 2`; 0: none
  std::atomic<uint64_t> nbytes[2];
  std::atomic<uint64_t> words[2][kProposalBytes / sizeof(uint64_t)];
};

// Whether a rank may still decide on the next membership. One exchange from kOpen: either the rank decides,
// or another rank of its host evicts it.
enum class Fate : uint32_t { kOpen, kDecided, kEvicted };

struct alignas(kLineBytes) RankCell {
  std::atomic<int32_t> pid;       // of its process, as are `token_address` and `token`: see ProcessIdentity
  std::atomic<uint32_t> left;     // closed the group in an orderly way
  std::atomic<uint64_t> started;  // number of the newest operation begun; the first is 1
  std::atomic<uint64_t> finished;
  std::atomic<uint64_t> token_address, token;
  std::atomic<int32_t> stack_fd;                      // 1 + the number; 0: it has none; see stack_sample.hpp
  std::atomic<int32_t> thread;                        // that made the group, or its first collective
  alignas(kLineBytes) std::atomic<int64_t> moved_ns;  // when it last chose its core; see placement.hpp
  std::atomic<int32_t> core;      // on which its thread ran last, counted from 1; 0: unknown
  std::atomic<int32_t> arena_fd;  // set before it first announces memory of its arena; see arena.hpp
  std::atomic<uint64_t> arena_base, arena_bytes;
  EventCount collective_event;  // notified by peers for the thread that runs collectives
  EventCount message_event;     // ... and for the one that moves point-to-point messages
  EventCount membership_event;  // notified by this rank for those that wait for its next proposal
  EventCount window_event;      // notified for threads that wait in a call of a window
  std::atomic<uint64_t> history[kHistory][sizeof(CallRecord) / sizeof(uint64_t)];
  RankReport report;
  alignas(kLineBytes) Fault fault;  // found by this rank; constant once the abort cell names this rank
  alignas(kLineBytes) std::atomic<uint32_t> fate;  // a Fate
  ProposalSlots proposal;

  ProcessIdentity process() const {
    return {pid.load(std::memory_order_relaxed), token_address.load(std::memory_order_relaxed),
            token.load(std::memory_order_relaxed)};
  }
  void set_process(const ProcessIdentity& who) {
    token_address.store(who.token_address, std::memory_order_relaxed);
    token.store(who.token, std::memory_order_relaxed);
    pid.store(who.pid, std::memory_order_release);  // R1
  }
  ArenaLocation arena() const {
    const uint64_t bytes = arena_bytes.load(std::memory_order_acquire);  // R1: before the other two
    return {arena_fd.load(std::memory_order_relaxed), arena_base.load(std::memory_order_relaxed), bytes};
  }
  void set_arena(const ArenaLocation& location) {
    arena_fd.store(location.fd, std::memory_order_relaxed);
    arena_base.store(location.base, std::memory_order_relaxed);
    arena_bytes.store(location.bytes, std::memory_order_release);  // R1: behind the other two
  }
};

// kStaged: in the entry or the sender's staging memory. kZeroCopy: in the sender's own memory. kMapped: in
// the sender's arena, which the receiver maps.
enum class PayloadLocation : uint32_t { kStaged, kZeroCopy, kMapped };

// A message on an edge. The receiver sees it when `number` becomes the number it expects.
struct alignas(64) FifoSlot {
  std::atomic<uint32_t> number;
  PayloadLocation location;  // where the bytes are
  uint64_t fingerprint;
  uint64_t nbytes;
  union {
    ZeroCopyTransfer transfer;
    uint64_t offset;
    unsigned char payload[kInlineBytes];
  };
};
static_assert(sizeof(FifoSlot) == 64 && sizeof(ZeroCopyTransfer) <= kInlineBytes && kInlineBytes == 40);

// An edge: sender -> receiver. `acked` counts the messages that the receiver has released.
struct alignas(kLineBytes) Fifo {
  FifoSlot slots[kFifoSlots];
  alignas(kLineBytes) std::atomic<uint32_t> acked;
};

// A point-to-point channel: a byte ring in shared memory, and at most one zero-copy message. Positions only
// grow.
struct alignas(kLineBytes) Channel {
  alignas(kLineBytes) std::atomic<uint64_t> written;
  alignas(kLineBytes) std::atomic<uint64_t> consumed;
  alignas(kLineBytes) ZeroCopyTransfer transfer;
  alignas(kLineBytes) std::atomic<uint64_t> completed_transfers;  // transfers that the receiver has returned
};

struct alignas(kLineBytes) RegionHeader {
  uint64_t magic;
  uint32_t ranks;
  uint32_t unused;
  uint64_t staging_bytes;
  AbortCell abort;
};

// The ring of point-to-point messages of an ordered pair: a power of two. All rings of a sender take at most
// kChannelsBytes, unless the least ones take more. A ring that is larger than a core's cache is faster, see
// `warm_bytes` in shm.cpp.
constexpr uint64_t kLeastChannelBytes = 128 * 1024, kMostChannelBytes = 1024 * 1024;
constexpr uint64_t kChannelsBytes = 4 * 1024 * 1024;
constexpr uint64_t channel_bytes_of(uint64_t ranks) {
  uint64_t bytes = kMostChannelBytes;
  while (bytes > kLeastChannelBytes && bytes * (ranks - 1) > kChannelsBytes) bytes /= 2;
  return bytes;
}

class Region {
 public:
  // Maps `fd` (a memfd), or, with fd < 0, private memory for ranks that are threads.
  Region(int fd, uint32_t ranks, size_t staging_bytes, bool create);
  // The region of the next membership: behind `former` in the same file, so that each rank can make it, and
  // nothing is handed from one rank to another. Every rank calls this, in any order.
  static std::shared_ptr<Region> next(const Region& former, uint32_t ranks);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  static size_t bytes_needed(uint32_t ranks, size_t staging_bytes);

  uint32_t ranks() const { return ranks_; }
  // Checks a place in this region and returns it; throws std::invalid_argument.
  int member(int64_t index) const;
  size_t staging_bytes() const { return staging_bytes_; }
  uint64_t channel_bytes() const { return channel_bytes_; }
  AbortCell& abort() { return header_->abort; }
  RankCell& cell(int index) { return cells_[index]; }
  Fifo& fifo(int sender, int receiver) { return fifos_[static_cast<size_t>(sender) * ranks_ + receiver]; }
  Channel& channel(int sender, int receiver) {  // those of a receiver are neighbours: it reads all of them
    return channels_[static_cast<size_t>(receiver) * ranks_ + sender];
  }
  unsigned char* staging(int index) { return staging_ + static_cast<size_t>(index) * staging_bytes_; }
  unsigned char* channel_ring(int sender, int receiver) {
    return channel_rings_ + (static_cast<size_t>(sender) * ranks_ + receiver) * channel_bytes_;
  }
  // Allocate pages before they are used: running out of memory must be an error, never a SIGBUS.
  // `back_rank`: the staging memory of a rank and the channels to it; throws std::system_error. `back_fifo`:
  // where there are many ranks, those of an edge; throws std::system_error. `back_channel`: those of a
  // channel and its ring; returns false when there is no memory.
  void back_rank(int index);
  void back_fifo(int sender, int receiver);
  bool back_channel(int sender, int receiver);
  // Frees the memory of a former membership, except the cells, which tell evicted ranks what happened.
  void discard();
  // Whether its ranks may use zero copy: each can read the memory of all others.
  bool zero_copy() const { return zero_copy_; }
  void enable_zero_copy() { zero_copy_ = true; }

 private:
  int back(const void* first, size_t nbytes);
  enum class Maker {
    kFirst,
    kNone,
    kAll
  };  // who lays out the memory: its first rank, another one, every rank
  Region(FileDescriptor fd, size_t start, uint32_t ranks, size_t staging_bytes, Maker maker);

  const FileDescriptor fd_;  // first: closed also when the rest of the constructor throws
  const size_t start_;       // in the file
  uint32_t ranks_;
  size_t staging_bytes_;
  uint64_t channel_bytes_;
  size_t bytes_;
  bool zero_copy_ = false;
  unsigned char* base_ = nullptr;
  RegionHeader* header_ = nullptr;
  RankCell* cells_ = nullptr;
  Fifo* fifos_ = nullptr;
  Channel* channels_ = nullptr;
  unsigned char* staging_ = nullptr;
  unsigned char* channel_rings_ = nullptr;
};

}  // namespace unisono
