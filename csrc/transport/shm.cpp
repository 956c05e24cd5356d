#include "transport/shm.hpp"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace unisono {
namespace {

constexpr uint64_t kLeastWarmBytes = 64 * 1024;

// How far into its ring a rank writes before it returns to the beginning. A store to a line that its reader
// still has in its own cache takes five times as long as one to a line that has left it for the cache that
// cores share. So a ring is as long as that cache allows: the rings of a host together take half of it.
uint64_t warm_bytes(uint64_t ring_bytes, uint64_t ranks) {
  const long shared = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or less: unknown
  const uint64_t share = shared > 0 ? static_cast<uint64_t>(shared) / 2 / ranks : ring_bytes;
  return std::max(std::min(share, ring_bytes), kLeastWarmBytes);
}

uint64_t aligned(uint64_t bytes) { return (bytes + 63) & ~uint64_t{63}; }

// Whether counter `a` has reached `b`; counters wrap.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

ShmTransport::ShmTransport(GroupState& group, const PeerProcesses& peers, int rank)
    : group_(group),
      peers_(peers),
      rank_(rank),
      ring_(group.region().staging(group.region_index(rank))),
      ring_bytes_(group.region().staging_bytes()),
      warm_bytes_(warm_bytes(ring_bytes_, group.region().ranks())),
      staged_(std::bit_ceil(size_t{group.region().ranks()} * kFifoSlots)) {
  Region& region = group.region();
  for (int peer = 0; peer < group.ranks(); ++peer) {
    const int mine = group.region_index(rank), theirs = group.region_index(peer);
    if (theirs < 0)
      edges_.push_back({});
    else
      edges_.push_back({&region.fifo(mine, theirs), &region.fifo(theirs, mine),
                        &group.cell(peer).collective_event, region.staging(theirs), 0, 0, 0});
  }
}

bool ShmTransport::acked(int peer, uint32_t number) {
  ShmEndpoint& to = edge(peer);
  if (reached(to.known_acked, number)) return true;
  to.known_acked = to.out->acked.load(std::memory_order_seq_cst);  // R2: checked before a sleep
  if (reached(to.known_acked, number)) return true;
  blocking_peer_ = peer;
  return false;
}

bool ShmTransport::fifos_have_room(std::span<const int> peers) {
  for (int peer : peers)
    if (!acked(peer, edge(peer).sent + 1 - kFifoSlots)) return false;
  return true;
}

// Frees the bytes of the oldest staged message; false while its receiver still reads it.
bool ShmTransport::reclaim() {
  const StagedMessage& message = staged_[first_staged_ & (staged_.size() - 1)];
  if (!acked(message.peer, message.number)) return false;
  ring_tail_ = message.free_to;
  ++first_staged_;
  return true;
}

// The ring restarts at its beginning when nothing is in flight, so that the rest of it stays out of the
// cache.
void ShmTransport::restart_ring() {
  while (first_staged_ != last_staged_)
    if (!reclaim()) return;
  ring_head_ = ring_tail_ = (ring_head_ / ring_bytes_ + 1) * ring_bytes_;
}

// A message is contiguous: where it would wrap around the ring's end, the rest of the ring is skipped.
unsigned char* ShmTransport::ring_room(size_t nbytes) {
  if (ring_head_ % ring_bytes_ >= warm_bytes_) restart_ring();
  uint64_t start = ring_head_;
  const uint64_t offset = start % ring_bytes_;
  if (offset + nbytes > ring_bytes_) start += ring_bytes_ - offset;
  while (start + aligned(nbytes) - ring_tail_ > ring_bytes_)
    if (!reclaim()) return nullptr;
  reserved_ = start;
  return ring_ + start % ring_bytes_;
}

void* ShmTransport::reserve(std::span<const int> peers, size_t nbytes) {
  if (!fifos_have_room(peers)) return nullptr;
  if (nbytes <= kInlineBytes) return small_;
  while (last_staged_ - first_staged_ + peers.size() > staged_.size())
    if (!reclaim()) return nullptr;
  return ring_room(nbytes);
}

void ShmTransport::commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void*) {
  const bool small = nbytes <= kInlineBytes;
  for (int peer : peers) {
    ShmEndpoint& to = edge(peer);
    const uint32_t number = ++to.sent;
    FifoSlot& slot = slot_of(*to.out, number);
    slot.location = PayloadLocation::kStaged;
    slot.fingerprint = fingerprint;
    slot.nbytes = nbytes;
    if (small) {
      std::memcpy(slot.payload, small_, kInlineBytes);
    } else {
      slot.offset = reserved_ % ring_bytes_;
      staged_[last_staged_++ & (staged_.size() - 1)] = {peer, number, ring_tail_};
    }
    slot.number.store(number, std::memory_order_seq_cst);  // R1: the message; R2: before `notify`
    notify(*to.event);
  }
  if (small || peers.empty()) return;
  ring_head_ = reserved_ + aligned(nbytes);
  // Only the last receiver's entry frees the bytes of the message; the others free nothing new.
  for (uint64_t i = last_staged_ - peers.size(); i < last_staged_; ++i)
    staged_[i & (staged_.size() - 1)].free_to = i + 1 == last_staged_ ? ring_head_ : reserved_;
}

