#include "tcp.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace unisono {
namespace {

bool later_perhaps(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

timespec span_of(Nanoseconds slice) { return {slice / 1'000'000'000LL, slice % 1'000'000'000LL}; }

}  // namespace

TcpTransport::TcpTransport(World& world, Control& control, int rank, std::vector<int> sockets)
    : world_(world), control_(control), rank_(rank), edges_(sockets.size()) {
  for (size_t peer = 0; peer < sockets.size(); ++peer) edges_[peer].fd = sockets[peer];
}

TcpTransport::~TcpTransport() {
  for (const Edge& edge : edges_)
    if (edge.fd >= 0) close(edge.fd);
}

void TcpTransport::close_copies() {
  for (Edge& edge : edges_)
    if (edge.fd >= 0) close(std::exchange(edge.fd, -1));
}

void TcpTransport::begin(uint64_t seq, uint64_t fingerprint) {
  seq_ = seq;
  fingerprint_ = fingerprint;
}

void TcpTransport::finish() {
  for (const Edge& edge : edges_)
    if (edge.fd >= 0) shutdown(edge.fd, SHUT_WR);
}

void TcpTransport::broke(int peer) {
  Edge& to = edge(peer);
  unsent_bytes_ -= to.out.size() - to.out_from;
  to.out.clear();
  to.out_from = 0;
  to.broken = true;
  control_.doubt(peer);
}

// ---- sending ---------------------------------------------------------------------------------------

void* TcpTransport::reserve(std::span<const int> peers, size_t nbytes) {
  for (int peer : peers) {
    Edge& to = edge(peer);
    size_t unsent = to.out.size() - to.out_from;
    if (unsent > 0) flush(peer);
    unsent = to.out.size() - to.out_from;
    if (!to.broken && (unsent == 0 || unsent + nbytes <= kMostUnsent)) continue;
    blocking_peer_ = peer;
    wanted_ = -1;
    return nullptr;
  }
  if (staging_.size() < nbytes + 1) staging_.resize(nbytes + 1);
  return staging_.data();
}

void TcpTransport::commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) {
  for (int peer : peers) send(peer, Header{nbytes, fingerprint}, from);
}

