// Messages that are offered before they are sent (a rendezvous, as in MPI libraries): the header goes ahead,
// the bytes wait in the sender until the receiver asks for them. So a receiver that has no more room for
// unexpected messages still learns of all of them, and takes them in any order.
#include <algorithm>
#include <utility>

#include "p2p/channels.hpp"

namespace unisono {

// ---- the sender ------------------------------------------------------------------------------------

// Whether the header of the first send to `peer` is written.
bool Channels::write_header(int peer, Request& request) {
  if (request.header_moved == 0) {
    // One that has begun a zero-copy transfer stays what it is, though there was no room for its header.
    if (request.frame == MessageFrame::kMessage && !request.zero_copy && must_offer(peer, request)) {
      request.frame = request.synchronous ? MessageFrame::kSynchronousOffer : MessageFrame::kOffer;
      request.number = ++offers(peer).made;
    }
    const bool moves = request.frame == MessageFrame::kMessage || request.frame == MessageFrame::kGranted;
    if (moves && !request.zero_copy) begin_zero_copy(request);
  }
  if (request.header_moved == sizeof(Header)) return true;
  const bool numbered = request.frame == MessageFrame::kGrant || request.frame == MessageFrame::kGranted;
  const Header header{numbered ? request.number : request.nbytes, request.tag,
                      Header::of(request.form, request.frame, request.zero_copy)};
  const bool offers_only =
      request.frame == MessageFrame::kOffer || request.frame == MessageFrame::kSynchronousOffer;
  const bool more = request.nbytes > 0 && !offers_only;
  const auto* const head = reinterpret_cast<const unsigned char*>(&header);
  request.header_moved +=
      streams_.write(peer, head + request.header_moved, sizeof header - request.header_moved, more);
  return request.header_moved == sizeof header;
}

// The receiver has asked for an offered message. False: there is no such offer.
bool Channels::send_granted(int peer, uint64_t number) {
  auto found = offers(peer).offered.extract(number);
  if (found.empty()) return false;
  Request& request = *found.mapped();
  request.frame = MessageFrame::kGranted;
  request.header_moved = 0;
  sends_[static_cast<size_t>(peer)].push_back(std::move(found.mapped()));
  has_answers_ = true;
  return true;
}

// Writes a header without a message, before the messages that have not begun. It is no request of the
// caller's: a rank that has left does not need it.
void Channels::tell(int peer, MessageFrame frame, uint64_t number) {
  if (group_.cell(peer).left.load(std::memory_order_acquire) != 0 || !streams_.open(peer)) return;
  auto told = std::make_shared<Request>();
  told->sending = true;
  told->peer = peer;
  told->tag = 0;
  told->form = 0;
  told->data = nullptr;
  told->nbytes = 0;
  told->frame = frame;
  told->number = number;
  auto& queue = sends_[static_cast<size_t>(peer)];
  const bool begun = !queue.empty() && queue.front()->header_moved > 0;
  const auto first = queue.begin() + (begun ? 1 : 0);
  const auto behind = std::find_if(first, queue.end(), [](const auto& request) {
    return request->frame <= MessageFrame::kOffer || request->frame == MessageFrame::kGranted ||
           request->frame == MessageFrame::kSynchronousOffer;
  });
  queue.insert(behind, std::move(told));  // in order: kRoom comes after the kFull that it ends
  has_answers_ = true;
}

// ---- the receiver ----------------------------------------------------------------------------------

// A header without bytes behind it, or of a granted message. False: its number is wrong.
bool Channels::take_frame(int peer) {
  const Header& header = incoming_[static_cast<size_t>(peer)].header;
  switch (header.frame()) {
    case MessageFrame::kMessage:
      break;
    case MessageFrame::kOffer:
    case MessageFrame::kSynchronousOffer:
      place_offer(peer, header);
      return true;
    case MessageFrame::kGrant:
      return send_granted(peer, header.nbytes);
    case MessageFrame::kGranted:
      return receive_granted(peer, header.nbytes);
    case MessageFrame::kFull:
    case MessageFrame::kRoom:
      offers(peer).peer_is_full = header.frame() == MessageFrame::kFull;
      return true;
  }
  __builtin_unreachable();
}

void Channels::place_offer(int peer, const Header& header) {
  const Header plain{header.nbytes, header.tag, header.form()};
  const auto message = add_unexpected(peer, plain, nullptr);
  ++waiting_offers_;
  message->synchronous = header.frame() == MessageFrame::kSynchronousOffer;
  message->number = ++offers(peer).received;
  if (const std::shared_ptr<Request> request = take_match(peer, plain))
    grant_to(request, message);
  else
    may_store_ = true;
}

// A receive takes an offer: its bytes come into the receive's buffer. Returns true.
bool Channels::grant_to(const std::shared_ptr<Request>& request, Unexpected::iterator message) {
  const Header header = message->header;
  const int peer = message->peer;
  request->peer = peer;
  request->tag = header.tag;
  if (!request->takes(header)) {
    refuse(*request, peer, header);
    return true;
  }
  take_unexpected(*message);
  message->request = request;
  allocate(peer, header, [&] { request->accept(header); });
  grant(message);
  return true;
}

void Channels::grant(Unexpected::iterator message) {
  message->asked = true;
  --waiting_offers_;
  offers(message->peer).asked[message->number] = message;
  tell(message->peer, MessageFrame::kGrant, message->number);
}

// Asks for the offers for which there is room now.
void Channels::store_offers() {
  may_store_ = false;
  for (auto message = unexpected_.begin(); message != unexpected_.end(); ++message) {
    if (!message->waits() || message->synchronous || !can_store(message->peer, message->header.nbytes)) continue;
    store(message->peer, message->header, *message);
    grant(message);
  }
}

// The bytes of an offer follow. False: this rank has not asked for it.
bool Channels::receive_granted(int peer, uint64_t number) {
  const auto found = offers(peer).asked.extract(number);
  if (found.empty()) return false;
  IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
  const Unexpected::iterator message = found.mapped();
  const Header& offered = message->header;
  incoming.header = {offered.nbytes, offered.tag,
                     Header::of(offered.form(), MessageFrame::kMessage, incoming.header.zero_copy())};
  incoming.arriving = true;
  incoming.unmatched = false;
  incoming.message = message;
  incoming.request = nullptr;
  if (message->stored()) return true;
  incoming.request = std::move(message->request);
  erase_unexpected(message);
  return true;
}

}  // namespace unisono
