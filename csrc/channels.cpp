#include "channels.hpp"

#include <algorithm>
#include <cstring>
#include <new>

namespace unisono {
namespace {

constexpr uint32_t kLent = 1u << 31;  // beside the dtype of a header
// What is taken from one rank before the others' turn comes: at least what a ring holds, so that nobody
// goes to sleep over what was there.
constexpr uint64_t kTurnBytes = 2 * kChannelBytes;

bool tags_match(int wanted, int got) { return wanted == kAnyTag || wanted == got; }
bool ranks_match(int wanted, int got) { return wanted == kAnyRank || wanted == got; }

}  // namespace

Channels::Channels(World& world, const Peers& peers, int rank, Patience patience, Patience background,
                   std::vector<int> sockets, Control* control)
    : world_(world),
      peers_(peers),
      rank_(rank),
      patience_(patience),
      background_(background),
      sends_(static_cast<size_t>(world.ranks())),
      incoming_(static_cast<size_t>(world.ranks())),
      lent_(static_cast<size_t>(world.ranks())),
      streams_(world, rank, std::move(sockets), control),
      control_(control) {}

Channels::~Channels() {
  leave(false);
  if (unsettled_) new auto(std::move(kept_));  // somebody may still write into it
}

Waiter Channels::waiter(Patience patience) {
  Sockets* const sockets = world_.spans_hosts() ? &streams_ : nullptr;
  return Waiter(world_, peers_, rank_, &RankCell::channel_bell, patience, sockets, control_);
}

// ---- moving bytes ----------------------------------------------------------------------------------

void Channels::finish(Request& request, FaultKind fault) {
  request.fault.store(fault, std::memory_order_relaxed);
  request.done.store(true, std::memory_order_release);
  --open_;
  ++changes_;
  streams_.wake();  // another thread of this rank may wait for it
}

void Channels::progress() {
  if (failed_) return;
  streams_.look();
  for (int peer = 0; peer < static_cast<int>(sends_.size()); ++peer) {
    if (peer == rank_) continue;
    push(peer);
    pull(peer);
  }
}

void Channels::push(int peer) {
  auto& queue = sends_[static_cast<size_t>(peer)];
  while (!queue.empty()) {
    Request& request = *queue.front();
    if (!request.lent && request.header_moved == 0) offer(request);
    const uint32_t lent = request.lent ? kLent : 0;
    const Header header{request.nbytes, request.tag, static_cast<uint32_t>(request.dtype) | lent};
    const auto* const head = reinterpret_cast<const unsigned char*>(&header);
    if (request.header_moved < sizeof header)
      request.header_moved += streams_.write(peer, head + request.header_moved,
                                             sizeof header - request.header_moved, request.nbytes > 0);
    if (request.header_moved < sizeof header) return;
    if (!request.lent)
      request.moved +=
          streams_.write(peer, request.data + request.moved, request.nbytes - request.moved, false);
    if (request.lent ? !lend(request) : request.moved < request.nbytes) return;
    const std::shared_ptr<Request> sent = std::move(queue.front());
    queue.pop_front();
    finish(*sent, FaultKind::kNone);
  }
}

std::shared_ptr<Request> Channels::match(int peer, const Header& header) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& request) {
    return ranks_match(request->peer, peer) && tags_match(request->tag, header.tag);
  });
  if (found == receives_.end()) return nullptr;
  std::shared_ptr<Request> request = std::move(*found);
  receives_.erase(found);
  return request;
}

bool Channels::read_header(int peer) {
  Incoming& incoming = incoming_[static_cast<size_t>(peer)];
  auto* const head = reinterpret_cast<unsigned char*>(&incoming.header);
  incoming.header_moved +=
      streams_.read(peer, head + incoming.header_moved, sizeof(Header) - incoming.header_moved);
  if (incoming.header_moved < sizeof(Header)) return false;
  incoming.header_moved = 0;
  incoming.moved = 0;
  incoming.lent = (incoming.header.dtype & kLent) != 0;
  incoming.header.dtype &= ~kLent;
  incoming.request = match(peer, incoming.header);
  const Header& header = incoming.header;
  if (incoming.request) {
    Request& request = *incoming.request;
    request.peer = peer;
    request.tag = header.tag;
    incoming.open = request.nbytes == header.nbytes && request.dtype == static_cast<DType>(header.dtype);
    if (incoming.open) return true;
    refuse(request, peer, header);
    incoming.request = nullptr;
  }
  try {
    incoming.kept =
        kept_.insert(kept_.end(), Kept{peer, header, std::vector<unsigned char>(header.nbytes), false});
  } catch (const std::bad_alloc&) {
    failed_ = true;  // the header is gone: what follows can no longer be told apart
    throw;
  }
  incoming.open = true;
  return true;
}

void Channels::pull(int peer) {
  Incoming& incoming = incoming_[static_cast<size_t>(peer)];
  // Whoever has left sends no more, nor does anybody in a group that has ended: all that is there counts.
  const bool over = world_.abort().state.load(std::memory_order_acquire) != 0 ||
                    world_.cell(peer).left.load(std::memory_order_acquire) != 0;
  uint64_t taken = 0;
  while (incoming.open || ((over || taken < kTurnBytes) && read_header(peer))) {
    const uint64_t before = incoming.moved;
    unsigned char* const target = incoming.request ? incoming.request->data : incoming.kept->bytes.data();
    if (incoming.lent) {
      if (!borrow(peer, target)) return;
    } else {
      incoming.moved += streams_.read(peer, target + incoming.moved, incoming.header.nbytes - incoming.moved);
      if (incoming.moved < incoming.header.nbytes) return;
    }
    taken += sizeof(Header) + incoming.moved - before;
    finish_incoming(peer);
  }
}

