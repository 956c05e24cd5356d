#include "p2p/channels.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace unisono {

Channels::Channels(GroupState& state, const PeerProcesses& peers, int rank, WaitPolicy patience,
                   WaitPolicy background, FileDescriptors sockets, ControlPlane* control)
    : state_(state),
      peers_(peers),
      rank_(rank),
      patience_(patience),
      background_(background),
      sends_(static_cast<size_t>(state.ranks())),
      incoming_(static_cast<size_t>(state.ranks())),
      zero_copy_sends_(static_cast<size_t>(state.ranks())),
      kept_bytes_(static_cast<size_t>(state.ranks())),
      streams_(state, rank, std::move(sockets), control),
      control_(control) {}

Channels::~Channels() {
  leave(false);
  if (has_open_transfers_) never_free(std::move(unexpected_));
}

Waiter Channels::waiter(WaitPolicy patience) {
  SocketPoller* const sockets = state_.spans_hosts() ? &streams_ : nullptr;
  return Waiter(state_, peers_, rank_, &RankCell::message_event, patience, sockets, control_);
}

// ---- moving bytes ----------------------------------------------------------------------------------

void Channels::finish(Request& request, FaultKind fault) {
  if (fault == FaultKind::kNone && state_.evicted()) fault = FaultKind::kAborted;
  request.fault.store(fault, std::memory_order_relaxed);
  request.done.store(true, std::memory_order_release);
  --open_;
  ++changes_;
  streams_.wake();  // another thread of this rank may wait for it
}

void Channels::progress(LargeMessages large) {
  if (failed_) return;
  streams_.look();
  for (int peer = 0; peer < static_cast<int>(sends_.size()); ++peer) {
    if (peer == rank_) continue;
    push(peer, large);
    pull(peer, large);
  }
}

void Channels::push(int peer, LargeMessages large) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty()) {
    Request& request = *queue.front();
    if (!request.zero_copy && request.header_moved == 0) offer(request);
    const uint32_t zero_copy = request.zero_copy ? Header::kZeroCopy : 0;
    const Header header{request.nbytes, request.tag, request.form | zero_copy};
    const auto* const head = reinterpret_cast<const unsigned char*>(&header);
    if (request.header_moved < sizeof header)
      request.header_moved += streams_.write(peer, head + request.header_moved,
                                             sizeof header - request.header_moved, request.nbytes > 0);
    if (request.header_moved < sizeof header) return;
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

std::shared_ptr<Request> Channels::match(int peer, const Header& header) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& request) {
    return matches(request->peer, request->tag, peer, header.tag);
  });
  if (found == receives_.end()) return nullptr;
  std::shared_ptr<Request> request = std::move(*found);
  receives_.erase(found);
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

// The message does not match the request. It aborts the group now: the caller may never wait for the request.
void Channels::refuse(Request& request, int peer, const Header& header) {
  Fault fault{FaultKind::kMismatch, rank_, peer};
  fault.misfit = {header.tag, request.form, header.form(), request.nbytes, header.nbytes};
  request.nbytes = header.nbytes;
  finish(request, FaultKind::kMismatch);
  try {
    waiter(patience_).fail(fault);
  } catch (const Fault&) {  // this or an earlier one: the abort cell has it
  }
}

// Delivers a matching unexpected message that is whole. For one that is still arriving, finish_incoming looks
// for a receive.
bool Channels::take_unexpected(Request& request) {
  for (auto kept = unexpected_.begin(); kept != unexpected_.end(); ++kept) {
    if (!kept->whole || !matches(request.peer, request.tag, kept->peer, kept->header.tag)) continue;
    deliver(request, kept->peer, kept->header, kept->bytes.get());
    forget(kept);
    return true;
  }
  return false;
}

std::vector<MessageEnvelope> Channels::unexpected() {
  const std::lock_guard lock(mutex_);
  std::vector<MessageEnvelope> found;
  for (const UnexpectedMessage& kept : unexpected_)
    if (kept.whole) found.push_back(envelope(kept.peer, kept.header));
  for (size_t peer = 0; peer < incoming_.size(); ++peer)
    if (const IncomingMessage& one = incoming_[peer]; one.open && one.held)
      found.push_back(envelope(static_cast<int>(peer), one.header));
  return found;
}

// ---- requests --------------------------------------------------------------------------------------

void Channels::post(std::shared_ptr<Request> request, ReleasableLock& held) {
  if (request->nbytes >= kLarge) held.release();  // a message to this rank itself, or a kept one, is copied
  try {
    const std::unique_lock lock = locked(held);
    enqueue(std::move(request));
    progress(LargeMessages::kLater);
    streams_.wake();  // the background thread has another deadline to keep
  } catch (const std::bad_alloc&) {
    Waiter waiting = waiter(patience_);
    out_of_memory(waiting);
  }
}

void Channels::enqueue(std::shared_ptr<Request> request) {
  ++open_;
  ++changes_;
  if (!works()) return finish(*request, FaultKind::kAborted);
  if (!request->sending) {
    if (!take_unexpected(*request)) receives_.push_back(std::move(request));
  } else if (request->peer == rank_) {
    loop_back(*request);
  } else if (streams_.open(request->peer)) {
    sends_[static_cast<size_t>(request->peer)].push_back(std::move(request));
  } else {
    finish(*request, FaultKind::kNoMemory);
    throw std::bad_alloc();
  }
}

