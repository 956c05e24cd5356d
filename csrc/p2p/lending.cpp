// Lent messages between two ranks, which do not go through their stream: see loan.hpp.
#include "p2p/channels.hpp"

namespace unisono {
namespace {

// Messages of at least this size are lent, where ranks can read each other's memory.
constexpr uint64_t kLendBytes = 512 * 1024;

}  // namespace

Channel& Channels::channel(int sender, int receiver) {
  return world_.region().channel(world_.place(sender), world_.place(receiver));
}

// Called before the header is written. One message at a time is lent to a rank: later ones wait.
void Channels::offer(Request& request) {
  if (request.nbytes < kLendBytes || !world_.near(request.peer) || !world_.region().lending()) return;
  if (!accessible(request.data, request.nbytes)) return;
  request.lent = true;
  world_.publish_arena(rank_);
  ++lent_[static_cast<size_t>(request.peer)];
  channel(rank_, request.peer).loan.offer(request.data);
}

// Whether the receiver has returned the loan; helps it to copy.
bool Channels::lend(Request& request) {
  Channel& lane = channel(rank_, request.peer);
  RankCell& receiver = world_.cell(request.peer);
  if (lane.loan.opened() && lane.loan.help(world_.memory_of(request.peer), request.nbytes))
    notify(receiver.message_event);
  return lane.returned.load(std::memory_order_seq_cst) == lent_[static_cast<size_t>(request.peer)];
}

// Whether a lent message has arrived. A lender that has aborted or left may have changed its memory: it
// published that first, so the checks after the copy see it.
bool Channels::borrow(int peer, unsigned char* target) {
  const uint64_t nbytes = incoming_[static_cast<size_t>(peer)].header.nbytes;
  Channel& lane = channel(peer, rank_);
  RankCell& lender = world_.cell(peer);
  world_.publish_arena(rank_);
  if (lane.loan.open(target)) notify(lender.message_event);
  lane.loan.take(world_.memory_of(peer), target, nbytes);
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  if (!lane.loan.whole(nbytes)) return false;
  if (lender.left.load(std::memory_order_seq_cst) != 0) return false;
  if (world_.aborted()) return false;
  lane.returned.fetch_add(1, std::memory_order_seq_cst);
  notify(lender.message_event);
  return true;
}

// The receiver's buffer is safe to free only when no lender writes to it any more.
void Channels::give_up(int peer) {
  if (channel(peer, rank_).loan.end([&] { return peers_.dead(peer); })) return;
  unsettled_ = true;
  if (const auto& request = incoming_[static_cast<size_t>(peer)].request; request && request->own)
    never_free(std::move(request->own));
}

}  // namespace unisono