// A kept message whose asker came while it was arriving is handed over now that it is whole.
void Channels::finish_incoming(int peer) {
  Incoming& incoming = incoming_[static_cast<size_t>(peer)];
  incoming.open = false;
  if (incoming.request) {
    finish(*incoming.request, FaultKind::kNone);
    incoming.request = nullptr;
    return;
  }
  incoming.kept->whole = true;
  const std::shared_ptr<Request> request = match(peer, incoming.header);
  if (!request) return;
  deliver(*request, peer, incoming.header, incoming.kept->bytes.data());
  kept_.erase(incoming.kept);
}

void Channels::deliver(Request& request, int peer, const Header& header, const unsigned char* bytes) {
  const bool fits = request.nbytes == header.nbytes && request.dtype == static_cast<DType>(header.dtype);
  request.peer = peer;
  request.tag = header.tag;
  if (!fits) return refuse(request, peer, header);
  if (header.nbytes > 0) std::memcpy(request.data, bytes, header.nbytes);
  finish(request, FaultKind::kNone);
}

// Not what was asked for. The group ends here and now: whoever asked may never look at the request again.
void Channels::refuse(Request& request, int peer, const Header& header) {
  Fault fault{FaultKind::kMismatch, rank_, peer};
  fault.misfit = {header.tag, static_cast<uint32_t>(request.dtype), header.dtype, request.nbytes,
                  header.nbytes};
  request.nbytes = header.nbytes;
  finish(request, FaultKind::kMismatch);
  try {
    waiter(patience_).fail(fault);
  } catch (const Fault&) {  // this or an earlier one: it stands in the abort cell
  }
}

// A message of this kind that has arrived whole before it was asked for. One that is still arriving
// stays with finish_incoming, which looks for its asker.
bool Channels::take_kept(Request& request) {
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    if (!ranks_match(request.peer, kept->peer) || !tags_match(request.tag, kept->header.tag)) continue;
    if (!kept->whole) continue;
    deliver(request, kept->peer, kept->header, kept->bytes.data());
    kept_.erase(kept);
    return true;
  }
  return false;
}

std::vector<std::tuple<int, int, uint32_t, uint64_t>> Channels::unexpected() {
  const std::lock_guard lock(mutex_);
  std::vector<std::tuple<int, int, uint32_t, uint64_t>> found;
  for (const Kept& kept : kept_)
    if (kept.whole) found.emplace_back(kept.peer, kept.header.tag, kept.header.dtype, kept.header.nbytes);
  return found;
}

// ---- requests --------------------------------------------------------------------------------------

void Channels::post(std::shared_ptr<Request> request) {
  try {
    const std::lock_guard lock(mutex_);
    enqueue(std::move(request));
    progress();
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
    if (!take_kept(*request)) receives_.push_back(std::move(request));
  } else if (request->peer == rank_) {
    loop_back(*request);
  } else if (streams_.open(request->peer)) {
    sends_[static_cast<size_t>(request->peer)].push_back(std::move(request));
  } else {
    finish(*request, FaultKind::kNoMemory);
    throw std::bad_alloc();
  }
}

// A message to oneself is kept, or goes to the receive that already asks for it.
void Channels::loop_back(Request& send) {
  const Header header{send.nbytes, send.tag, static_cast<uint32_t>(send.dtype)};
  if (const std::shared_ptr<Request> request = match(rank_, header)) {
    deliver(*request, rank_, header, send.data);
  } else {
    kept_.push_back(Kept{rank_, header, {send.data, send.data + send.nbytes}, true});
  }
  finish(send, FaultKind::kNone);
}

void Channels::detach() {
  const std::lock_guard lock(mutex_);
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

// A message that nobody asks for, or cannot be kept, ends the group: its bytes are lost.
FaultKind Channels::out_of_memory(Waiter& waiter) {
  FaultKind kind = FaultKind::kAborted;
  try {
    waiter.fail(Fault{FaultKind::kNoMemory, rank_, rank_});
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
    Incoming& incoming = incoming_[static_cast<size_t>(peer)];
    if (incoming.open && incoming.lent) give_up(peer);
    if (incoming.request) finish(*incoming.request, fault);
    incoming.request = nullptr;
    incoming.open = false;
  }
  open_ = 0;  // also of what memory ran out for
}

// ---- the background thread -------------------------------------------------------------------------

// The open request with the earliest deadline bounds the wait; its peer takes the blame.
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
  for (const Incoming& incoming : incoming_)
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
  if (abandoned_) return;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
    // Behind all that was sent, and before memory that was lent is given back: a receiver that has read that
    // since looks here.
    world_.cell(rank_).left.store(1, std::memory_order_seq_cst);
    fail_all(FaultKind::kAborted);
    streams_.finish();
    work_came_.notify_all();
  }
  streams_.wake();
  if (thread_.joinable()) thread_.join();
}

}  // namespace unisono