// A message to this rank itself goes to a matching receive, or is kept.
void Channels::loop_back(Request& send) {
  const Header header{send.nbytes, send.tag, send.form};
  if (const std::shared_ptr<Request> request = match(rank_, header)) {
    deliver(*request, rank_, header, send.data);
  } else {
    std::unique_ptr<unsigned char[]> bytes(new unsigned char[send.nbytes]);
    if (send.nbytes > 0) std::memcpy(bytes.get(), send.data, send.nbytes);
    unexpected_.push_back(UnexpectedMessage{rank_, header, std::move(bytes), true});
  }
  finish(send, FaultKind::kNone);
}

// Another thread may copy a large message meanwhile.
std::unique_lock<std::mutex> Channels::locked(ReleasableLock& held) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) return lock;
  held.release();
  lock.lock();
  return lock;
}

void Channels::detach(ReleasableLock& held) {
  const std::unique_lock lock = locked(held);
  if (idle() || stopping_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  work_came_.notify_one();
}

FaultKind Channels::wait(Request& request, Nanoseconds deadline, bool fatal,
                         const std::function<bool()>* interrupt) {
  int awaited;
  {
    const std::lock_guard lock(mutex_);
    awaited = request.peer;
  }
  Waiter waiting = waiter(patience_);
  waiting.begin(0, 0, fatal ? deadline : INT64_MAX);
  waiting.set_interrupt(interrupt);
  try {
    waiting.until(awaited, [&] {
      if (request.done.load(std::memory_order_acquire)) return true;
      const std::lock_guard lock(mutex_);
      progress();
      awaited = request.peer;
      return request.done.load(std::memory_order_acquire) || (!fatal && now_ns() >= deadline);
    });
    if (!request.done.load(std::memory_order_acquire)) return FaultKind::kTimeout;
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

// An unexpected message that cannot be kept ends the group: its bytes are lost.
FaultKind Channels::out_of_memory(Waiter& waiter) {
  FaultKind kind = FaultKind::kAborted;
  Fault found;
  {
    const std::lock_guard lock(mutex_);
    found = no_memory_;
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
  for (auto& queue : sends_) {
    for (const auto& request : queue) finish(*request, fault);
    queue.clear();
  }
  for (const auto& request : receives_) finish(*request, fault);
  receives_.clear();
  for (int peer = 0; peer < static_cast<int>(incoming_.size()); ++peer) {
    IncomingMessage& incoming = incoming_[static_cast<size_t>(peer)];
    if (incoming.open && !incoming.held && incoming.header.zero_copy()) give_up(peer);
    if (incoming.request) finish(*incoming.request, fault);
    incoming.request = nullptr;
    incoming.open = false;
  }
  open_ = 0;  // also counts requests that a std::bad_alloc lost
}

// ---- the background thread -------------------------------------------------------------------------

// The open request with the earliest deadline bounds the wait; a Timeout names its peer.
void Channels::begin_wait(Waiter& waiter, int& awaited) {
  Nanoseconds deadline = INT64_MAX;
  awaited = kAnyRank;
  const auto look = [&](const Request& request) {
    if (request.deadline >= deadline) return;
    deadline = request.deadline;
    awaited = request.peer;
  };
  for (const auto& queue : sends_)
    for (const auto& request : queue) look(*request);
  for (const auto& request : receives_) look(*request);
  for (const IncomingMessage& incoming : incoming_)
    if (incoming.request) look(*incoming.request);
  waiter.begin(0, 0, deadline);
}

void Channels::serve() {
  Waiter waiting = waiter(background_);
  std::unique_lock lock(mutex_);
  for (;;) {
    work_came_.wait(lock, [&] { return stopping_ || !idle(); });
    if (stopping_) return;
    int awaited;
    begin_wait(waiting, awaited);
    const uint64_t seen = changes_;
    lock.unlock();
    FaultKind fault = FaultKind::kNone;
    try {
      waiting.until(awaited, [&] {
        const std::lock_guard progressing(mutex_);
        progress();
        return stopping_ || changes_ != seen;
      });
    } catch (const Fault& thrown) {
      fault = thrown.kind;
    } catch (const std::bad_alloc&) {
      fault = out_of_memory(waiting);
    }
    lock.lock();
    if (fault != FaultKind::kNone) fail_all(fault);
  }
}

void Channels::leave(bool forked) {
  if (forked) {
    abandoned_ = true;
    if (thread_.joinable()) thread_.detach();
  }
  if (!abandoned_) stop(nullptr);
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
    state_.cell(rank_).left.store(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_release);  // R3
    fail_all(FaultKind::kAborted);
    if (taken == nullptr)
      streams_.finish();
    else
      *taken = streams_.take();
    work_came_.notify_all();
  }
  streams_.wake();
  if (thread_.joinable()) thread_.join();
}

}  // namespace unisono
