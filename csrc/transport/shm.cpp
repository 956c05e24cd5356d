#include "transport/shm.hpp"

#include <bit>
#include <cstring>

namespace unisono {
namespace {

constexpr uint64_t kWarmBytes = 64 * 1024;

uint64_t aligned(uint64_t bytes) { return (bytes + 63) & ~uint64_t{63}; }

// Whether counter `a` has reached `b`; counters wrap.
bool reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

}  // namespace

ShmTransport::ShmTransport(World& world, const Peers& peers, int rank)
    : world_(world),
      peers_(peers),
      rank_(rank),
      ring_(world.region().staging(world.place(rank))),
      ring_bytes_(world.region().staging_bytes()),
      loans_(std::bit_ceil(size_t{world.region().ranks()} * kLaneEntries)) {
  Region& region = world.region();
  for (int peer = 0; peer < world.ranks(); ++peer) {
    const int mine = world.place(rank), theirs = world.place(peer);
    if (theirs < 0)
      edges_.push_back({});
    else
      edges_.push_back({&region.lane(mine, theirs), &region.lane(theirs, mine),
                        &world.cell(peer).collective_event, region.staging(theirs), 0, 0, 0});
  }
}

bool ShmTransport::acked(int peer, uint32_t number) {
  Edge& to = edge(peer);
  if (reached(to.known_acked, number)) return true;
  to.known_acked = to.out->acked.load(std::memory_order_seq_cst);  // R2: checked before a sleep
  if (reached(to.known_acked, number)) return true;
  blocking_peer_ = peer;
  return false;
}

bool ShmTransport::lanes_have_room(std::span<const int> peers) {
  for (int peer : peers)
    if (!acked(peer, edge(peer).sent + 1 - kLaneEntries)) return false;
  return true;
}

// Frees the bytes of the oldest staged message; false while its receiver still reads it.
bool ShmTransport::reclaim() {
  const Staged& loan = loans_[first_loan_ & (loans_.size() - 1)];
  if (!acked(loan.peer, loan.number)) return false;
  ring_tail_ = loan.free_to;
  ++first_loan_;
  return true;
}

// Small messages should not walk through the whole ring, most of which is in no cache: when nothing is in
// flight, the ring restarts at its beginning.
void ShmTransport::start_over() {
  while (first_loan_ != last_loan_)
    if (!reclaim()) return;
  ring_head_ = ring_tail_ = (ring_head_ / ring_bytes_ + 1) * ring_bytes_;
}

// A message is contiguous: where it would wrap around the ring's end, the rest of the ring is skipped.
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

void ShmTransport::commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void*) {
  const bool small = nbytes <= kInlineBytes;
  for (int peer : peers) {
    Edge& to = edge(peer);
    const uint32_t number = ++to.sent;
    LaneEntry& entry = announced(*to.out, number);
    entry.place = Place::kStaged;
    entry.fingerprint = fingerprint;
    entry.nbytes = nbytes;
    if (small) {
      std::memcpy(entry.payload, small_, kInlineBytes);
    } else {
      entry.offset = reserved_ % ring_bytes_;
      loans_[last_loan_++ & (loans_.size() - 1)] = {peer, number, ring_tail_};
    }
    entry.number.store(number, std::memory_order_seq_cst);  // R1: the message; R2: before `notify`
    notify(*to.event);
  }
  if (small || peers.empty()) return;
  ring_head_ = reserved_ + aligned(nbytes);
  // Only the last receiver's entry frees the bytes of the message; the others free nothing new.
  for (uint64_t i = last_loan_ - peers.size(); i < last_loan_; ++i)
    loans_[i & (loans_.size() - 1)].free_to = i + 1 == last_loan_ ? ring_head_ : reserved_;
}

bool ShmTransport::peek(int peer, size_t, void*, Message& message) {
  Edge& from = edge(peer);
  const uint32_t number = from.received + 1;
  const LaneEntry& entry = announced(*from.in, number);
  if (entry.number.load(std::memory_order_seq_cst) != number) return false;  // R1, R2
  message.nbytes = entry.nbytes;
  message.fingerprint = entry.fingerprint;
  message.lent = message.open = false;
  if (entry.place != Place::kStaged) [[unlikely]] {
    message.data = entry.place == Place::kOpen ? read_in_place(peer, entry) : nullptr;
    message.open = message.data != nullptr;
    message.lent = !message.open;
    return true;
  }
  message.data =
      entry.nbytes <= kInlineBytes ? static_cast<const void*>(entry.payload) : from.staging + entry.offset;
  return true;
}

void ShmTransport::release(int peer) {
  Edge& from = edge(peer);
  from.in->acked.store(++from.received, std::memory_order_seq_cst);  // R1: behind all reads; R2
  notify(*from.event);
}

// ---- messages that are lent ------------------------------------------------------------------------

bool ShmTransport::lends(std::span<const int>) const { return world_.region().lending(); }

bool ShmTransport::opens(const void* from, size_t nbytes) const {
  const Arena* const arena = Arena::made();
  return arena != nullptr && arena->holds(from, nbytes) && world_.region().lending();
}

bool ShmTransport::lend(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from,
                        bool open) {
  if (!lanes_have_room(peers)) return false;
  forget_returned();
  const Place place = open ? Place::kOpen : Place::kLent;
  world_.publish_arena(rank_);
  for (int peer : peers) {
    Edge& to = edge(peer);
    const uint32_t number = ++to.sent;
    LaneEntry& entry = announced(*to.out, number);
    entry.place = place;
    entry.fingerprint = fingerprint;
    entry.nbytes = nbytes;
    entry.loan.offer(from);
    lent_.push_back({peer, number, nbytes, place});
    entry.number.store(number, std::memory_order_seq_cst);  // R1, R2, as in commit
    notify(*to.event);
  }
  return true;
}

void ShmTransport::assist() {
  for (const Lent& lent : lent_) {
    Edge& to = edge(lent.peer);
    if (reached(to.out->acked.load(std::memory_order_acquire), lent.number)) continue;  // returned already
    Loan& loan = announced(*to.out, lent.number).loan;
    if (loan.opened() && loan.help(world_.memory_of(lent.peer), lent.nbytes)) notify(*to.event);
  }
}

void ShmTransport::forget_returned() {
  while (!lent_.empty() && acked(lent_.front().peer, lent_.front().number)) lent_.pop_front();
}

bool ShmTransport::returned() {
  forget_returned();
  return lent_.empty();
}

// The receiver maps the sender's arena at the first such message. Where that fails, the message is a loan.
const void* ShmTransport::read_in_place(int peer, const LaneEntry& entry) {
  const ArenaView* const arena = world_.memory_of(peer).view;
  return arena == nullptr ? nullptr
                          : arena->at(entry.loan.source.load(std::memory_order_relaxed), entry.nbytes);
}

// A lender that has aborted may have changed its memory: it published the abort first, so the check after the
// copy sees it.
bool ShmTransport::fetch(int peer, const Message& message, void* into) {
  Edge& from = edge(peer);
  Loan& loan = announced(*from.in, from.received + 1).loan;
  world_.publish_arena(rank_);
  if (loan.open(into)) notify(*from.event);
  loan.take(world_.memory_of(peer), into, message.nbytes);
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  return loan.whole(message.nbytes) && !world_.aborted();
}

bool ShmTransport::abandon(int peer) {
  Edge& from = edge(peer);
  return announced(*from.in, from.received + 1).loan.end([&] { return peers_.dead(peer); });
}

}  // namespace unisono
