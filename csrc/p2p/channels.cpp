#include "p2p/channels.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace unisono {

Channels::Channels(GroupState& group, const PeerProcesses& peers, int rank, WaitPolicy wait_policy,
                   WaitPolicy background, FileDescriptors sockets, ControlPlane* control)
    : group_(group),
      peers_(peers),
      rank_(rank),
      wait_policy_(wait_policy),
      background_wait_policy_(background),
      sends_(static_cast<size_t>(group.ranks())),
      incoming_(static_cast<size_t>(group.ranks())),
      zero_copy_sends_(static_cast<size_t>(group.ranks())),
      offers_(static_cast<size_t>(group.ranks())),
      unexpected_bytes_(static_cast<size_t>(group.ranks())),
      streams_(group, rank, std::move(sockets), control),
      control_(control) {}

Channels::~Channels() {
  leave(false);
  if (has_open_transfers_) never_free(std::move(unexpected_));
}

Waiter Channels::waiter(WaitPolicy wait_policy) {
  SocketPoller* const sockets = group_.spans_hosts() ? &streams_ : nullptr;
  return Waiter(group_, peers_, rank_, &RankCell::message_event, wait_policy, sockets, control_);
}

// ---- moving bytes ----------------------------------------------------------------------------------

void Channels::finish(Request& request, FaultKind fault) {
  if (fault == FaultKind::kNone && group_.evicted()) fault = FaultKind::kAborted;
  request.fault.store(fault, std::memory_order_relaxed);
  request.done.store(true, std::memory_order_release);
  --unfinished_requests_;
  ++ended_;
  if (request.sending && --open_sends_ == 0) sent_from_ = {};
}

// Wakes the other threads of this rank that may wait for a request that has ended since. waiting_here:
// whether this thread is one of those that wait.
void Channels::wake_others(uint64_t ended, int waiting_here) {
  if (ended_ != ended && waiting_callers_.load(std::memory_order_seq_cst) > waiting_here) streams_.wake();
}

void Channels::progress(LargeMessages large) {
  if (failed_) return;
  streams_.poll_sockets();
  do {
    has_answers_ = false;
    for (int peer = 0; peer < static_cast<int>(sends_.size()); ++peer) {
      if (peer == rank_) continue;
      // What this rank receives comes first: a peer copies what it receives itself.
      pull(peer, large);
      push(peer, large);
    }
    if (held_ > 0 || released_) deliver_held();
    if (may_store_ && waiting_offers_ > 0 && large == LargeMessages::kNow) store_offers();
  } while (has_answers_);
}

void Channels::push(int peer, LargeMessages large) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty()) {
    Request& request = *queue.front();
    if (!write_header(peer, request)) return;
    if (request.frame != MessageFrame::kMessage && request.frame != MessageFrame::kGranted) {
      if (request.number != 0 && request.frame != MessageFrame::kGrant)
        offers(peer).offered[request.number] = queue.front();
      queue.pop_front();
      continue;
    }
    if (!request.zero_copy)
      request.moved +=
          streams_.write(peer, request.data + request.moved, request.nbytes - request.moved, false);
    if (request.zero_copy && large == LargeMessages::kLater) return;
    if (request.zero_copy ? !progress_zero_copy(request) : request.moved < request.nbytes) return;
    const std::shared_ptr<Request> sent = std::move(queue.front());
    queue.pop_front();
    finish(*sent, FaultKind::kNone);
  }
}

// The receive that was posted first of those that match a message.
Request* Channels::first_match(int peer, int tag) const {
  Request* found = nullptr;
  if (posted_.empty()) return found;
  for (const int source : {peer, kAnyRank})
    for (const int wanted : {tag, any_tag_like(tag)})
      if (const auto* const link = posted_.first(source, wanted))
        if (found == nullptr || link->entry->order < found->order) found = link->entry;
  return found;
}

// The receive that gets this message now, no longer among `receives_`; nullptr: there is none, or it is held.
std::shared_ptr<Request> Channels::take_match(int peer, const Header& header) {
  Request* const found = first_match(peer, header.tag);
  return found == nullptr || held(*found) ? nullptr : take_receive(*found);
}

std::shared_ptr<Request> Channels::take_receive(Request& receive) {
  std::shared_ptr<Request> request = std::move(*receive.place);
  posted_.remove(receive.link);
  receives_.erase(receive.place);
  return request;
}

void Channels::deliver(Request& request, int peer, const Header& header, const unsigned char* bytes) {
  request.peer = peer;
  request.tag = header.tag;
  if (!request.takes(header)) return refuse(request, peer, header);
  request.accept(header);
  if (header.nbytes > 0) std::memcpy(request.data, bytes, header.nbytes);
  finish(request, FaultKind::kNone);
}

// The same of a kept message.
void Channels::deliver(Request& request, UnexpectedMessage& message) {
  request.peer = message.peer;
  request.tag = message.header.tag;
  if (!request.takes(message.header)) return refuse(request, message.peer, message.header);
  request.accept(message.header, std::move(message.bytes));
  finish(request, FaultKind::kNone);
}

