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

#include "protocol/stack_sample.hpp"

namespace unisono {
namespace {

// Other living ranks of the lost rank's host detect how it ended, and report it within this time.
constexpr Nanoseconds kMatesGrace = 2500 * kMillisecond;
// A leaving rank ends its data connections before it sends its close message on this one, and may lose the
// core in between. A process that has died has ended this connection, too.
constexpr Nanoseconds kSuspicionGrace = 5000 * kMillisecond;
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

ControlPlane::ControlPlane(GroupState& group, const PeerProcesses& peers, int rank, FileDescriptors sockets)
    : group_(group),
      peers_(peers),
      rank_(rank),
      connections_(sockets.size()),
      reported_dead_(sockets.size(), false) {
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    connections_[peer].fd = std::move(sockets[peer]);
    connections_[peer].answered_ask_at = now_ns();  // the two ends have just exchanged bytes
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
  for (ControlConnection& connection : connections_) {
    // One question at a time: a peer that is stopped reads none, and what comes behind must still reach it.
    if (!connection.open() || connection.answer_due) continue;
    connection.answer_due = connection.ask_due = true;
    connection.asked_at = now_ns();
    ++answers_due_;
  }
  group_.wake_control();
}

void ControlPlane::refresh(Nanoseconds limit) {
  ask();
  const Fault fault = group_.fault();
  std::unique_lock lock(mutex_);
  answer_arrived_.wait_for(lock, std::chrono::nanoseconds(limit),
                           [&] { return answers_due_ == unanswerable(fault) || leaving_; });
}

// The answers due that will not come: of a stopped rank, or of all ranks of a silent host.
size_t ControlPlane::unanswerable(const Fault& fault) const {
  if (fault.kind != FaultKind::kStopped && fault.kind != FaultKind::kHostSilent) return 0;
  size_t count = 0;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    const bool silent =
        peer == fault.rank || (fault.kind == FaultKind::kHostSilent && group_.share_host(peer, fault.rank));
    count += silent && connections_[static_cast<size_t>(peer)].answer_due ? 1 : 0;
  }
  return count;
}

void ControlPlane::announce() {
  const std::lock_guard lock(mutex_);
  announce_ = true;
  group_.wake_control();
}

void ControlPlane::propose() {
  const std::lock_guard lock(mutex_);
  propose_ = true;
  group_.wake_control();
}

ControlPlane::Contact ControlPlane::contact(int peer) {
  const std::lock_guard lock(mutex_);
  const ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  const State ending = connection.silent ? State::kSilent : connection.reset ? State::kReset : State::kEnded;
  return {connection.next_received ? State::kNext
          : connection.ended       ? ending
                                   : State::kOpen,
          connection.newest_frame_at};
}

FileDescriptors ControlPlane::hand_over(const std::vector<bool>& next_members, Nanoseconds deadline) {
  {
    const std::lock_guard lock(mutex_);
    next_members_ = next_members;
    hand_over_until_ = deadline;
    answer_arrived_.notify_all();
  }
  group_.wake_control();
  if (thread_.joinable()) thread_.join();
  FileDescriptors sockets(connections_.size());
  for (size_t peer = 0; peer < connections_.size(); ++peer) sockets[peer] = std::move(connections_[peer].fd);
  return sockets;
}

void ControlPlane::suspect(int peer) {
  const std::lock_guard lock(mutex_);
  report_loss_after(peer, kSuspicionGrace);
  group_.wake_control();
}

int ControlPlane::find_silent(Nanoseconds limit) {
  const std::lock_guard lock(mutex_);
  const Nanoseconds now = now_ns();
  for (size_t peer = 0; peer < connections_.size(); ++peer) {
    const ControlConnection& connection = connections_[peer];
    if (connection.open() && connection.answer_due && now - connection.asked_at > limit &&
        now - connection.newest_frame_at > limit)
      return static_cast<int>(peer);
  }
  return -1;
}

bool ControlPlane::ended(int peer) {
  const std::lock_guard lock(mutex_);
  return connections_[static_cast<size_t>(peer)].ended;
}

void ControlPlane::leave(bool forked) {
  if (!thread_.joinable()) return;
  if (forked) return thread_.detach();
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
    answer_arrived_.notify_all();
  }
  group_.wake_control();
  thread_.join();
}

