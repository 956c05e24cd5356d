// The fast path of small messages within a host: a message is sent or received whole, published by one store,
// without a Request. All other messages, and all that have one before them, are requests of the channels.
// The caller holds the interpreter's lock, so nothing here waits for another thread.
#include <algorithm>
#include <cstring>

#include "p2p/channels.hpp"

namespace unisono {
namespace {

constexpr size_t kEagerBytes = 32 * 1024;

// Copies between memory and a range of a ring of `size` bytes, which may wrap around its end.
template <class Copy>
void in_ring(uint64_t size, uint64_t position, size_t nbytes, Copy copy) {
  const uint64_t offset = position & (size - 1), before = std::min(nbytes, size - offset);
  if (before > 0) copy(offset, size_t{0}, before);
  if (before < nbytes) copy(uint64_t{0}, before, nbytes - before);
}

}  // namespace

bool SocketStreams::write_whole(int peer, std::span<const unsigned char> first,
                                std::span<const unsigned char> second) {
  const int from = group_.region_index(rank_), to = group_.region_index(peer);
  Channel& ring = group_.region().channel(from, to);
  const uint64_t start = ring.written.load(std::memory_order_relaxed);
  const uint64_t end = start + first.size() + second.size();
  const uint64_t size = group_.region().channel_bytes();
  uint64_t& consumed = known_consumed_[static_cast<size_t>(peer)];
  if (end - consumed > size)
    consumed = ring.consumed.load(std::memory_order_acquire);  // no sleep follows
  if (end - consumed > size) return false;
  unsigned char* const bytes = group_.region().channel_ring(from, to);
  uint64_t position = start;
  for (const auto& piece : {first, second}) {
    in_ring(size, position, piece.size(), [&](uint64_t offset, size_t done, size_t nbytes) {
      shared_copies_[static_cast<size_t>(peer)].copy(bytes + offset, piece.data() + done, nbytes);
    });
    position += piece.size();
  }
  ring.written.store(end, std::memory_order_seq_cst);
  notify(group_.cell(peer).message_event);
  return true;
}

bool SocketStreams::has_arrived(int peer) {
  const Channel& ring = group_.region().channel(group_.region_index(peer), group_.region_index(rank_));
  return ring.written.load(std::memory_order_acquire) != ring.consumed.load(std::memory_order_relaxed);
}

// Copies the bytes that begin `after` bytes behind the read position, if all of them have arrived. Returns
// how many bytes can be read.
uint64_t SocketStreams::peek(int peer, std::span<unsigned char> into, uint64_t after) {
  const int from = group_.region_index(peer), to = group_.region_index(rank_);
  const Channel& ring = group_.region().channel(from, to);
  const uint64_t position = ring.consumed.load(std::memory_order_relaxed);
  const uint64_t available = ring.written.load(std::memory_order_acquire) - position;
  if (available < after + into.size()) return available;
  const unsigned char* const bytes = group_.region().channel_ring(from, to);
  in_ring(group_.region().channel_bytes(), position + after, into.size(), [&](uint64_t offset, size_t done, size_t nbytes) {
    std::memcpy(into.data() + done, bytes + offset, nbytes);
  });
  return available;
}

void SocketStreams::consume(int peer, uint64_t nbytes) {
  Channel& ring = group_.region().channel(group_.region_index(peer), group_.region_index(rank_));
  ring.consumed.store(ring.consumed.load(std::memory_order_relaxed) + nbytes, std::memory_order_seq_cst);
  notify(group_.cell(peer).message_event);
}

bool Channels::send_now(int peer, int tag, uint32_t form, const void* data, size_t nbytes) {
  if (peer == rank_ || !group_.on_this_host(peer) || nbytes > kEagerBytes) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !is_running() || !sends_[static_cast<size_t>(peer)].empty() || !streams_.open(peer))
    return false;
  Offers& to = offers(peer);
  if (to.peer_is_full) return false;
  if ((to.sent_at_once += nbytes + sizeof(Header)) > group_.region().channel_bytes()) {
    to.sent_at_once = 0;
    if (streams_.has_arrived(peer)) return false;  // perhaps that the peer is full
  }
  const Header header{nbytes, tag, form};
  return streams_.write_whole(peer, {reinterpret_cast<const unsigned char*>(&header), sizeof header},
                              {static_cast<const unsigned char*>(data), nbytes});
}

// ---- the receiver ----------------------------------------------------------------------------------