// The message does not match the request. It aborts the group now: the caller may never wait for the request.
void Channels::refuse(Request& request, int peer, const Header& header) {
  Fault fault{FaultKind::kMismatch, rank_, peer};
  fault.size_mismatch = {plain_tag(header.tag), request.form, header.form(), request.nbytes, header.nbytes};
  request.nbytes = header.nbytes;
  finish(request, FaultKind::kMismatch);
  try {
    waiter(wait_policy_).fail(fault);
  } catch (const Fault&) {  // this or an earlier one: the abort cell has it
  }
}

// Gives the first matching unexpected message to the receive, also one that is arriving or waits in its
// sender. False: there is none.
bool Channels::deliver_unexpected(Request& receive) {
  for (MessageLink* link = kept_.first(receive.peer, receive.tag); link != nullptr;
       link = kept_.after(*link)) {
    UnexpectedMessage& message = *link->entry;
    if (held_ > 0 && first_match(message.peer, message.header.tag) != &receive) continue;
    std::shared_ptr<Request> request = take_receive(receive);
    if (message.waits()) return grant_to(request, message.place);
    take_unexpected(message);
    request->peer = message.peer;
    request->tag = message.header.tag;
    message.request = std::move(request);
    if (!message.whole) return true;  // finish_incoming delivers it
    deliver(*message.request, message);
    erase_unexpected(message.place);
    return true;
  }
  return false;
}

std::vector<MessageEnvelope> Channels::unexpected() {
  const std::lock_guard lock(mutex_);
  std::vector<MessageEnvelope> found;
  for (const UnexpectedMessage& message : unexpected_)
    if ((message.whole || message.waits()) && !message.request)
      found.push_back(envelope(message.peer, message.header));
  for (size_t peer = 0; peer < incoming_.size(); ++peer)
    if (const IncomingMessage& one = incoming_[peer]; one.arriving && one.unmatched)
      found.push_back(envelope(static_cast<int>(peer), one.header));
  return found;
}

// ---- requests --------------------------------------------------------------------------------------

bool Channels::post(std::shared_ptr<Request> request, ReleasableLock& caller_lock) {
  request->raw = raw;
  if (request->outlives && !has_thread_.load(std::memory_order_acquire)) begin_thread(caller_lock);
  if (!receive_buffers_.claim(request)) return false;
  if (request->nbytes >= kLarge)
    caller_lock.release();  // a message to this rank itself, or a kept one, is copied
  try {
    const std::unique_lock lock = locked(caller_lock);
    const uint64_t ended = ended_;
    ++caller_epoch_;
    next_deadline_ = std::min(next_deadline_, request->deadline);
    check_memory(*request);
    enqueue(std::move(request));
    progress(LargeMessages::kLater);
    wake_others(ended, 0);
  } catch (const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fail_all(fault.kind);
  } catch (const std::bad_alloc&) {
    Waiter waiting = waiter(wait_policy_);
    out_of_memory(waiting);
  }
  return true;
}

// Between hosts the kernel finds missing memory itself.
void Channels::check_memory(const Request& request) {
  const bool copied = request.peer == kAnyRank || group_.on_this_host(request.peer);
  if (!copied || request.sized || request.nbytes < kCheckedBytes || is_present(request.data, request.nbytes))
    return;
  group_.fail({request.sending ? FaultKind::kUnreadable : FaultKind::kUnwritable, rank_, rank_});
}

void Channels::enqueue(std::shared_ptr<Request> request) {
  ++unfinished_requests_;
  if (request->sending) {
    ++open_sends_;
    if (request->nbytes > 0) sent_from_.add(request->data, request->nbytes);
  }
  if (!is_running()) return finish(*request, FaultKind::kAborted);
  if (!request->sending) {
    hold_back(*request);
    Request& receive = *request;
    receive.place = receives_.insert(receives_.end(), std::move(request));
    receive.order = ++receives_posted_;
    posted_.append(receive.link, receive.peer, receive.tag, receive);
    if (!held(receive)) deliver_unexpected(receive);
  } else if (request->peer == rank_) {
    send_to_self(request);
  } else if (streams_.open(request->peer)) {
    may_store_ = true;
    sends_[static_cast<size_t>(request->peer)].push_back(std::move(request));
  } else {
    finish(*request, FaultKind::kNoMemory);
    throw std::bad_alloc();
  }
}

// A message to this rank itself goes to a matching receive, or is kept.
void Channels::send_to_self(const std::shared_ptr<Request>& send) {
  const Header header{send->nbytes, send->tag, send->form};
  if (const std::shared_ptr<Request> request = take_match(rank_, header)) {
    deliver(*request, rank_, header, send->data);
  } else {
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[send->nbytes]);
    if (send->nbytes > 0) std::memcpy(bytes.get(), send->data, send->nbytes);
    const auto message = add_unexpected(rank_, header, std::move(bytes));
    message->whole = true;
    if (send->synchronous) {
      message->sender = send;
      return;
    }
  }
  finish(*send, FaultKind::kNone);
}