bool ShmTransport::peek(int peer, size_t, void*, MessageView& message) {
  ShmEndpoint& from = edge(peer);
  const uint32_t number = from.received + 1;
  const FifoSlot& slot = slot_of(*from.in, number);
  if (slot.number.load(std::memory_order_seq_cst) != number) return false;  // R1, R2
  message.nbytes = slot.nbytes;
  message.fingerprint = slot.fingerprint;
  message.zero_copy = message.mapped = false;
  if (slot.location != PayloadLocation::kStaged) [[unlikely]] {
    message.data = slot.location == PayloadLocation::kMapped ? read_in_place(peer, slot) : nullptr;
    message.mapped = message.data != nullptr;
    message.zero_copy = !message.mapped;
    return true;
  }
  message.data =
      slot.nbytes <= kInlineBytes ? static_cast<const void*>(slot.payload) : from.staging + slot.offset;
  return true;
}

void ShmTransport::release(int peer) {
  ShmEndpoint& from = edge(peer);
  from.in->acked.store(++from.received, std::memory_order_seq_cst);  // R1: behind all reads; R2
  notify(*from.event);
}

// ---- zero-copy messages ----------------------------------------------------------------------------

bool ShmTransport::can_zero_copy(std::span<const int>) const { return group_.region().zero_copy(); }

bool ShmTransport::can_map(const void* from, size_t nbytes) const {
  const Arena* const arena = Arena::made();
  return arena != nullptr && arena->holds(from, nbytes) && group_.region().zero_copy();
}

bool ShmTransport::send_zero_copy(std::span<const int> peers, size_t nbytes, uint64_t fingerprint,
                                  const void* from, bool mapped) {
  if (!fifos_have_room(peers)) return false;
  forget_complete();
  const PayloadLocation location = mapped ? PayloadLocation::kMapped : PayloadLocation::kZeroCopy;
  group_.publish_arena(rank_);
  for (int peer : peers) {
    ShmEndpoint& to = edge(peer);
    const uint32_t number = ++to.sent;
    FifoSlot& slot = slot_of(*to.out, number);
    slot.location = location;
    slot.fingerprint = fingerprint;
    slot.nbytes = nbytes;
    slot.transfer.publish_source(from);
    zero_copy_sends_.push_back({peer, number, nbytes, location});
    slot.number.store(number, std::memory_order_seq_cst);  // R1, R2, as in commit
    notify(*to.event);
  }
  return true;
}

void ShmTransport::progress_zero_copy() {
  for (const ZeroCopyMessage& zero_copy : zero_copy_sends_) {
    ShmEndpoint& to = edge(zero_copy.peer);
    if (reached(to.out->acked.load(std::memory_order_acquire), zero_copy.number))
      continue;  // returned already
    ZeroCopyTransfer& transfer = slot_of(*to.out, zero_copy.number).transfer;
    if (transfer.target_published() &&
        transfer.write_pieces(group_.memory_of(zero_copy.peer), zero_copy.nbytes))
      notify(*to.event);
  }
}

// Whether the peer has yet to copy a message of this rank.
bool ShmTransport::sends_zero_copy_to(int peer) {
  return std::ranges::any_of(zero_copy_sends_, [&](const ZeroCopyMessage& one) {
    return one.peer == peer && one.location == PayloadLocation::kZeroCopy && !acked(peer, one.number);
  });
}

void ShmTransport::forget_complete() {
  while (!zero_copy_sends_.empty() && acked(zero_copy_sends_.front().peer, zero_copy_sends_.front().number))
    zero_copy_sends_.pop_front();
}

bool ShmTransport::zero_copy_complete() {
  forget_complete();
  return zero_copy_sends_.empty();
}

// The receiver maps the sender's arena at the first such message. Where that fails, the message is sent with
// zero copy.
const void* ShmTransport::read_in_place(int peer, const FifoSlot& slot) {
  const ArenaView* const arena = group_.memory_of(peer).view;
  return arena == nullptr ? nullptr
                          : arena->at(slot.transfer.source.load(std::memory_order_relaxed), slot.nbytes);
}

// A sender that has aborted may have changed its memory: it published the abort first, so the check after the
// copy sees it.
bool ShmTransport::copy_zero_copy(int peer, const MessageView& message, void* into) {
  ShmEndpoint& from = edge(peer);
  ZeroCopyTransfer& transfer = slot_of(*from.in, from.received + 1).transfer;
  group_.publish_arena(rank_);
  const PeerMemory sender = group_.memory_of(peer);
  const PieceSize size = sends_zero_copy_to(peer) ? PieceSize::kLarge : PieceSize::kHalf;
  if (transfer.publish_target(sender, into, message.nbytes, size)) notify(*from.event);
  transfer.read_pieces(sender, into, message.nbytes, size);
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  if (transfer.is_broken(message.nbytes)) return repeat_zero_copy(peer, transfer, into, message.nbytes);
  return transfer.is_complete(message.nbytes) && !group_.aborted();
}

// Where the peer has died or aborted, its memory may be gone: the wait then ends by that.
bool ShmTransport::repeat_zero_copy(int peer, ZeroCopyTransfer& transfer, void* into, size_t nbytes) {
  const uint64_t from = transfer.source.load(std::memory_order_relaxed);
  const FaultKind fault = ZeroCopyTransfer::repeat(group_.cell(peer).process(), from, into, nbytes);
  std::atomic_thread_fence(std::memory_order_acquire);  // R3, as above
  if (group_.aborted() || fault == FaultKind::kPeerLost) return false;
  if (fault == FaultKind::kNone) return true;
  group_.fail({fault, rank_, fault == FaultKind::kUnwritable ? rank_ : peer});
}

bool ShmTransport::cancel_zero_copy(int peer) {
  ShmEndpoint& from = edge(peer);
  return slot_of(*from.in, from.received + 1).transfer.cancel([&] { return peers_.dead(peer); });
}

}  // namespace unisono
