// Arriving messages. Each header is checked. The bytes go to a matching receive, are kept, or wait in the
// sender.
#include <algorithm>
#include <new>
#include <utility>

#include "p2p/channels.hpp"

namespace unisono {

// Reads headers until the bytes of a message follow.
bool Channels::read_header(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  auto* const head = reinterpret_cast<unsigned char*>(&incoming.header);
  for (;;) {
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
    if (incoming.header.frame() == MessageFrame::kMessage) {
      incoming.arriving = incoming.unmatched = true;
      return true;
    }
    if (!take_frame(peer)) {
      const uint64_t number = incoming.header.nbytes;
      refuse_frame(peer, {ConnectionKind::kMessages, FrameErrorKind::kOffer, number});
      return false;
    }
    if (incoming.arriving) return true;
  }
}

// Finds a place for a message whose header has arrived: in a matching receive, or among the kept messages.
void Channels::accept_message(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  const Header& header = incoming.header;
  incoming.unmatched = false;
  incoming.request = take_match(peer, header);
  if (incoming.request) {
    Request& request = *incoming.request;
    request.peer = peer;
    request.tag = header.tag;
    if (request.takes(header)) return allocate(peer, header, [&] { request.accept(header); });
    refuse(request, peer, header);
    incoming.request = nullptr;
  }
  incoming.message = add_unexpected(peer, header, nullptr);
  store(peer, header, *incoming.message);
}

// Allocates the memory of a kept message.
void Channels::store(int peer, const Header& header, UnexpectedMessage& message) {
  allocate(peer, header, [&] { message.bytes.reset(new unsigned char[header.nbytes]); });
  uint64_t& stored = unexpected_bytes_[static_cast<size_t>(peer)];
  stored += header.nbytes + kUnexpectedOverhead;
  message.counted = true;
  if (stored > kFullBytes && !std::exchange(offers(peer).told_full, true)) tell(peer, MessageFrame::kFull);
}

bool Channels::can_store(int peer, uint64_t nbytes) const {
  const uint64_t wanted = unexpected_bytes_[static_cast<size_t>(peer)] + nbytes + kUnexpectedOverhead;
  if (wanted <= kUnexpectedBytes) return true;
  uint64_t sending = 0;
  each_send([&](const auto& request) { sending += request->nbytes; });
  return wanted <= kUnexpectedBytes + sending;
}

Channels::Unexpected::iterator Channels::add_unexpected(int peer, const Header& header,
                                                        std::unique_ptr<unsigned char[]> bytes) {
  const auto message =
      unexpected_.insert(unexpected_.end(), UnexpectedMessage{peer, header, std::move(bytes)});
  message->place = message;
  auto link = message->links.begin();
  for (const int source : {peer, kAnyRank})
    for (const int tag : {int{header.tag}, any_tag_like(header.tag)})
      kept_.append(*link++, source, tag, *message);
  has_unexpected_.store(true, std::memory_order_relaxed);
  return message;
}

// A receive gets it.
void Channels::take_unexpected(UnexpectedMessage& message) {
  for (MessageLink& link : message.links) kept_.remove(link);
  if (const auto sender = std::exchange(message.sender, nullptr)) finish(*sender, FaultKind::kNone);
}

void Channels::erase_unexpected(Unexpected::iterator message) {
  const int peer = message->peer;
  take_unexpected(*message);
  if (message->counted) {
    uint64_t& stored = unexpected_bytes_[static_cast<size_t>(peer)];
    stored -= message->header.nbytes + kUnexpectedOverhead;
    if (stored <= kRoomBytes && std::exchange(offers(peer).told_full, false)) tell(peer, MessageFrame::kRoom);
    may_store_ = true;
  }
  unexpected_.erase(message);
  has_unexpected_.store(!unexpected_.empty(), std::memory_order_relaxed);
}

template <class Make>
void Channels::allocate(int peer, const Header& header, Make make) {
  try {
    make();
  } catch (const std::bad_alloc&) {
    failed_ = true;  // the header is lost: the next one cannot be found
    memory_fault_.rank = peer;
    memory_fault_.size_mismatch = {plain_tag(header.tag), header.form(), header.form(), 0, header.nbytes};
    throw;
  }
}

void Channels::pull(int peer, LargeMessages large) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  // A rank that has left, or is in an aborted group, sends nothing more: read all that has arrived.
  const bool over = group_.aborted() || group_.cell(peer).left.load(std::memory_order_acquire) != 0;
  // Bytes read before the next rank's turn: at least a ring, so that no thread sleeps while bytes are there.
  const uint64_t turn = 2 * group_.region().channel_bytes();
  uint64_t taken = 0;
  while (incoming.arriving || ((over || taken < turn) && read_header(peer))) {
    const bool later = large == LargeMessages::kLater && incoming.header.nbytes >= kLarge;
    if (incoming.unmatched) {
      if (later && first_match(peer, incoming.header.tag) == nullptr) return;
      accept_message(peer);
    }
    if (later) return;
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

// A receive may have matched a kept message while that was arriving. It gets the message now that it is
// whole.
void Channels::finish_incoming(int peer) {
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  incoming.arriving = false;
  if (incoming.request) {
    finish(*incoming.request, FaultKind::kNone);
    incoming.request = nullptr;
    return;
  }
  UnexpectedMessage& message = *incoming.message;
  message.whole = true;
  if (!message.request) message.request = take_match(peer, incoming.header);
  if (!message.request) return;
  deliver(*message.request, message);
  erase_unexpected(incoming.message);
}

// ---- receives into memory that sends under way read -------------------------------------------------

// Such a receive keeps its place among the receives. Its message is kept until those sends are done.
bool Channels::held(const Request& receive) const {
  return std::ranges::any_of(receive.readers, [](const auto& send) { return !send->done.load(); });
}

void Channels::hold_back(Request& receive) {
  if (!sent_from_.overlaps(receive.data, receive.nbytes)) return;
  each_send([&](const auto& send) {
    if (overlap(receive.data, receive.nbytes, send->data, send->nbytes)) receive.readers.push_back(send);
  });
  if (!receive.readers.empty()) ++held_;
}

bool Channels::is_sent_from(const unsigned char* data, uint64_t nbytes) const {
  bool found = false;
  if (!sent_from_.overlaps(data, nbytes)) return found;
  each_send([&](const auto& send) { found = found || overlap(data, nbytes, send->data, send->nbytes); });
  return found;
}

// Gives kept messages to the receives that are no longer held, in order.
void Channels::deliver_held() {
  released_ = false;
  for (bool again = true; std::exchange(again, false);) {
    for (const auto& receive : receives_) {
      Request& request = *receive;
      if (held(request)) continue;
      if (!request.readers.empty()) --held_;
      request.readers.clear();
      if (!deliver_unexpected(request)) continue;
      again = true;
      break;
    }
  }
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
