#include "protocol/control.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace unisono {
namespace {

// Other living ranks of the lost rank's host detect how it ended, and report it within this time.
constexpr Nanoseconds kMatesGrace = 2500 * kMillisecond;
// A leaving rank ends its data connections before it sends its close message on this one, and may lose the
// core in between. A process that has died has ended this connection, too.
constexpr Nanoseconds kDoubtGrace = 5000 * kMillisecond;
// The kernel sends a lost close message again, unless the process has ended before. Then its peer's data is
// answered by a reset, which reads as a death.
constexpr Nanoseconds kGoodbyePatience = 2000 * kMillisecond;
// So many frames are read from one peer before other work has its turn. So many bytes of frames that the
// kernel does not accept are kept for a peer: one that sends queries and does not read gets no more answers.
constexpr int kFramesPerTurn = 64;
constexpr size_t kMostKept = 64 * kControlBytes;
constexpr Nanoseconds kLongest = 1'000'000 * kMillisecond;

// Whether a connection has failed because its other end does not answer, and not by its end.
bool unanswered(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN ||
         error == ENETDOWN || error == ENONET;
}

}  // namespace

bool has_finished(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (socket < 0 || getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  return info.tcpi_state == TCP_CLOSE_WAIT || info.tcpi_state == TCP_LAST_ACK ||
         info.tcpi_state == TCP_CLOSING;
}

ControlPlane::ControlPlane(GroupState& world, const PeerProcesses& peers, int rank, FileDescriptors sockets)
    : world_(world),
      peers_(peers),
      rank_(rank),
      links_(sockets.size()),
      reported_dead_(sockets.size(), false) {
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    links_[peer].fd = std::move(sockets[peer]);
    links_[peer].reached_at = now_ns();  // the two ends have just exchanged bytes
  }
  thread_ = std::thread([this] { serve(); });
}

ControlPlane::~ControlPlane() {
  if (thread_.joinable()) leave(false);
}

// ---- called by other threads -----------------------------------------------------------------------

void ControlPlane::ask() {
  const std::lock_guard lock(mutex_);
  if (leaving_) return;
  for (ControlConnection& link : links_) {
    // One question at a time: a peer that is stopped reads none, and what comes behind must still reach it.
    if (!link.open() || link.asked) continue;
    link.asked = link.ask_due = true;
    link.asked_at = now_ns();
    ++due_;
  }
  world_.wake_control();
}

void ControlPlane::refresh(Nanoseconds patience) {
  ask();
  std::unique_lock lock(mutex_);
  answers_came_.wait_for(lock, std::chrono::nanoseconds(patience), [&] { return due_ == 0 || leaving_; });
}

void ControlPlane::announce() {
  const std::lock_guard lock(mutex_);
  announce_ = true;
  world_.wake_control();
}

void ControlPlane::propose() {
  const std::lock_guard lock(mutex_);
  propose_ = true;
  world_.wake_control();
}

ControlPlane::Contact ControlPlane::contact(int peer) {
  const std::lock_guard lock(mutex_);
  const ControlConnection& link = links_[static_cast<size_t>(peer)];
  const State ending = link.silent ? State::kSilent : link.reset ? State::kReset : State::kEnded;
  return {link.next_came ? State::kNext : link.ended ? ending : State::kOpen, link.heard};
}

FileDescriptors ControlPlane::hand_over(const std::vector<bool>& kept, Nanoseconds deadline) {
  {
    const std::lock_guard lock(mutex_);
    kept_ = kept;
    hand_over_until_ = deadline;
    answers_came_.notify_all();
  }
  world_.wake_control();
  if (thread_.joinable()) thread_.join();
  FileDescriptors sockets(links_.size());
  for (size_t peer = 0; peer < links_.size(); ++peer) sockets[peer] = std::move(links_[peer].fd);
  return sockets;
}

void ControlPlane::doubt(int peer) {
  const std::lock_guard lock(mutex_);
  lost(peer, kDoubtGrace);
  world_.wake_control();
}

int ControlPlane::find_silent(Nanoseconds limit) {
  const std::lock_guard lock(mutex_);
  const Nanoseconds now = now_ns();
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    const ControlConnection& link = links_[peer];
    if (link.open() && link.asked && now - link.asked_at > limit && now - link.heard > limit)
      return static_cast<int>(peer);
  }
  return -1;
}

