#include "transport/tcp.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "transport/congestion.hpp"

namespace unisono {
namespace {

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

timespec span_of(Nanoseconds slice) { return {slice / 1'000'000'000LL, slice % 1'000'000'000LL}; }

constexpr size_t kPieces = 16;  // per sendmsg

ssize_t send_all(int socket, iovec* pieces, size_t count) {
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = count;
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

}  // namespace

TcpTransport::TcpTransport(GroupState& group, ControlPlane& control, int rank, FileDescriptors sockets)
    : group_(group), control_(control), rank_(rank), edges_(sockets.size()) {
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    if (sockets[peer] < 0) continue;
    avoid_pacing(sockets[peer]);
    edges_[peer].fd = std::move(sockets[peer]);
  }
}

void TcpTransport::close_copies() {
  for (TcpEndpoint& edge : edges_) edge.fd.reset();
}

void TcpTransport::begin(uint64_t seq, uint64_t fingerprint) {
  seq_ = seq;
  fingerprint_ = fingerprint;
}

void TcpTransport::finish() {
  for (const TcpEndpoint& edge : edges_)
    if (edge.fd >= 0) shutdown(edge.fd, SHUT_WR);
}

FileDescriptors TcpTransport::take() {
  discard_unsent();
  FileDescriptors taken(edges_.size());
  for (size_t peer = 0; peer < edges_.size(); ++peer) taken[peer] = std::move(edges_[peer].fd);
  return taken;
}

void TcpTransport::mark_broken(int peer) {
  clear_unsent(edge(peer));
  edge(peer).broken = true;
  control_.suspect(peer);
}

void TcpTransport::discard_unsent() {
  for (TcpEndpoint& edge : edges_) clear_unsent(edge);
}

void TcpTransport::clear_unsent(TcpEndpoint& to) {
  unsent_bytes_ -= to.unsent;
  to.unsent = 0;
  to.out.clear();
}

// ---- sending ---------------------------------------------------------------------------------------

void* TcpTransport::reserve(std::span<const int> peers, size_t nbytes) {
  for (int peer : peers) {
    TcpEndpoint& to = edge(peer);
    if (to.unsent > 0) flush(peer);
    if (!to.broken && (to.unsent == 0 || to.unsent + nbytes <= kMostUnsent)) continue;
    blocking_peer_ = peer;
    awaited_peer_ = -1;
    return nullptr;
  }
  copy_unsent(staging_.data(), staging_.size());
  if (staging_.size() < nbytes + 1) staging_.resize(nbytes + 1);
  return staging_.data();
}

void TcpTransport::commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) {
  for (int peer : peers) send(peer, Header{nbytes, fingerprint}, from);
}

void TcpTransport::send(int peer, const Header& header, const void* from) {
  TcpEndpoint& to = edge(peer);
  const auto* const payload = static_cast<const unsigned char*>(from);
  size_t sent = 0;
  if (to.out.empty()) {
    iovec pieces[2] = {{const_cast<Header*>(&header), sizeof header},
                       {const_cast<unsigned char*>(payload), header.nbytes}};
    const ssize_t taken = send_all(to.fd, pieces, header.nbytes > 0 ? 2 : 1);
    if (taken < 0 && errno == EFAULT) group_.fail({FaultKind::kUnreadable, rank_, rank_});
    if (taken < 0 && !would_block(errno)) return mark_broken(peer);
    if (taken > 0) sent = static_cast<size_t>(taken);
  }
  if (sent == sizeof header + header.nbytes) return;
  to.out.push_back({header, payload, sent, {}});
  to.unsent += to.out.back().remaining();
  unsent_bytes_ += to.out.back().remaining();
}

void TcpTransport::copy_unsent(const void* data, size_t nbytes) {
  if (unsent_bytes_ == 0) return;
  const auto* const begin = static_cast<const unsigned char*>(data);
  for (TcpEndpoint& to : edges_)
    for (OutgoingFrame& one : to.out) {
      const size_t length = one.header.nbytes;
      if (!one.copy.empty() || one.payload >= begin + nbytes || begin >= one.payload + length) continue;
      one.copy.assign(one.payload, one.payload + length);
      one.payload = one.copy.data();
    }
}

void TcpTransport::flush(int peer) {
  TcpEndpoint& to = edge(peer);
  while (!to.out.empty()) {
    iovec pieces[kPieces];
    size_t count = 0, asked = 0;
    for (auto one = to.out.begin(); one != to.out.end() && count + 2 <= kPieces; ++one) {
      const size_t of_head = std::min(one->sent, sizeof(Header)), of_payload = one->sent - of_head;
      auto* const head = reinterpret_cast<unsigned char*>(&one->header);
      if (of_head < sizeof(Header)) pieces[count++] = {head + of_head, sizeof(Header) - of_head};
      auto* const payload = const_cast<unsigned char*>(one->payload);
      if (of_payload < one->header.nbytes)
        pieces[count++] = {payload + of_payload, one->header.nbytes - of_payload};
      asked += one->remaining();
    }
    const ssize_t taken = send_all(to.fd, pieces, count);
    if (taken < 0 && errno == EFAULT) group_.fail({FaultKind::kUnreadable, rank_, rank_});
    if (taken < 0 && !would_block(errno)) return mark_broken(peer);
    if (taken > 0) mark_sent(to, static_cast<size_t>(taken));
    if (taken < static_cast<ssize_t>(asked)) return;
  }
}