void ControlPlane::close_copies() {
  for (ControlConnection& connection : connections_) connection.fd.reset();
}

// ---- the thread ------------------------------------------------------------------------------------

void ControlPlane::serve() {
  for (;;) try {
      return serve_to_the_end();
    } catch (const std::bad_alloc&) {
      group_.abort_with(Fault{FaultKind::kNoMemory, rank_, rank_});
      usleep(1000);
    }
}

void ControlPlane::serve_to_the_end() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait(lock);
    for (int peer = 0; peer < group_.ranks(); ++peer) {
      ControlConnection& connection = connections_[static_cast<size_t>(peer)];
      if (connection.open()) read_from(peer);
    }
    for (int peer = 0; peer < group_.ranks(); ++peer) {
      ControlConnection& connection = connections_[static_cast<size_t>(peer)];
      const bool lost = connection.report_loss_at != 0 && connection.report_loss_at != INT64_MAX;
      if (!lost || (now_ns() < connection.report_loss_at && !(connection.ended && no_reporter_left(peer))))
        continue;
      connection.report_loss_at = INT64_MAX;  // report it once
      // The kernel of a dead process ends all its connections; the kernel of a lost host ends none.
      report(peer, {connection.silent || !connection.ended ? FaultKind::kHostSilent : FaultKind::kPeerLost});
    }
    lock.unlock();
    const std::vector<int> deaths = find_deaths();
    lock.lock();
    for (int peer : deaths) reported_dead_[static_cast<size_t>(peer)] = true;
    send_due_frames();
    if (leaving_) return drain_goodbyes(lock);
    if (handed_over()) return;
    if (located_ || !std::ranges::count(late_ranks(group_), rank_)) continue;
    located_ = true;
    lock.unlock();
    locate_late_ranks(group_, peers_);
    announce();
    lock.lock();
  }
}

// Waits briefly until the peers' kernels have acknowledged the close messages.
void ControlPlane::drain_goodbyes(std::unique_lock<std::mutex>& lock) {
  const Nanoseconds end = now_ns() + kGoodbyePatience;
  for (useconds_t nap = 50; now_ns() < end; nap = std::min<useconds_t>(2 * nap, 5000)) {
    bool under_way = false;
    for (int peer = 0; peer < group_.ranks(); ++peer) {
      ControlConnection& connection = connections_[static_cast<size_t>(peer)];
      if (connection.open()) read_from(peer);
      int unacknowledged = 0;
      if (!connection.open() || ioctl(connection.fd, SIOCOUTQ, &unacknowledged) != 0) continue;
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
  std::vector<pollfd> polled{{group_.control_event(), POLLIN, 0}};
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    const ControlConnection& connection = connections_[static_cast<size_t>(peer)];
    const short events = static_cast<short>(POLLIN | (connection.out.empty() ? 0 : POLLOUT));
    const short last = static_cast<short>(connection.out.empty() ? 0 : POLLOUT);
    if (connection.open())
      polled.push_back({connection.fd, events, 0});
    else if (connection.writable() && last != 0)
      polled.push_back({connection.fd, last, 0});
    if (peers_.pidfd(peer) >= 0 && !reported_dead_[static_cast<size_t>(peer)])
      polled.push_back({peers_.pidfd(peer), POLLIN, 0});
  }
  const Nanoseconds longest = time_to_next_loss();
  lock.unlock();
  poll(polled.data(), polled.size(),
       longest == INT64_MAX ? -1 : static_cast<int>(longest / kMillisecond) + 1);
  uint64_t count;
  if (polled[0].revents != 0) (void)!read(group_.control_event(), &count, sizeof count);
  lock.lock();
}

// The time until the next loss has to be reported.
Nanoseconds ControlPlane::time_to_next_loss() const {
  Nanoseconds first = INT64_MAX;
  for (const ControlConnection& connection : connections_)
    if (connection.report_loss_at != 0) first = std::min(first, connection.report_loss_at);
  if (!next_members_.empty()) first = std::min(first, hand_over_until_);
  return first == INT64_MAX ? first : std::clamp<Nanoseconds>(first - now_ns(), 0, kLongest);
}

// Ranks of this host that have died. Other ranks of this host may be busy; ranks of other hosts wait for the
// report.
std::vector<int> ControlPlane::find_deaths() {
  std::vector<int> found;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    if (reported_dead_[static_cast<size_t>(peer)] || !peers_.dead(peer)) continue;
    found.push_back(peer);
    if (group_.cell(peer).left.load(std::memory_order_acquire) != 0) continue;
    Fault fault{FaultKind::kPeerLost};
    peers_.look_up(group_.process_of(peer), fault);
    report(peer, fault);
  }
  return found;
}

