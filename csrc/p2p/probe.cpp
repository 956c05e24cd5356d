// Probe: describes unexpected messages without taking them. Cancel: removes receives that no message has
// matched.
#include <algorithm>

#include "p2p/channels.hpp"

namespace unisono {

// The first message that no receive gets, also one that is arriving or waits in its sender.
std::optional<MessageEnvelope> Channels::first_unexpected(int peer, int tag) const {
  for (const MessageLink* link = kept_.first(peer, tag); link != nullptr; link = kept_.after(*link)) {
    const UnexpectedMessage& message = *link->entry;
    if (held_ == 0 || first_match(message.peer, message.header.tag) == nullptr)
      return envelope(message.peer, message.header);
  }
  for (int source = 0; source < static_cast<int>(incoming_.size()); ++source) {
    const IncomingMessage& one = incoming_[static_cast<size_t>(source)];
    if (one.arriving && one.unmatched && matches(peer, tag, source, one.header.tag))
      return envelope(source, one.header);
  }
  return std::nullopt;
}

std::optional<MessageEnvelope> Channels::progress_to(int peer, int tag) {
  const std::lock_guard lock(mutex_);
  const uint64_t ended = ended_;
  progress();
  wake_others(ended, 1);
  return first_unexpected(peer, tag);
}

// Runs `wait`; a fault that it throws ends all requests.
template <class Wait>
FaultKind Channels::probing(Waiter& waiting, Wait wait) {
  try {
    return wait();
  } catch (const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fail_all(fault.kind);
    return fault.kind;
  } catch (const std::bad_alloc&) {
    return out_of_memory(waiting);
  }
}

// A rank sends all messages before it sets `left`: load `left` first, then check for the message again.
FaultKind Channels::probe_now(int peer, int tag, std::optional<MessageEnvelope>& found) {
  const WaitingCaller waits(waiting_callers_);
  Waiter waiting = waiter(wait_policy_);
  waiting.begin(0, 0, INT64_MAX);
  waiting.expect_own_messages();
  return probing(waiting, [&] {
    if ((found = progress_to(peer, tag))) return FaultKind::kNone;
    const bool left = waiting.has_left(peer);
    if (!(found = progress_to(peer, tag))) waiting.check_for_faults(peer, left);
    return FaultKind::kNone;
  });
}

FaultKind Channels::advance() {
  Waiter waiting = waiter(wait_policy_);
  return probing(waiting, [&] {
    const std::lock_guard lock(mutex_);
    const uint64_t ended = ended_;
    progress();
    wake_others(ended, 1);
    return FaultKind::kNone;
  });
}

FaultKind Channels::probe(int peer, int tag, Nanoseconds deadline, const std::function<bool()>* interrupt,
                          std::optional<MessageEnvelope>& found) {
  const WaitingCaller waits(waiting_callers_);
  Waiter waiting = waiter(wait_policy_);
  waiting.begin(0, 0, INT64_MAX);
  waiting.set_interrupt(interrupt);
  return probing(waiting, [&] {
    bool over = false;
    waiting.until(peer, [&] {
      found = progress_to(peer, tag);
      const std::lock_guard lock(mutex_);
      over = stopping_;
      return found.has_value() || over || now_ns() >= deadline;
    });
    if (found) return FaultKind::kNone;
    return over ? FaultKind::kAborted : FaultKind::kTimeout;
  });
}

bool Channels::cancel(Request& request) {
  const std::lock_guard lock(mutex_);
  if (request.link.entry == nullptr) return false;  // it is not among the receives
  const uint64_t ended = ended_;
  const std::shared_ptr<Request> posted = take_receive(request);
  if (!posted->readers.empty()) {
    --held_;
    released_ = true;
  }
  posted->readers.clear();
  posted->cancelled = true;
  finish(*posted, FaultKind::kNone);
  see(*posted);
  wake_others(ended, 0);
  return true;
}

}  // namespace unisono
