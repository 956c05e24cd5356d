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
  const bool zero_copy = group_.on_this_host(peer) && group_.region().zero_copy();
  if (const FrameError bad = check(incoming.header, zero_copy); bad.kind != FrameErrorKind::kNone) {
    refuse_frame(peer, bad);
    return false;
  }
  incoming.header_moved = 0;
  incoming.moved = 0;
  incoming.arriving = incoming.unmatched = true;
  return true;
}

// Finds a place for a message whose header has arrived: in a matching receive, or among the kept messages.
bool Channels::accept_message(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  const Header& header = incoming.header;
  incoming.request = take_match(peer, header);
  if (incoming.request) {
    Request& request = *incoming.request;
    request.peer = peer;
    request.tag = header.tag;
    incoming.unmatched = !request.takes(header);
    if (incoming.unmatched)
      refuse(request, peer, header);
    else
      allocate(peer, header, [&] { request.accept(header); });
    if (!incoming.unmatched) return true;
    incoming.request = nullptr;
  }
  const bool wanted = first_match(peer, header) != receives_.end();  // by a receive that is held
  if (!wanted && !can_store(peer, header.nbytes)) return false;
  allocate(peer, header, [&] {
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[header.nbytes]);
    incoming.message =
        unexpected_.insert(unexpected_.end(), UnexpectedMessage{peer, header, std::move(bytes), false});
  });
  unexpected_bytes_[static_cast<size_t>(peer)] += header.nbytes + kUnexpectedOverhead;
  incoming.unmatched = false;
  return true;
}

bool Channels::can_store(int peer, uint64_t nbytes) const {
  const uint64_t wanted = unexpected_bytes_[static_cast<size_t>(peer)] + nbytes + kUnexpectedOverhead;
  if (wanted <= kUnexpectedBytes) return true;
  uint64_t sending = 0;
  for (const auto& queue : sends_)
    for (const auto& request : queue) sending += request->nbytes;
  return wanted <= kUnexpectedBytes + sending;
}

void Channels::erase_unexpected(std::list<UnexpectedMessage>::iterator message) {
  if (message->peer != rank_)
    unexpected_bytes_[static_cast<size_t>(message->peer)] -= message->header.nbytes + kUnexpectedOverhead;
  unexpected_.erase(message);
}

template <class Make>
void Channels::allocate(int peer, const Header& header, Make make) {
  try {
    make();
  } catch (const std::bad_alloc&) {
    failed_ = true;  // the header is lost: the next one cannot be found
    memory_fault_.rank = peer;
    memory_fault_.size_mismatch = {header.tag, header.form(), header.form(), 0, header.nbytes};
    throw;
  }
}

void Channels::pull(int peer, LargeMessages large) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  // A rank that has left, or is in an aborted group, sends nothing more: read all that has arrived.
  const bool over = group_.aborted() || group_.cell(peer).left.load(std::memory_order_acquire) != 0;
  uint64_t taken = 0;
  while (incoming.arriving || ((over || taken < kTurnBytes) && read_header(peer))) {
    if (large == LargeMessages::kLater && incoming.header.nbytes >= kLarge) return;
    const bool accepted = !incoming.unmatched || accept_message(peer);
    streams_.listen(peer, accepted);
    if (!accepted) return;
    const uint64_t before = incoming.moved;
    unsigned char* const target = incoming.request ? incoming.request->data : incoming.message->bytes.get();
    if (incoming.header.zero_copy()) {
      if (!fetch_zero_copy(peer, target)) return;
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
  incoming.arriving = false;
  if (incoming.request) {
    finish(*incoming.request, FaultKind::kNone);
    incoming.request = nullptr;
    return;
  }
  incoming.message->whole = true;
  const std::shared_ptr<Request> request = take_match(peer, incoming.header);
  if (!request) return;
  deliver(*request, peer, incoming.header, incoming.message->bytes.get());
  erase_unexpected(incoming.message);
}

// After a bad frame nothing on this connection can be trusted: the group ends.
void Channels::refuse_frame(int peer, const FrameError& bad) {
  failed_ = true;
  streams_.disconnect(peer);
  Fault fault{FaultKind::kBadFrame, rank_, peer};
  fault.frame = bad;
  try {
    waiter(wait_policy_).fail(fault);
  } catch (const Fault&) {  // this or an earlier one: the abort cell has it
  }
}

}  // namespace unisono