void ControlPlane::report(int peer, Fault fault) {
  fault.rank = peer;
  fault.found_by = rank_;
  fault.seq = group_.cell(rank_).started.load(std::memory_order_relaxed);
  group_.abort_with(fault);
}

// Sends all frames that are due.
void ControlPlane::send_due_frames() {
  const bool sends_abort = group_.aborted() && !abort_sent_;
  abort_sent_ = abort_sent_ || sends_abort;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    ControlConnection& connection = connections_[static_cast<size_t>(peer)];
    if (!connection.writable()) continue;
    flush(connection);
    if (connection.next_sent) continue;
    if (sends_abort) send_to(peer, ControlKind::kAbort);
    if (announce_) send_to(peer, ControlKind::kAnswer);
    if (propose_) send_to(peer, ControlKind::kProposal);
    if (connection.ask_due) send_to(peer, ControlKind::kAsk);
    connection.ask_due = false;
    if (!next_members_.empty() && next_members_[static_cast<size_t>(peer)]) {
      send_to(peer, ControlKind::kNext);
      connection.next_sent = true;
    }
    if (!leaving_) continue;
    send_to(peer, ControlKind::kLeft);
    shutdown(connection.fd, SHUT_WR);
  }
  announce_ = propose_ = false;
}

// ---- frames ----------------------------------------------------------------------------------------

// Whether the connections to the kept ranks can be passed on: all bytes have been sent, and their last frames
// came.
bool ControlPlane::handed_over() const {
  if (next_members_.empty()) return false;
  bool done = true;
  for (size_t peer = 0; peer < connections_.size(); ++peer) {
    const ControlConnection& connection = connections_[peer];
    if (next_members_[peer] && connection.writable())
      done = done && connection.out.empty() && connection.next_received;
  }
  return done || now_ns() >= hand_over_until_;
}

void ControlPlane::send_to(int peer, ControlKind kind) {
  ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  if (connection.next_sent) return;
  if (kind == ControlKind::kAnswer && connection.out.size() > kMostKept) return;
  ControlFrame frame{kind, {}, read_status(group_.cell(rank_))};
  if (kind == ControlKind::kAbort) frame.fault = group_.fault();
  if (kind == ControlKind::kProposal) {
    std::vector<unsigned char> proposal;
    group_.proposal_of(rank_, proposal);
    frame.proposal.nbytes = static_cast<uint32_t>(proposal.size());
    std::copy(proposal.begin(), proposal.end(), frame.proposal.bytes);
  }
  const ControlBytes bytes = encode(frame);
  connection.out.insert(connection.out.end(), bytes.begin(), bytes.end());
  flush(connection);
}

void ControlPlane::flush(ControlConnection& connection) {
  if (connection.out.empty()) return;
  const ssize_t sent =
      send(connection.fd, connection.out.data(), connection.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent > 0) connection.out.erase(connection.out.begin(), connection.out.begin() + sent);
  // A broken connection is handled when it is read: frames that arrived before come first.
  if (sent < 0 && errno != EAGAIN && errno != EINTR) connection.out.clear();
}