// A rank of this host from which bytes have arrived; -1: there is none. From any rank: each in turn is the
// first.
int Channels::arrived_from(int wanted) {
  if (wanted >= 0)
    return wanted != rank_ && group_.on_this_host(wanted) && streams_.has_arrived(wanted) ? wanted : -1;
  if (group_.spans_hosts()) return -1;
  const int ranks = group_.ranks(), first = first_looked_at_.load(std::memory_order_relaxed);
  for (int i = 0; i < ranks; ++i) {
    const int peer = first + i < ranks ? first + i : first + i - ranks;
    if (peer == rank_ || !streams_.has_arrived(peer)) continue;
    first_looked_at_.store(peer + 1 < ranks ? peer + 1 : 0, std::memory_order_relaxed);
    return peer;
  }
  return -1;
}

// Whether the front of the ring from `peer` is the header of the next message: nothing of it has been read.
bool Channels::front_is_next(int peer) {
  const IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  return !incoming.arriving && incoming.header_moved == 0;
}

bool Channels::receive_now(Transfer& wanted, int spins) {
  if (wanted.exact && wanted.nbytes > kEagerBytes) return false;
  wanted.raw = raw;
  if (has_unexpected_.load(std::memory_order_relaxed) && receive_kept(wanted)) return true;
  int peer = arrived_from(wanted.peer);
  for (int i = 0; peer < 0; ++i, peer = arrived_from(wanted.peer)) {
    if (i >= spins) return false;
    cpu_pause();
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !is_running() || !front_is_next(peer)) return false;
  if (kept_.first(wanted.peer, wanted.tag) != nullptr) return false;
  if (open_sends_ > 0 && is_sent_from(wanted.data, wanted.nbytes)) return false;
  return receive_front(peer, wanted);
}

// Takes a whole message that was kept.
bool Channels::receive_kept(Transfer& wanted) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !is_running() || held_ > 0) return false;
  const MessageLink* const link = kept_.first(wanted.peer, wanted.tag);
  if (link == nullptr || (open_sends_ > 0 && is_sent_from(wanted.data, wanted.nbytes))) return false;
  UnexpectedMessage& message = *link->entry;
  if (!message.whole || message.header.nbytes > kEagerBytes || !wanted.takes(message.header)) return false;
  wanted.peer = message.peer;
  wanted.tag = message.header.tag;
  wanted.accept(message.header, std::move(message.bytes));
  erase_unexpected(message.place);
  return true;
}

// Takes the message at the front of a ring, unless it is another one's.
bool Channels::receive_front(int peer, Transfer& wanted) {
  Header header{};
  const auto buffer_of = [&]() -> std::optional<std::span<unsigned char>> {
    if (header.frame() != MessageFrame::kMessage || header.zero_copy() || header.nbytes > kEagerBytes ||
        !wanted.takes(header))
      return std::nullopt;
    if (!matches(peer, wanted.tag, peer, header.tag)) return std::nullopt;
    if (first_match(peer, header.tag) != nullptr) return std::nullopt;
    wanted.accept(header);
    return std::span(wanted.data, header.nbytes);
  };
  if (!streams_.read_whole(peer, {reinterpret_cast<unsigned char*>(&header), sizeof header}, buffer_of))
    return false;
  wanted.peer = peer;
  wanted.tag = header.tag;
  return true;
}

bool Channels::peek_now(int peer, int tag, int spins, std::optional<MessageEnvelope>& found) {
  for (int i = 0; !has_unexpected_.load(std::memory_order_relaxed) && arrived_from(peer) < 0; ++i) {
    if (i >= spins) return false;
    cpu_pause();
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !is_running() || held_ > 0) return false;
  if (const MessageLink* const link = kept_.first(peer, tag)) {
    found = envelope(link->entry->peer, link->entry->header);
    return true;
  }
  const int source = arrived_from(peer);
  if (source < 0 || !front_is_next(source)) return false;
  Header header{};
  streams_.read_whole(source, {reinterpret_cast<unsigned char*>(&header), sizeof header}, [&] {
    const bool zero_copy = group_.region().zero_copy();
    if (header.frame() == MessageFrame::kMessage && check(header, zero_copy).kind == FrameErrorKind::kNone &&
        matches(peer, tag, source, header.tag) && first_match(source, header.tag) == nullptr)
      found = envelope(source, header);
    return std::optional<std::span<unsigned char>>();
  });
  return found.has_value();
}

}  // namespace unisono
