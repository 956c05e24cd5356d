#include "shm.hpp"

#include <bit>
#include <cstring>

#include "waiting.hpp"

namespace unisono {
namespace {

constexpr uint64_t kWarmBytes = 64 * 1024;

uint64_t aligned(uint64_t bytes) { return (bytes + 63) & ~uint64_t{63}; }

// Whether counter `a` has reached `b`; counters wrap.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

ShmTransport::ShmTransport(Region& region, int rank)
    : region_(region),
      rank_(rank),
      ring_(region.staging(rank)),
      ring_bytes_(region.staging_bytes()),
      sent_(region.ranks(), 0),
      known_acked_(region.ranks(), 0),
      received_(region.ranks(), 0),
      loans_(std::bit_ceil(size_t{region.ranks()} * kLaneEntries)) {}

bool ShmTransport::acked(int peer, uint32_t number) {
  const auto i = static_cast<size_t>(peer);
  if (reached(known_acked_[i], number)) return true;
  known_acked_[i] = region_.lane(rank_, peer).acked.load(std::memory_order_seq_cst);
  if (reached(known_acked_[i], number)) return true;
  blocking_peer_ = peer;
  return false;
}

bool ShmTransport::lanes_have_room(std::span<const int> peers) {
  for (int peer : peers)
    if (!acked(peer, sent_[static_cast<size_t>(peer)] + 1 - kLaneEntries)) return false;
  return true;
}

// Takes back the oldest loan; false while its receiver still holds it.
bool ShmTransport::reclaim() {
  const Loan& loan = loans_[first_loan_ & (loans_.size() - 1)];
  if (!acked(loan.peer, loan.number)) return false;
  ring_tail_ = loan.free_to;
  ++first_loan_;
  return true;
}

// Small messages should not wander through all of the ring, whose lines are in nobody's cache: when
// nothing is on loan, begin at its start again.
void ShmTransport::start_over() {
  while (first_loan_ != last_loan_)
    if (!reclaim()) return;
  ring_head_ = ring_tail_ = (ring_head_ / ring_bytes_ + 1) * ring_bytes_;
}

// A message lies in one piece: where the ring's end would cut it, the rest of the lap is skipped.
unsigned char* ShmTransport::ring_room(size_t nbytes) {
  if (ring_head_ % ring_bytes_ >= kWarmBytes) start_over();
  uint64_t start = ring_head_;
  const uint64_t offset = start % ring_bytes_;
  if (offset + nbytes > ring_bytes_) start += ring_bytes_ - offset;
  while (start + aligned(nbytes) - ring_tail_ > ring_bytes_)
    if (!reclaim()) return nullptr;
  reserved_ = start;
  return ring_ + start % ring_bytes_;
}

void* ShmTransport::reserve(std::span<const int> peers, size_t nbytes) {
  if (!lanes_have_room(peers)) return nullptr;
  if (nbytes <= kInlineBytes) return small_;
  while (last_loan_ - first_loan_ + peers.size() > loans_.size())
    if (!reclaim()) return nullptr;
  return ring_room(nbytes);
}

void ShmTransport::commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint) {
  const bool small = nbytes <= kInlineBytes;
  for (int peer : peers) {
    const uint32_t number = ++sent_[static_cast<size_t>(peer)];
    LaneEntry& entry = region_.lane(rank_, peer).entries[(number - 1) % kLaneEntries];
    entry.fingerprint = fingerprint;
    entry.nbytes = nbytes;
    if (small) {
      std::memcpy(entry.payload, small_, kInlineBytes);
    } else {
      entry.offset = reserved_ % ring_bytes_;
      loans_[last_loan_++ & (loans_.size() - 1)] = {peer, number, ring_tail_};
    }
    entry.number.store(number, std::memory_order_seq_cst);
    Waiter::ring(region_.cell(peer).bell);
  }
  if (small || peers.empty()) return;
  ring_head_ = reserved_ + aligned(nbytes);
  // Only the last receiver of a message frees its bytes; the others free what was free before.
  for (uint64_t i = last_loan_ - peers.size(); i < last_loan_; ++i)
    loans_[i & (loans_.size() - 1)].free_to = i + 1 == last_loan_ ? ring_head_ : reserved_;
}

bool ShmTransport::peek(int peer, Message& message) {
  const uint32_t number = received_[static_cast<size_t>(peer)] + 1;
  const LaneEntry& entry = region_.lane(peer, rank_).entries[(number - 1) % kLaneEntries];
  if (entry.number.load(std::memory_order_seq_cst) != number) return false;
  message.nbytes = entry.nbytes;
  message.fingerprint = entry.fingerprint;
  message.data = entry.nbytes <= kInlineBytes ? static_cast<const void*>(entry.payload)
                                              : region_.staging(peer) + entry.offset;
  return true;
}

void ShmTransport::release(int peer) {
  const uint32_t number = ++received_[static_cast<size_t>(peer)];
  region_.lane(peer, rank_).acked.store(number, std::memory_order_seq_cst);
  Waiter::ring(region_.cell(peer).bell);
}

}  // namespace unisono