void TcpTransport::send(int peer, const Header& header, const void* from) {
  Edge& to = edge(peer);
  const auto* const head = reinterpret_cast<const unsigned char*>(&header);
  const auto* const payload = static_cast<const unsigned char*>(from);
  size_t sent = 0;
  if (to.out.empty()) {
    iovec pieces[2] = {{const_cast<unsigned char*>(head), sizeof header},
                       {const_cast<unsigned char*>(payload), header.nbytes}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = header.nbytes > 0 ? 2 : 1;
    const ssize_t taken = sendmsg(to.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken < 0 && !later_perhaps(errno)) return broke(peer);
    if (taken > 0) sent = static_cast<size_t>(taken);
  }
  const size_t of_head = std::min(sent, sizeof header), of_payload = sent - of_head;
  if (sent == sizeof header + header.nbytes) return;
  if (to.out_from > to.out.size() / 2) {  // what has gone need not be kept
    to.out.erase(to.out.begin(), to.out.begin() + static_cast<ptrdiff_t>(to.out_from));
    to.out_from = 0;
  }
  to.out.insert(to.out.end(), head + of_head, head + sizeof header);
  to.out.insert(to.out.end(), payload + of_payload, payload + header.nbytes);
  unsent_bytes_ += sizeof header + header.nbytes - sent;
}

void TcpTransport::flush(int peer) {
  Edge& to = edge(peer);
  const size_t left = to.out.size() - to.out_from;
  if (left == 0) return;
  const ssize_t taken = ::send(to.fd, to.out.data() + to.out_from, left, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (taken < 0) {
    if (!later_perhaps(errno)) broke(peer);
    return;
  }
  to.out_from += static_cast<size_t>(taken);
  unsent_bytes_ -= static_cast<size_t>(taken);
  if (to.out_from < to.out.size()) return;
  to.out.clear();
  to.out_from = 0;
}

void TcpTransport::flush() {
  if (unsent_bytes_ == 0) return;
  for (int peer = 0; peer < static_cast<int>(edges_.size()); ++peer) flush(peer);
}

int TcpTransport::unsent() const {
  if (unsent_bytes_ == 0) return -1;
  for (size_t peer = 0; peer < edges_.size(); ++peer)
    if (edges_[peer].out.size() > edges_[peer].out_from) return static_cast<int>(peer);
  return -1;
}

// ---- receiving -------------------------------------------------------------------------------------

bool TcpTransport::peek(int peer, size_t nbytes, void* into, Message& message) {
  Edge& from = edge(peer);
  wanted_ = peer;
  auto* target = static_cast<unsigned char*>(into);
  if (target == nullptr) {
    if (from.in.size() < nbytes) from.in.resize(nbytes);
    target = from.in.data();
  }
  if (!fill(peer, nbytes, target)) return false;
  if (from.header.fingerprint == fingerprint_) note(peer);
  message = {target, from.header.nbytes, from.header.fingerprint};
  return true;
}

// Reads up to the end of a message that should have `nbytes`; true when it is whole. One of another size
// counts as whole when its header is: it will be refused, and what follows it is of no use to anybody.
bool TcpTransport::fill(int peer, size_t nbytes, unsigned char* target) {
  Edge& from = edge(peer);
  constexpr size_t kHead = sizeof(Header);
  while (!from.ended && from.have < kHead + nbytes) {
    if (from.have >= kHead && from.header.nbytes != nbytes) return true;
    const size_t of_head = std::min(from.have, kHead), of_payload = from.have - of_head;
    iovec pieces[2] = {{reinterpret_cast<unsigned char*>(&from.header) + of_head, kHead - of_head},
                       {target + of_payload, nbytes - of_payload}};
    msghdr message{};
    message.msg_iov = of_head == kHead ? pieces + 1 : pieces;
    message.msg_iovlen = (of_head < kHead ? 1 : 0) + (nbytes > of_payload ? 1 : 0);
    const ssize_t got = recvmsg(from.fd, &message, MSG_DONTWAIT);
    if (got < 0 && later_perhaps(errno)) return false;
    if (got <= 0) {
      from.ended = true;
      control_.doubt(peer);
      return false;
    }
    from.have += static_cast<size_t>(got);
  }
  return from.have >= kHead && (from.have >= kHead + nbytes || from.header.nbytes != nbytes);
}

void TcpTransport::release(int peer) { edge(peer).have = 0; }

// A message of this operation tells that its sender has begun it, and called what this rank called.
void TcpTransport::note(int peer) {
  Edge& from = edge(peer);
  if (from.noted == seq_) return;
  from.noted = seq_;
  Standing standing{};
  standing.started = seq_;
  standing.finished = seq_ - 1;
  standing.history[0] = read_record(world_.cell(rank_), seq_);
  write_standing(world_.cell(peer), standing);
}

// ---- sleeping --------------------------------------------------------------------------------------

void TcpTransport::sleep(int awaited, Nanoseconds slice) {
  std::vector<pollfd> polled;
  for (int peer = 0; peer < static_cast<int>(edges_.size()); ++peer) {
    const Edge& one = edges_[static_cast<size_t>(peer)];
    const bool reads = peer == awaited && wanted_ == peer && !one.ended;
    const bool writes = one.out.size() > one.out_from;
    if (one.fd < 0 || !(reads || writes)) continue;
    polled.push_back({one.fd, static_cast<short>((reads ? POLLIN : 0) | (writes ? POLLOUT : 0)), 0});
  }
  const timespec timeout = span_of(slice);
  ppoll(polled.data(), polled.size(), &timeout, nullptr);
}

}  // namespace unisono