bool ControlPlane::ended(int peer) {
  const std::lock_guard lock(mutex_);
  return links_[static_cast<size_t>(peer)].ended;
}

void ControlPlane::leave(bool forked) {
  if (!thread_.joinable()) return;
  if (forked) return thread_.detach();
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
    answers_came_.notify_all();
  }
  world_.wake_control();
  thread_.join();
}

void ControlPlane::close_copies() {
  for (ControlConnection& link : links_) link.fd.reset();
}

// ---- the thread ------------------------------------------------------------------------------------

void ControlPlane::serve() {
  for (;;) try {
      return serve_to_the_end();
    } catch (const std::bad_alloc&) {
      world_.abort_with(Fault{FaultKind::kNoMemory, rank_, rank_});
      usleep(1000);
    }
}

void ControlPlane::serve_to_the_end() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait(lock);
    for (int peer = 0; peer < world_.ranks(); ++peer) {
      ControlConnection& link = links_[static_cast<size_t>(peer)];
      if (link.open()) read_from(peer);
    }
    for (int peer = 0; peer < world_.ranks(); ++peer) {
      ControlConnection& link = links_[static_cast<size_t>(peer)];
      const bool lost = link.lost_at != 0 && link.lost_at != INT64_MAX;
      if (!lost || (now_ns() < link.lost_at && !(link.ended && nobody_tells(peer)))) continue;
      link.lost_at = INT64_MAX;  // report it once
      // The kernel of a dead process ends all its connections; the kernel of a lost host ends none.
      report(peer, {link.silent || !link.ended ? FaultKind::kHostSilent : FaultKind::kPeerLost});
    }
    lock.unlock();
    const std::vector<int> deaths = find_deaths();
    lock.lock();
    for (int peer : deaths) reported_dead_[static_cast<size_t>(peer)] = true;
    send_due_frames();
    if (leaving_) return drain_goodbyes(lock);
    if (handed_over()) return;
  }
}

// Waits briefly until the peers' kernels have acknowledged the close messages.
void ControlPlane::drain_goodbyes(std::unique_lock<std::mutex>& lock) {
  const Nanoseconds end = now_ns() + kGoodbyePatience;
  for (useconds_t nap = 50; now_ns() < end; nap = std::min<useconds_t>(2 * nap, 5000)) {
    bool under_way = false;
    for (int peer = 0; peer < world_.ranks(); ++peer) {
      ControlConnection& link = links_[static_cast<size_t>(peer)];
      if (link.open()) read_from(peer);
      int unacknowledged = 0;
      if (!link.open() || ioctl(link.fd, SIOCOUTQ, &unacknowledged) != 0) continue;
      under_way = under_way || unacknowledged > 0;
    }
    if (!under_way) return;
    lock.unlock();
    usleep(nap);
    lock.lock();
  }
}

// Sleeps until a connection is ready, a rank of this host ends, another thread calls, or a loss is due.
void ControlPlane::wait(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> polled{{world_.control_event(), POLLIN, 0}};
  for (int peer = 0; peer < world_.ranks(); ++peer) {
    const ControlConnection& link = links_[static_cast<size_t>(peer)];
    const short events = static_cast<short>(POLLIN | (link.out.empty() ? 0 : POLLOUT));
    const short last = static_cast<short>(link.out.empty() ? 0 : POLLOUT);
    if (link.open())
      polled.push_back({link.fd, events, 0});
    else if (link.writable() && last != 0)
      polled.push_back({link.fd, last, 0});
    if (peers_.pidfd(peer) >= 0 && !reported_dead_[static_cast<size_t>(peer)])
      polled.push_back({peers_.pidfd(peer), POLLIN, 0});
  }
  const Nanoseconds longest = patience();
  lock.unlock();
  poll(polled.data(), polled.size(),
       longest == INT64_MAX ? -1 : static_cast<int>(longest / kMillisecond) + 1);
  uint64_t count;
  if (polled[0].revents != 0) (void)!read(world_.control_event(), &count, sizeof count);
  lock.lock();
}

