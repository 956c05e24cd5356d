// The fast path of small messages within a host: a message is sent or received whole, published by one store,
// without a Request. All other messages, and all that have one before them, are requests of the channels.
// The caller holds the interpreter's lock, so nothing here waits for another thread.
#include <algorithm>
#include <cstring>

#include "p2p/channels.hpp"

namespace unisono {
namespace {

constexpr size_t kEagerBytes = 32 * 1024;

// Copies between memory and a range of a ring, which may wrap around its end.
template <class Copy>
void in_ring(uint64_t position, size_t nbytes, Copy copy) {
  const uint64_t offset = position % kChannelBytes, before = std::min(nbytes, kChannelBytes - offset);
  if (before > 0) copy(offset, size_t{0}, before);
  if (before < nbytes) copy(uint64_t{0}, before, nbytes - before);
}

}  // namespace

bool SocketStreams::write_whole(int peer, std::span<const unsigned char> first,
                                std::span<const unsigned char> second) {
  const int from = state_.place(rank_), to = state_.place(peer);
  Channel& ring = state_.region().channel(from, to);
  const uint64_t start = ring.written.load(std::memory_order_relaxed);
  const uint64_t end = start + first.size() + second.size();
  uint64_t& consumed = known_consumed_[static_cast<size_t>(peer)];
  if (end - consumed > kChannelBytes)
    consumed = ring.consumed.load(std::memory_order_acquire);  // no sleep follows
  if (end - consumed > kChannelBytes) return false;
  unsigned char* const bytes = state_.region().channel_bytes(from, to);
  uint64_t position = start;
  for (const auto& piece : {first, second}) {
    in_ring(position, piece.size(), [&](uint64_t offset, size_t done, size_t nbytes) {
      std::memcpy(bytes + offset, piece.data() + done, nbytes);
    });
    position += piece.size();
  }
  ring.written.store(end, std::memory_order_seq_cst);
  notify(state_.cell(peer).message_event);
  return true;
}

bool SocketStreams::has_come(int peer) {
  const Channel& ring = state_.region().channel(state_.place(peer), state_.place(rank_));
  return ring.written.load(std::memory_order_acquire) != ring.consumed.load(std::memory_order_relaxed);
}

// Copies the bytes that begin `after` bytes behind the read position, if all of them have arrived. Returns
// how many bytes can be read.
uint64_t SocketStreams::peek(int peer, std::span<unsigned char> into, uint64_t after) {
  const int from = state_.place(peer), to = state_.place(rank_);
  const Channel& ring = state_.region().channel(from, to);
  const uint64_t position = ring.consumed.load(std::memory_order_relaxed);
  const uint64_t there = ring.written.load(std::memory_order_acquire) - position;
  if (there < after + into.size()) return there;
  const unsigned char* const bytes = state_.region().channel_bytes(from, to);
  in_ring(position + after, into.size(), [&](uint64_t offset, size_t done, size_t nbytes) {
    std::memcpy(into.data() + done, bytes + offset, nbytes);
  });
  return there;
}

void SocketStreams::consume(int peer, uint64_t nbytes) {
  Channel& ring = state_.region().channel(state_.place(peer), state_.place(rank_));
  ring.consumed.store(ring.consumed.load(std::memory_order_relaxed) + nbytes, std::memory_order_seq_cst);
  notify(state_.cell(peer).message_event);
}

bool Channels::send_now(int peer, int tag, uint32_t form, const void* data, size_t nbytes) {
  if (peer == rank_ || !state_.near(peer) || nbytes > kEagerBytes) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !works() || !sends_[static_cast<size_t>(peer)].empty() || !streams_.open(peer)) return false;
  const Header header{nbytes, tag, form};
  return streams_.write_whole(peer, {reinterpret_cast<const unsigned char*>(&header), sizeof header},
                              {static_cast<const unsigned char*>(data), nbytes});
}

bool Channels::receive_now(Request& wanted, int spins) {
  const int peer = wanted.peer;
  if (peer < 0 || peer == rank_ || !state_.near(peer)) return false;
  if (wanted.exact && wanted.nbytes > kEagerBytes) return false;
  for (int i = 0; !streams_.has_come(peer); ++i) {
    if (i >= spins) return false;
    cpu_pause();
  }
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  if (!works() || !receives_.empty() || !unexpected_.empty() || incoming.open || incoming.header_moved > 0)
    return false;
  Header header{};
  const auto place = [&]() -> std::optional<std::span<unsigned char>> {
    if (header.zero_copy() || header.nbytes > kEagerBytes || !wanted.takes(header)) return std::nullopt;
    if (wanted.tag != kAnyTag && wanted.tag != header.tag) return std::nullopt;
    wanted.accept(header);
    return std::span(wanted.data, header.nbytes);
  };
  if (!streams_.read_whole(peer, {reinterpret_cast<unsigned char*>(&header), sizeof header}, place))
    return false;
  wanted.tag = header.tag;
  return true;
}

}  // namespace unisono