// Another thread may copy a large message meanwhile.
std::unique_lock<std::mutex> Channels::locked(ReleasableLock& caller_lock) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) return lock;
  caller_lock.release();
  lock.lock();
  return lock;
}

FaultKind Channels::wait(Request& request, Nanoseconds deadline, bool fatal,
                         const std::function<bool()>* interrupt, ReleasableLock& caller_lock) {
  const WaitingCaller waits(waiting_callers_);
  int awaited = kAnyRank;
  Waiter waiting = waiter(wait_policy_);
  waiting.begin(0, 0, fatal ? std::min(deadline, request.deadline) : request.deadline);
  waiting.set_interrupt(interrupt);
  waiting.set_caller_lock(&caller_lock);
  try {
    waiting.until(awaited, [&] {
      if (request.done.load(std::memory_order_acquire)) return true;
      // A caller that still has its lock waits for no other thread, and copies nothing large.
      const bool brief = caller_lock.held();
      std::unique_lock lock(mutex_, std::defer_lock);
      if (!brief) lock.lock();
      if (brief && !lock.try_lock()) return false;
      const uint64_t ended = ended_;
      progress(brief ? LargeMessages::kLater : LargeMessages::kNow);
      wake_others(ended, 1);
      awaited = request.peer;
      return request.done.load(std::memory_order_acquire) ||
             (!fatal && deadline != INT64_MAX && now_ns() >= deadline);
    });
    if (!request.done.load(std::memory_order_acquire)) return FaultKind::kTimeout;
    see(request);
    const FaultKind result = request.fault.load(std::memory_order_relaxed);
    if (result == FaultKind::kMismatch) waiting.fail(Fault{result, rank_, request.peer});
    return result;
  } catch (const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fail_all(fault.kind);
    return fault.kind;
  } catch (const std::bad_alloc&) {
    return out_of_memory(waiting);
  }
}

void Channels::see(Request& request) {
  if (!request.seen.exchange(true, std::memory_order_relaxed) && !request.sending && !request.sized)
    receive_buffers_.release(request, request.data);
}

size_t Channels::open_requests() {
  const std::lock_guard lock(mutex_);
  return unfinished_requests_;
}

// An unexpected message that cannot be kept ends the group: its bytes are lost.
FaultKind Channels::out_of_memory(Waiter& waiter) {
  FaultKind kind = FaultKind::kAborted;
  Fault found;
  {
    const std::lock_guard lock(mutex_);
    found = memory_fault_;
  }
  try {
    waiter.fail(found);
  } catch (const Fault& fault) {
    kind = fault.kind;
  }
  const std::lock_guard lock(mutex_);
  fail_all(kind);
  return kind;
}

void Channels::fail_all(FaultKind fault) {
  failed_ = true;
  each_send([&](const auto& request) { finish(*request, fault); });
  for (auto& queue : sends_) queue.clear();
  for (Offers& one : offers_) one.offered.clear();
  for (UnexpectedMessage& message : unexpected_) {
    if (const auto request = std::exchange(message.request, nullptr)) finish(*request, fault);
    if (const auto sender = std::exchange(message.sender, nullptr)) finish(*sender, fault);
  }
  for (const auto& request : receives_) {
    posted_.remove(request->link);
    finish(*request, fault);
  }
  receives_.clear();
  held_ = 0;
  for (int peer = 0; peer < static_cast<int>(incoming_.size()); ++peer) {
    IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
    if (incoming.arriving && !incoming.unmatched && incoming.header.zero_copy()) cancel_zero_copy(peer);
    if (incoming.request) finish(*incoming.request, fault);
    incoming.request = nullptr;
    incoming.arriving = false;
  }
  unfinished_requests_ = open_sends_ = 0;  // also counts requests that a std::bad_alloc lost
  streams_.wake();
}

// ---- the end ----------------------------------------------------------------------------------------

void Channels::leave(bool forked) {
  if (forked) {
    forked_ = true;
    if (thread_.joinable()) thread_.detach();
  }
  if (!forked_) stop(nullptr);
}

FileDescriptors Channels::hand_over() {
  FileDescriptors taken;
  stop(&taken);
  return taken;
}

void Channels::stop(FileDescriptors* taken) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    // After everything that was sent, and before zero-copy memory belongs to the caller again: a receiver
    // that has read such memory checks `left` afterwards.
    group_.cell(rank_).left.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_release);  // R3
    fail_all(FaultKind::kAborted);
    if (taken == nullptr)
      streams_.finish();
    else
      *taken = streams_.take();
    request_posted_.notify_all();
  }
  streams_.wake();
  if (thread_.joinable()) thread_.join();
}

}  // namespace unisono