// Called when the kernel has accepted `nbytes` of the queued bytes.
void TcpTransport::mark_sent(TcpEndpoint& to, size_t nbytes) {
  to.unsent -= nbytes;
  unsent_bytes_ -= nbytes;
  while (nbytes > 0) {
    OutgoingFrame& first = to.out.front();
    const size_t piece = std::min(nbytes, first.remaining());
    first.sent += piece;
    nbytes -= piece;
    if (first.remaining() == 0) to.out.pop_front();
  }
}

void TcpTransport::flush() {
  if (unsent_bytes_ == 0) return;
  for (int peer = 0; peer < static_cast<int>(edges_.size()); ++peer) flush(peer);
}

int TcpTransport::unsent() const {
  if (unsent_bytes_ == 0) return -1;
  for (size_t peer = 0; peer < edges_.size(); ++peer)
    if (edges_[peer].unsent > 0) return static_cast<int>(peer);
  return -1;
}

// ---- receiving -------------------------------------------------------------------------------------

bool TcpTransport::peek(int peer, size_t nbytes, void* into, MessageView& message) {
  if (into == nullptr) return peek_part(peer, nbytes, 0, nbytes, message);
  if (!fill(peer, nbytes, 0, nbytes, static_cast<unsigned char*>(into))) return false;
  message = {into, edge(peer).header.nbytes, edge(peer).header.fingerprint};
  return true;
}

bool TcpTransport::peek_part(int peer, size_t nbytes, size_t first, size_t count, MessageView& message) {
  TcpEndpoint& from = edge(peer);
  if (from.in.size() < count + 1) from.in.resize(count + 1);
  if (!fill(peer, nbytes, first, count, from.in.data())) return false;
  message = {from.in.data(), from.header.nbytes, from.header.fingerprint};
  return true;
}

// Reads up to byte first + count of a message that should have `nbytes`, and stores the bytes from `first` on
// at `target`. True when they have arrived. Returns true for a message of another size, too, without reading
// it: the caller rejects it by its header.
bool TcpTransport::fill(int peer, size_t nbytes, size_t first, size_t count, unsigned char* target) {
  TcpEndpoint& from = edge(peer);
  awaited_peer_ = peer;
  constexpr size_t kHead = sizeof(Header);
  const size_t enough = kHead + first + count;
  const auto misfits = [&] { return from.received_bytes >= kHead && from.header.nbytes != nbytes; };
  while (!from.ended && from.received_bytes < enough && !misfits()) {
    const size_t of_head = std::min(from.received_bytes, kHead), of_payload = from.received_bytes - of_head;
    iovec pieces[2] = {{reinterpret_cast<unsigned char*>(&from.header) + of_head, kHead - of_head},
                       {target + (of_payload - first), enough - kHead - of_payload}};
    msghdr message{};
    message.msg_iov = of_head == kHead ? pieces + 1 : pieces;
    message.msg_iovlen = (of_head < kHead ? 1 : 0) + (pieces[1].iov_len > 0 ? 1 : 0);
    const ssize_t got = recvmsg(from.fd, &message, MSG_DONTWAIT);
    if (got < 0 && would_block(errno)) {
      flush();  // this rank has to wait anyway
      return false;
    }
    if (got < 0 && errno == EFAULT) group_.fail({FaultKind::kUnwritable, rank_, rank_});
    if (got <= 0) {
      from.ended = true;
      control_.suspect(peer);
      return false;
    }
    from.received_bytes += static_cast<size_t>(got);
  }
  if (from.received_bytes < enough && !misfits()) return false;
  return true;
}

void TcpTransport::release(int peer) {
  record_peer_progress(peer);
  edge(peer).received_bytes = 0;
}

// A received message shows that its sender has begun this operation, with the same call as this rank.
void TcpTransport::record_peer_progress(int peer) {
  TcpEndpoint& from = edge(peer);
  if (from.newest_seq == seq_) return;
  from.newest_seq = seq_;
  RankStatus status{};
  status.started = seq_;
  status.finished = seq_ - 1;
  status.history[0] = read_record(group_.cell(rank_), seq_);
  group_.take_status(peer, status);
}

// ---- sleeping --------------------------------------------------------------------------------------

void TcpTransport::sleep(int awaited, Nanoseconds slice, uint32_t) {
  std::vector<pollfd> polled;
  for (int peer = 0; peer < static_cast<int>(edges_.size()); ++peer) {
    const TcpEndpoint& one = edges_[static_cast<size_t>(peer)];
    const bool reads = peer == awaited && awaited_peer_ == peer && !one.ended;
    const bool writes = one.unsent > 0;
    if (one.fd < 0 || !(reads || writes)) continue;
    polled.push_back({one.fd, static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0});
  }
  const timespec timeout = span_of(slice);
  ppoll(polled.data(), polled.size(), &timeout, nullptr);
}

}  // namespace unisono