void ControlPlane::read_from(int peer) {
  ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  for (int frames = 0; frames < kFramesPerTurn && connection.open();) {
    const ssize_t got = recv(connection.fd, connection.in.data() + connection.received_bytes,
                             connection.in.size() - connection.received_bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got <= 0) {
      connection.silent = got < 0 && unanswered(errno);
      connection.reset = got < 0 && may_be_a_cut(connection);
      connection.ended = true;
      return report_loss_after(peer, kMatesGrace);
    }
    connection.received_bytes += static_cast<size_t>(got);
    if (connection.received_bytes < connection.in.size()) continue;
    connection.received_bytes = 0;
    ++frames;
    ControlFrame frame;
    FrameError bad = parse(connection.in, group_.ranks(), frame);
    const bool over = group_.cell(peer).left.load(std::memory_order_acquire) != 0;
    if (over && bad.kind == FrameErrorKind::kNone)
      bad = {ConnectionKind::kControl, FrameErrorKind::kAfterEnd, uint64_t(frame.kind)};
    if (bad.kind != FrameErrorKind::kNone) return refuse(peer, bad);
    handle(peer, frame);
  }
}

// Whether a reset may come from a living process: its kernel drops a connection that was cut for so long that
// nothing came from here. A process that ends with unread bytes resets its connections at once.
bool ControlPlane::may_be_a_cut(const ControlConnection& connection) {
  unsigned timeout_ms = 0;
  socklen_t size = sizeof timeout_ms;
  if (getsockopt(connection.fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, &size) != 0) return true;
  return now_ns() - connection.answered_ask_at >= Nanoseconds{timeout_ms} * kMillisecond / 2;
}

// Ends the group and, once its sender has the report, the connection.
void ControlPlane::refuse(int peer, const FrameError& bad) {
  Fault fault{FaultKind::kBadFrame, rank_, peer};
  fault.seq = group_.cell(rank_).started.load(std::memory_order_relaxed);
  fault.frame = bad;
  group_.abort_with(fault);
  ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  send_to(peer, ControlKind::kAbort);
  shutdown(connection.fd, SHUT_RDWR);
  connection.ended = true;
  connection.report_loss_at = INT64_MAX;
  answered(connection);
}

void ControlPlane::handle(int peer, const ControlFrame& frame) {
  RankCell& cell = group_.cell(peer);
  ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  connection.newest_frame_at = now_ns();
  if (frame.kind == ControlKind::kProposal)
    return group_.propose(peer, {frame.proposal.bytes, frame.proposal.nbytes});
  group_.take_status(peer, frame.status);
  if (frame.kind == ControlKind::kNext) {
    answered(connection);
    connection.next_received = true;
    connection.report_loss_at = INT64_MAX;  // its end, too, belongs to the next membership
    return;
  }
  if (frame.kind == ControlKind::kAsk) send_to(peer, ControlKind::kAnswer);
  if (frame.kind == ControlKind::kAnswer) answered(connection);
  if (frame.kind == ControlKind::kAbort) group_.abort_with(frame.fault);
  if (frame.kind != ControlKind::kLeft) return;
  answered(connection);
  connection.report_loss_at = INT64_MAX;  // what follows is the connection's end
  cell.left.store(1, std::memory_order_seq_cst);
}

// The loss is reported after `grace`, unless the peer's close message or a more exact report comes first.
void ControlPlane::report_loss_after(int peer, Nanoseconds grace) {
  ControlConnection& connection = connections_[static_cast<size_t>(peer)];
  if (connection.ended) answered(connection);
  const Nanoseconds when = now_ns() + grace;
  if (connection.report_loss_at == 0 || when < connection.report_loss_at)
    connection.report_loss_at =
        group_.cell(peer).left.load(std::memory_order_acquire) != 0 ? INT64_MAX : when;
}

// Whether no other rank of its host is left that could report how it ended.
bool ControlPlane::no_reporter_left(int peer) const {
  for (int other = 0; other < group_.ranks(); ++other)
    if (connections_[static_cast<size_t>(other)].open() && group_.share_host(peer, other)) return false;
  return true;
}

void ControlPlane::answered(ControlConnection& connection) {
  if (!connection.answer_due) return;
  connection.answer_due = false;
  if (!connection.ended) connection.answered_ask_at = connection.asked_at;
  --answers_due_;
  answer_arrived_.notify_all();
}

}  // namespace unisono
