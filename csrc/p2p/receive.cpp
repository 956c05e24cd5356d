// Arriving messages. Each header is checked. The bytes go to a matching receive, are kept, or wait in the
// sender.
#include <new>

#include "p2p/channels.hpp"

namespace unisono {
namespace {

// Bytes read from one rank before the next rank's turn: at least the size of a ring, so that no thread sleeps
// while bytes are available.
constexpr uint64_t kTurnBytes = 2 * kChannelBytes;

}  // namespace

bool Channels::read_header(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  auto* const head = reinterpret_cast<unsigned char*>(&incoming.header);
  incoming.header_moved +=
      streams_.read(peer, head + incoming.header_moved, sizeof(Header) - incoming.header_moved);
  if (incoming.header_moved < sizeof(Header)) return false;
  const bool zero_copy = state_.near(peer) && state_.region().zero_copy();
  if (const FrameError bad = check(incoming.header, zero_copy); bad.kind != FrameErrorKind::kNone) {
    refuse_frame(peer, bad);
    return false;
  }
  incoming.header_moved = 0;
  incoming.moved = 0;
  incoming.open = incoming.held = true;
  return true;
}

// Finds a place for a message whose header has arrived: in a matching receive, or among the kept messages.
bool Channels::admit(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  const Header& header = incoming.header;
  incoming.request = match(peer, header);
  if (incoming.request) {
    Request& request = *incoming.request;
    request.peer = peer;
    request.tag = header.tag;
    incoming.held = !request.takes(header);
    if (incoming.held)
      refuse(request, peer, header);
    else
      allocate(peer, header, [&] { request.accept(header); });
    if (!incoming.held) return true;
    incoming.request = nullptr;
  }
  if (!room_for(peer, header.nbytes)) return false;
  allocate(peer, header, [&] {
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[header.nbytes]);
    incoming.kept =
        unexpected_.insert(unexpected_.end(), UnexpectedMessage{peer, header, std::move(bytes), false});
  });
  kept_bytes_[static_cast<size_t>(peer)] += header.nbytes + kKeptOverhead;
  incoming.held = false;
  return true;
}

bool Channels::room_for(int peer, uint64_t nbytes) const {
  const uint64_t wanted = kept_bytes_[static_cast<size_t>(peer)] + nbytes + kKeptOverhead;
  if (wanted <= kKeptBytes) return true;
  uint64_t sending = 0;
  for (const auto& queue : sends_)
    for (const auto& request : queue) sending += request->nbytes;
  return wanted <= kKeptBytes + sending;
}

void Channels::forget(std::list<UnexpectedMessage>::iterator kept) {
  if (kept->peer != rank_)
    kept_bytes_[static_cast<size_t>(kept->peer)] -= kept->header.nbytes + kKeptOverhead;
  unexpected_.erase(kept);
}

template <class Make>
void Channels::allocate(int peer, const Header& header, Make make) {
  try {
    make();
  } catch (const std::bad_alloc&) {
    failed_ = true;  // the header is lost: the next one cannot be found
    no_memory_.about = peer;
    no_memory_.misfit = {header.tag, header.form(), header.form(), 0, header.nbytes};
    throw;
  }
}

void Channels::pull(int peer, LargeMessages large) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  // A rank that has left, or is in an aborted group, sends nothing more: read all that has arrived.
  const bool over = state_.aborted() || state_.cell(peer).left.load(std::memory_order_acquire) != 0;
  uint64_t taken = 0;
  while (incoming.open || ((over || taken < kTurnBytes) && read_header(peer))) {
    if (large == LargeMessages::kLater && incoming.header.nbytes >= kLarge) return;
    const bool placed = !incoming.held || admit(peer);
    streams_.listen(peer, placed);
    if (!placed) return;
    const uint64_t before = incoming.moved;
    unsigned char* const target = incoming.request ? incoming.request->data : incoming.kept->bytes.get();
    if (incoming.header.zero_copy()) {
      if (!borrow(peer, target)) return;
    } else {
      incoming.moved += streams_.read(peer, target + incoming.moved, incoming.header.nbytes - incoming.moved);
      if (incoming.moved < incoming.header.nbytes) return;
    }
    taken += sizeof(Header) + incoming.moved - before;
    finish_incoming(peer);
  }
}

// A receive may have been posted while a kept message was arriving. It gets the message now that it is whole.
void Channels::finish_incoming(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  incoming.open = false;
  if (incoming.request) {
    finish(*incoming.request, FaultKind::kNone);
    incoming.request = nullptr;
    return;
  }
  incoming.kept->whole = true;
  const std::shared_ptr<Request> request = match(peer, incoming.header);
  if (!request) return;
  deliver(*request, peer, incoming.header, incoming.kept->bytes.get());
  forget(incoming.kept);
}

// After a bad frame nothing on this connection can be trusted: the group ends.
void Channels::refuse_frame(int peer, const FrameError& bad) {
  failed_ = true;
  streams_.hang_up(peer);
  Fault fault{FaultKind::kBadFrame, rank_, peer};
  fault.frame = bad;
  try {
    waiter(patience_).fail(fault);
  } catch (const Fault&) {  // this or an earlier one: the abort cell has it
  }
}

}  // namespace unisono