// The time until the next loss has to be reported.
Nanoseconds ControlPlane::patience() const {
  Nanoseconds first = INT64_MAX;
  for (const ControlConnection& link : links_)
    if (link.lost_at != 0) first = std::min(first, link.lost_at);
  if (!kept_.empty()) first = std::min(first, hand_over_until_);
  return first == INT64_MAX ? first : std::clamp<Nanoseconds>(first - now_ns(), 0, kLongest);
}

// Ranks of this host that have died. Other ranks of this host may be busy; ranks of other hosts wait for the
// report.
std::vector<int> ControlPlane::find_deaths() {
  std::vector<int> found;
  for (int peer = 0; peer < world_.ranks(); ++peer) {
    if (reported_dead_[static_cast<size_t>(peer)] || !peers_.dead(peer)) continue;
    found.push_back(peer);
    if (world_.cell(peer).left.load(std::memory_order_acquire) != 0) continue;
    Fault fault{FaultKind::kPeerLost};
    peers_.look_up(world_.cell(peer).pid.load(std::memory_order_relaxed), fault);
    report(peer, fault);
  }
  return found;
}

void ControlPlane::report(int peer, Fault fault) {
  fault.about = peer;
  fault.by = rank_;
  fault.seq = world_.cell(rank_).started.load(std::memory_order_relaxed);
  world_.abort_with(fault);
}

// Sends all frames that are due.
void ControlPlane::send_due_frames() {
  const bool tell = world_.aborted() && !abort_sent_;
  abort_sent_ = abort_sent_ || tell;
  for (int peer = 0; peer < world_.ranks(); ++peer) {
    ControlConnection& link = links_[static_cast<size_t>(peer)];
    if (!link.writable()) continue;
    flush(link);
    if (link.next_sent) continue;
    if (tell) send_to(peer, ControlKind::kAbort);
    if (announce_) send_to(peer, ControlKind::kAnswer);
    if (propose_) send_to(peer, ControlKind::kProposal);
    if (link.ask_due) send_to(peer, ControlKind::kAsk);
    link.ask_due = false;
    if (!kept_.empty() && kept_[static_cast<size_t>(peer)]) {
      send_to(peer, ControlKind::kNext);
      link.next_sent = true;
    }
    if (!leaving_) continue;
    send_to(peer, ControlKind::kLeft);
    shutdown(link.fd, SHUT_WR);
  }
  announce_ = propose_ = false;
}

// ---- frames ----------------------------------------------------------------------------------------

// Whether the connections to the kept ranks can be passed on: all bytes have been sent, and their last frames
// came.
bool ControlPlane::handed_over() const {
  if (kept_.empty()) return false;
  bool done = true;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    const ControlConnection& link = links_[peer];
    if (kept_[peer] && link.writable()) done = done && link.out.empty() && link.next_came;
  }
  return done || now_ns() >= hand_over_until_;
}

void ControlPlane::send_to(int peer, ControlKind kind) {
  ControlConnection& link = links_[static_cast<size_t>(peer)];
  if (link.next_sent) return;
  if (kind == ControlKind::kAnswer && link.out.size() > kMostKept) return;
  ControlFrame frame{kind, {}, read_status(world_.cell(rank_))};
  if (kind == ControlKind::kAbort) frame.fault = world_.fault();
  if (kind == ControlKind::kProposal) {
    std::vector<unsigned char> proposal;
    world_.proposal_of(rank_, proposal);
    frame.proposal.nbytes = static_cast<uint32_t>(proposal.size());
    std::copy(proposal.begin(), proposal.end(), frame.proposal.bytes);
  }
  const ControlBytes bytes = encode(frame);
  link.out.insert(link.out.end(), bytes.begin(), bytes.end());
  flush(link);
}

void ControlPlane::flush(ControlConnection& link) {
  if (link.out.empty()) return;
  const ssize_t sent = send(link.fd, link.out.data(), link.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) link.out.erase(link.out.begin(), link.out.begin() + sent);
  // A broken connection is handled when it is read: frames that arrived before come first.
  if (sent < 0 && errno != EAGAIN && errno != EINTR) link.out.clear();
}

