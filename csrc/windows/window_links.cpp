#include "windows/window_links.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>

#include "windows/window.hpp"

namespace unisono {
namespace {

constexpr size_t kMostUnanswered = 64;
constexpr int kFirstSliceMs = 1, kLongestSliceMs = 20;  // bounds the delay of a death or Ctrl-C
constexpr Nanoseconds kAskInterval = 500 * kMillisecond;
constexpr Nanoseconds kAnswerGrace = 1000 * kMillisecond;  // for a target to tell who holds its lock
// A connection that has ended shows a death, which the control connection reports within this time.
constexpr Nanoseconds kLossPatience = 6000 * kMillisecond;

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

// One thread at a time asks through a link.
class WindowLinks::Turn {
 public:
  Turn(WindowLink& link, const WindowLimits& limits) : link_(link) {
    if (link.asker.load(std::memory_order_relaxed) == std::this_thread::get_id())
      throw std::runtime_error("called from a signal handler while a call of the same window is under way");
    if (!link.turn.try_lock()) {
      if (limits.caller_lock != nullptr) limits.caller_lock->release();
      link.turn.lock();
    }
    link.asker.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Turn() {
    link_.asker.store(std::thread::id(), std::memory_order_relaxed);
    link_.turn.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  WindowLink& link_;
};

// How one call waits for its socket.
class WindowLinks::Patience {
 public:
  Patience(WindowLinks& links, int peer, const WindowLimits& limits)
      : links_(links),
        peer_(peer),
        limits_(limits),
        context_(links.context_),
        waiter_(context_.group, context_.peers, context_.rank, &RankCell::window_event, context_.policy,
                &links, context_.control),
        polls_(context_.policy.socket_spins) {
    const Nanoseconds timeout = std::min(limits.timeout, INT64_MAX - kAnswerGrace) + kAnswerGrace;
    waiter_.begin(0, 0, to_deadline(timeout));
    waiter_.set_interrupt(context_.interrupted);
    waiter_.set_window(WindowWait::kAnswer);
  }

  // Waits until the socket may be ready.
  void pause(int fd, short events) {
    if (polls_-- > 0) return cpu_pause();
    if (limits_.caller_lock != nullptr) limits_.caller_lock->release();
    pollfd polled{fd, events, 0};
    if (poll(&polled, 1, slice_ms_) > 0) return;
    slice_ms_ = std::min(2 * slice_ms_, kLongestSliceMs);
    refuse_end();
    waiter_.check_for_faults(peer_, false);
    if (context_.control == nullptr || now_ns() < next_ask_at_) return;
    context_.control->ask();
    next_ask_at_ = now_ns() + kAskInterval;
  }

  // The connection has ended: throws why.
  [[noreturn]] void lose() {
    if (limits_.caller_lock != nullptr) limits_.caller_lock->release();
    if (context_.control != nullptr && !context_.group.on_this_host(peer_)) context_.control->suspect(peer_);
    for (const Nanoseconds end = now_ns() + kLossPatience; now_ns() < end; usleep(1000)) {
      refuse_end();
      waiter_.check_for_faults(peer_, waiter_.has_left(peer_));
    }
    waiter_.fail({FaultKind::kPeerLost, context_.rank, peer_});
  }

  [[noreturn]] void fail(Fault fault) { waiter_.fail(fault); }
  void blame(WindowWait what) { waiter_.set_window(what); }

 private:
  void refuse_end() {
    if (links_.ending_) throw Fault{FaultKind::kPeerLeft, context_.rank, context_.rank};
  }

  WindowLinks& links_;
  const int peer_;
  const WindowLimits& limits_;
  const WaitContext& context_;
  Waiter waiter_;
  int polls_, slice_ms_ = kFirstSliceMs;
  Nanoseconds next_ask_at_ = now_ns() + kAskInterval;
};

WindowLinks::WindowLinks(const WaitContext& context, Window& window)
    : context_(context), window_(window), owner_(getpid()) {}

void WindowLinks::connect(FileDescriptors asking, FileDescriptors serving) {
  links_.resize(asking.size());
  for (size_t peer = 0; peer < asking.size(); ++peer) {
    if (asking[peer] < 0) continue;
    links_[peer] = std::make_unique<WindowLink>();
    links_[peer]->peer = static_cast<int>(peer);
    links_[peer]->asking = std::move(asking[peer]);
    links_[peer]->serving = std::move(serving[peer]);
    fcntl(links_[peer]->serving, F_SETFL, fcntl(links_[peer]->serving, F_GETFL) & ~O_NONBLOCK);
  }
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer]) links_[peer]->thread = std::thread([this, peer] { serve(static_cast<int>(peer)); });
}

WindowLinks::~WindowLinks() { end(); }

void WindowLinks::end() {
  ending_ = true;
  if (getpid() != owner_) {  // a forked child's copy: the threads are the parent's, as who has the lock is
    for (const auto& link : links_)
      if (link && link->thread.joinable()) link->thread.detach();
    return;
  }
  const std::scoped_lock held(end_lock_);  // the end of the window and that of its group may meet
  for (const auto& link : links_) {
    if (!link || !link->thread.joinable()) continue;
    shutdown(link->asking, SHUT_RDWR);
    shutdown(link->serving, SHUT_RDWR);
  }
  for (const auto& link : links_)
    if (link && link->thread.joinable()) link->thread.join();
}

void WindowLinks::close_copies() {
  for (const auto& link : links_)
    if (link) link->asking.reset(), link->serving.reset();
}

uint32_t WindowLinks::epoch() const {
  return context_.group.cell(context_.rank).window_event.epoch.load(std::memory_order_seq_cst);
}

// A signal of another host always changes the epoch, see Window::note_signal.
void WindowLinks::sleep(int, Nanoseconds slice, uint32_t epoch) {
  sleep_on(context_.group.cell(context_.rank).window_event, epoch, slice);
}

// ---- asking ----------------------------------------------------------------------------------------

WindowReply WindowLinks::ask(int peer, const WindowRequest& request, std::span<const unsigned char> bytes,
                             std::span<unsigned char> into, bool replies, const WindowLimits& limits) {
  WindowLink& link = at(peer);
  const Turn turn(link, limits);
  Patience patience(*this, peer, limits);
  send(link, patience, request, bytes);
  ++link.unanswered;
  const WindowReply done{static_cast<uint32_t>(WindowStatus::kDone), -1};
  if (!replies && link.unanswered < kMostUnanswered) return done;
  settle(link, patience, replies ? 1 : 0);
  if (!replies) return done;
  const WindowReply reply = read_reply(link, patience);
  if (reply.status == static_cast<uint32_t>(WindowStatus::kLate)) {
    const bool lock = request.call == static_cast<uint32_t>(WindowCall::kLock);
    patience.blame(reply.rank < 0 ? WindowWait::kAnswer : lock ? WindowWait::kLock : WindowWait::kUpdate);
    patience.fail({FaultKind::kTimeout, context_.rank, reply.rank < 0 ? peer : int{reply.rank}});
  }
  if (reply.status == static_cast<uint32_t>(WindowStatus::kOutside))
    throw std::out_of_range("outside the memory that the target exposes");
  receive(link, patience, into.data(), into.size());
  return reply;
}

void WindowLinks::flush(int peer, const WindowLimits& limits) {
  WindowLink& link = at(peer);
  const Turn turn(link, limits);
  if (link.unanswered == 0) return;
  Patience patience(*this, peer, limits);
  settle(link, patience, 0);
}

// Reads replies until `left` are still to come.
void WindowLinks::settle(WindowLink& link, Patience& patience, size_t left) {
  while (link.unanswered > left) read_reply(link, patience);
}

WindowReply WindowLinks::read_reply(WindowLink& link, Patience& patience) {
  WindowReply reply;
  receive(link, patience, &reply, sizeof reply);
  --link.unanswered;
  const FrameError bad = check(reply, context_.group.ranks());
  if (bad.kind == FrameErrorKind::kNone) return reply;
  Fault fault{FaultKind::kBadFrame, context_.rank, link.peer};
  fault.frame = bad;
  patience.fail(fault);
}

void WindowLinks::send(WindowLink& link, Patience& patience, const WindowRequest& request,
                       std::span<const unsigned char> bytes) {
  const size_t total = sizeof request + bytes.size();
  for (size_t sent = 0; sent < total;) {
    const size_t of_head = std::min(sent, sizeof request), of_bytes = sent - of_head;
    auto* const head = reinterpret_cast<unsigned char*>(const_cast<WindowRequest*>(&request));
    iovec pieces[2] = {{head + of_head, sizeof request - of_head},
                       {const_cast<unsigned char*>(bytes.data()) + of_bytes, bytes.size() - of_bytes}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    const ssize_t taken = sendmsg(link.asking, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken >= 0)
      sent += static_cast<size_t>(taken);
    else if (would_block(errno))
      patience.pause(link.asking, POLLOUT);
    else if (errno == EFAULT)
      patience.fail({FaultKind::kUnreadable, context_.rank, context_.rank});
    else
      patience.lose();
  }
}

void WindowLinks::receive(WindowLink& link, Patience& patience, void* into, size_t nbytes) {
  for (auto* to = static_cast<unsigned char*>(into); nbytes > 0;) {
    const ssize_t got = recv(link.asking, to, nbytes, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      nbytes -= static_cast<size_t>(got);
    } else if (got < 0 && would_block(errno)) {
      patience.pause(link.asking, POLLIN);
    } else if (got < 0 && errno == EFAULT) {
      patience.fail({FaultKind::kUnwritable, context_.rank, context_.rank});
    } else {
      patience.lose();
    }
  }
}

// ---- serving ---------------------------------------------------------------------------------------

// What a peer that has ended holds stays held: nobody may see an update that is half done. The group, which
// fails by that end, ends the waits of the others.
void WindowLinks::serve(int peer) {
  try {
    WindowRequest request;
    while (read(peer, &request, sizeof request) && window_.serve(peer, request)) {
    }
  } catch (const std::bad_alloc&) {
    context_.group.abort_with({FaultKind::kNoMemory, context_.rank, context_.rank});
  }
  at(peer).ended = true;
  shutdown(at(peer).serving, SHUT_RDWR);
  notify_sleepers(context_.group.cell(context_.rank).window_event);
}

bool WindowLinks::read(int peer, void* into, size_t nbytes) {
  for (auto* to = static_cast<unsigned char*>(into); nbytes > 0;) {
    const ssize_t got = recv(at(peer).serving, to, nbytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    nbytes -= static_cast<size_t>(got);
  }
  return true;
}

bool WindowLinks::write(int peer, const void* from, size_t nbytes) {
  for (const auto* at_byte = static_cast<const unsigned char*>(from); nbytes > 0;) {
    const ssize_t sent = ::send(at(peer).serving, at_byte, nbytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at_byte += sent;
    nbytes -= static_cast<size_t>(sent);
  }
  return true;
}

bool WindowLinks::skip(int peer, size_t nbytes) {
  unsigned char bin[4096];
  for (; nbytes > 0; nbytes -= std::min(nbytes, sizeof bin))
    if (!read(peer, bin, std::min(nbytes, sizeof bin))) return false;
  return true;
}

}  // namespace unisono
