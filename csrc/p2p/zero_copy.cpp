// Zero-copy messages between two ranks, which do not go through their stream: see
// protocol/zero_copy.hpp.
#include "p2p/channels.hpp"

namespace unisono {

Channel& Channels::channel(int sender, int receiver) {
  return group_.region().channel(group_.region_index(sender), group_.region_index(receiver));
}

// Called before the header is written: a message larger than a ring is sent with zero copy, where ranks
// can read each other's memory. One at a time is sent so to a rank: later ones wait.
void Channels::begin_zero_copy(Request& request) {
  if (request.nbytes <= group_.region().channel_bytes() || !group_.on_this_host(request.peer) ||
      !group_.region().zero_copy())
    return;
  if (!accessible(request.data, request.nbytes)) {
    if (!readable(request.data, request.nbytes)) group_.fail({FaultKind::kUnreadable, rank_, rank_});
    return;
  }
  request.zero_copy = true;
  group_.publish_arena(rank_);
  ++zero_copy_sends_[static_cast<size_t>(request.peer)];
  channel(rank_, request.peer).transfer.publish_source(request.data);
}

// Whether the transfer is complete; helps the receiver to copy.
bool Channels::progress_zero_copy(Request& request) {
  Channel& shared = channel(rank_, request.peer);
  RankCell& receiver = group_.cell(request.peer);
  if (shared.transfer.target_published() &&
      shared.transfer.write_pieces(group_.memory_of(request.peer), request.nbytes))
    notify(receiver.message_event);
  return shared.completed_transfers.load(std::memory_order_seq_cst) ==
         zero_copy_sends_[static_cast<size_t>(request.peer)];
}

// Whether a zero-copy message has arrived. A sender that has aborted or left may have changed its memory: it
// published that first, so the checks after the copy see it.
bool Channels::fetch_zero_copy(int peer, unsigned char* target) {
  const uint64_t nbytes = incoming_[static_cast<size_t>(peer)].header.nbytes;
  Channel& shared = channel(peer, rank_);
  RankCell& sender = group_.cell(peer);
  group_.publish_arena(rank_);
  const auto& queue = sends_[static_cast<size_t>(peer)];
  const PieceSize size = !queue.empty() && queue.front()->zero_copy ? PieceSize::kLarge : PieceSize::kHalf;
  const PeerMemory memory = group_.memory_of(peer);
  if (shared.transfer.publish_target(memory, target, nbytes, size)) notify(sender.message_event);
  shared.transfer.read_pieces(memory, target, nbytes, size);
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  FaultKind fault = FaultKind::kNone;
  if (shared.transfer.is_broken(nbytes)) {
    const uint64_t from = shared.transfer.source.load(std::memory_order_relaxed);
    fault = ZeroCopyTransfer::repeat(sender.process(), from, target, nbytes);
    std::atomic_thread_fence(std::memory_order_acquire);  // R3
  } else if (!shared.transfer.is_complete(nbytes)) {
    return false;
  }
  if (sender.left.load(std::memory_order_seq_cst) != 0) return false;
  if (group_.aborted() || fault == FaultKind::kPeerLost) return false;
  if (fault != FaultKind::kNone) group_.fail({fault, rank_, fault == FaultKind::kUnwritable ? rank_ : peer});
  shared.completed_transfers.fetch_add(1, std::memory_order_seq_cst);
  notify(sender.message_event);
  return true;
}

// The receiver's buffer is safe to free only when no sender writes to it any more.
void Channels::cancel_zero_copy(int peer) {
  if (channel(peer, rank_).transfer.cancel([&] { return peers_.dead(peer); })) return;
  has_open_transfers_ = true;
  if (const auto& request = incoming_[static_cast<size_t>(peer)].request; request && request->own)
    never_free(std::move(request->own));
}

}  // namespace unisono