void ControlPlane::read_from(int peer) {
  ControlConnection& link = links_[static_cast<size_t>(peer)];
  for (int frames = 0; frames < kFramesPerTurn && link.open();) {
    const ssize_t got = recv(link.fd, link.in.data() + link.have, link.in.size() - link.have, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      link.silent = got < 0 && unanswered(errno);
      link.reset = got < 0 && proves_nothing(link);
      link.ended = true;
      return lost(peer, kMatesGrace);
    }
    link.have += static_cast<size_t>(got);
    if (link.have < link.in.size()) continue;
    link.have = 0;
    ++frames;
    ControlFrame frame;
    FrameError bad = parse(link.in, world_.ranks(), frame);
    const bool over = world_.cell(peer).left.load(std::memory_order_acquire) != 0;
    if (over && bad.kind == FrameErrorKind::kNone)
      bad = {ConnectionKind::kControl, FrameErrorKind::kAfterEnd, uint64_t(frame.kind)};
    if (bad.kind != FrameErrorKind::kNone) return refuse(peer, bad);
    handle(peer, frame);
  }
}

// Whether a reset may come from a living process: its kernel drops a connection that was cut for so long that
// nothing came from here. A process that ends with unread bytes resets its connections at once.
bool ControlPlane::proves_nothing(const ControlConnection& link) {
  unsigned timeout_ms = 0;
  socklen_t size = sizeof timeout_ms;
  if (getsockopt(link.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &size) != 0) return true;
  return now_ns() - link.reached_at >= Nanoseconds{timeout_ms} * kMillisecond / 2;
}

// Ends the group and, once its sender has the report, the connection.
void ControlPlane::refuse(int peer, const FrameError& bad) {
  Fault fault{FaultKind::kBadFrame, rank_, peer};
  fault.seq = world_.cell(rank_).started.load(std::memory_order_relaxed);
  fault.frame = bad;
  world_.abort_with(fault);
  ControlConnection& link = links_[static_cast<size_t>(peer)];
  send_to(peer, ControlKind::kAbort);
  shutdown(link.fd, SHUT_RDWR);
  link.ended = true;
  link.lost_at = INT64_MAX;
  answered(link);
}

void ControlPlane::handle(int peer, const ControlFrame& frame) {
  RankCell& cell = world_.cell(peer);
  ControlConnection& link = links_[static_cast<size_t>(peer)];
  link.heard = now_ns();
  if (frame.kind == ControlKind::kProposal)
    return world_.propose(peer, {frame.proposal.bytes, frame.proposal.nbytes});
  world_.take_status(peer, frame.status);
  if (frame.kind == ControlKind::kNext) {
    answered(link);
    link.next_came = true;
    link.lost_at = INT64_MAX;  // its end, too, belongs to the next membership
    return;
  }
  if (frame.kind == ControlKind::kAsk) send_to(peer, ControlKind::kAnswer);
  if (frame.kind == ControlKind::kAnswer) answered(link);
  if (frame.kind == ControlKind::kAbort) world_.abort_with(frame.fault);
  if (frame.kind != ControlKind::kLeft) return;
  answered(link);
  link.lost_at = INT64_MAX;  // what follows is the connection's end
  cell.left.store(1, std::memory_order_seq_cst);
}

// The loss is reported after `grace`, unless the peer's close message or a more exact report comes first.
void ControlPlane::lost(int peer, Nanoseconds grace) {
  ControlConnection& link = links_[static_cast<size_t>(peer)];
  if (link.ended) answered(link);
  const Nanoseconds when = now_ns() + grace;
  if (link.lost_at == 0 || when < link.lost_at)
    link.lost_at = world_.cell(peer).left.load(std::memory_order_acquire) != 0 ? INT64_MAX : when;
}

// Whether no other rank of its host is left that could report how it ended.
bool ControlPlane::nobody_tells(int peer) const {
  for (int other = 0; other < world_.ranks(); ++other)
    if (links_[static_cast<size_t>(other)].open() && world_.share_host(peer, other)) return false;
  return true;
}

void ControlPlane::answered(ControlConnection& link) {
  if (!link.asked) return;
  link.asked = false;
  if (!link.ended) link.reached_at = link.asked_at;
  if (--due_ == 0) answers_came_.notify_all();
}

}  // namespace unisono
