#include "p2p/streams.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "kernels/reduce.hpp"
#include "protocol/control.hpp"
#include "transport/congestion.hpp"

namespace unisono {
namespace {

constexpr int kEvents = 64;
constexpr Nanoseconds kMixedSlice = 1'000'000;  // a sleep on sockets that ranks of this host cannot end

// The bytes copied before the other end is notified: while one end copies a slice, the other copies the slice
// before it.
constexpr size_t kSliceBytes = 16 * 1024;

// Moves slices until one is moved only in part; returns the bytes moved.
template <class Move>
size_t in_slices(size_t nbytes, Move move) {
  for (size_t done = 0;;) {
    const size_t slice = std::min(nbytes - done, kSliceBytes), moved = move(done, slice);
    done += moved;
    if (moved < slice || done == nbytes) return done;
  }
}

int checked(int descriptor) {
  if (descriptor < 0) throw std::system_error(errno, std::generic_category(), "cannot watch connections");
  return descriptor;
}

}  // namespace

SocketStreams::SocketStreams(GroupState& group, int rank, FileDescriptors sockets, ControlPlane* control)
    : group_(group),
      rank_(rank),
      control_(control),
      backed_(static_cast<size_t>(group.ranks()), false),
      known_consumed_(static_cast<size_t>(group.ranks()), 0),
      shared_copies_(static_cast<size_t>(group.ranks())),
      remote_streams_(sockets.size()) {
  if (sockets.empty()) return;
  poll_ = FileDescriptor(checked(epoll_create1(EPOLL_CLOEXEC)));
  wake_ = FileDescriptor(checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE)));
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    if (sockets[peer] < 0) continue;
    avoid_pacing(sockets[peer]);
    epoll_event event{EPOLLIN, {.u32 = static_cast<uint32_t>(peer)}};
    checked(epoll_ctl(poll_, EPOLL_CTL_ADD, sockets[peer], &event));
    remote_streams_[peer].fd = std::move(sockets[peer]);
  }
}

// ---- on this host ----------------------------------------------------------------------------------

bool SocketStreams::open(int peer) {
  const auto i = static_cast<size_t>(peer);
  if (!group_.on_this_host(peer)) return true;
  if (!backed_[i])
    backed_[i] = group_.region().back_channel(group_.region_index(rank_), group_.region_index(peer));
  return backed_[i];
}

size_t SocketStreams::write(int peer, const void* data, size_t nbytes, bool more) {
  if (!group_.on_this_host(peer))
    return write_socket(remote_streams_[static_cast<size_t>(peer)], peer, data, nbytes, more);
  return in_slices(nbytes, [&](size_t first, size_t slice) {
    return write_slice(peer, static_cast<const unsigned char*>(data) + first, slice);
  });
}

size_t SocketStreams::write_slice(int peer, const unsigned char* data, size_t nbytes) {
  const int from = group_.region_index(rank_), to = group_.region_index(peer);
  Channel& ring = group_.region().channel(from, to);
  const uint64_t position = ring.written.load(std::memory_order_relaxed);
  const uint64_t size = group_.region().channel_bytes();
  const uint64_t room = size - (position - ring.consumed.load(std::memory_order_seq_cst));
  const size_t piece = std::min<uint64_t>(nbytes, room);
  if (piece == 0) return 0;
  unsigned char* const bytes = group_.region().channel_ring(from, to);
  const uint64_t offset = position & (size - 1), first = std::min(piece, size - offset);
  SharedCopy& into = shared_copies_[static_cast<size_t>(peer)];
  into.copy(bytes + offset, data, first);
  into.copy(bytes, data + first, piece - first);
  ring.written.store(position + piece, std::memory_order_seq_cst);  // R1: the bytes; R2
  notify(group_.cell(peer).message_event);
  return piece;
}

size_t SocketStreams::read(int peer, void* data, size_t nbytes) {
  if (!group_.on_this_host(peer))
    return read_socket(remote_streams_[static_cast<size_t>(peer)], peer, data, nbytes);
  return in_slices(nbytes, [&](size_t first, size_t slice) {
    return read_slice(peer, static_cast<unsigned char*>(data) + first, slice);
  });
}

size_t SocketStreams::read_slice(int peer, unsigned char* data, size_t nbytes) {
  const int from = group_.region_index(peer), to = group_.region_index(rank_);
  Channel& ring = group_.region().channel(from, to);
  const uint64_t position = ring.consumed.load(std::memory_order_relaxed);
  const uint64_t size = group_.region().channel_bytes();
  const uint64_t there = ring.written.load(std::memory_order_seq_cst) - position;
  const size_t piece = std::min<uint64_t>(nbytes, there);
  if (piece == 0) return 0;
  const unsigned char* const bytes = group_.region().channel_ring(from, to);
  const uint64_t offset = position & (size - 1), first = std::min(piece, size - offset);
  kernels().copy(data, bytes + offset, first);
  kernels().copy(data + first, bytes, piece - first);
  ring.consumed.store(position + piece, std::memory_order_seq_cst);  // R1: behind the reads; R2
  notify(group_.cell(peer).message_event);
  return piece;
}

// ---- between hosts ---------------------------------------------------------------------------------

size_t SocketStreams::write_socket(RemoteStream& stream, int peer, const void* data, size_t nbytes,
                                   bool more) {
  if (!stream.writable || nbytes == 0) return 0;
  const ssize_t taken = send(stream.fd, data, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0));
  if (taken < 0 && errno == EFAULT) group_.fail({FaultKind::kUnreadable, rank_, rank_});
  if (taken < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) broke(stream, peer);
  const size_t piece = taken > 0 ? static_cast<size_t>(taken) : 0;
  if (piece < nbytes && stream.fd >= 0) watch(peer, true);
  return piece;
}

size_t SocketStreams::read_socket(RemoteStream& stream, int peer, void* data, size_t nbytes) {
  if (!stream.readable || stream.ended || nbytes == 0) return 0;
  const ssize_t got = recv(stream.fd, data, nbytes, MSG_DONTWAIT);
  if (got > 0) return static_cast<size_t>(got);
  if (got < 0 && errno == EFAULT) group_.fail({FaultKind::kUnwritable, rank_, rank_});
  stream.readable = false;
  if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) broke(stream, peer);
  return 0;
}

// Nothing more is sent or received. Epoll must not watch it: an ended connection would wake every waiter
// again and again.
void SocketStreams::broke(RemoteStream& stream, int peer) {
  if (stream.ended.exchange(true)) return;
  stream.writable = stream.readable = false;
  epoll_ctl(poll_, EPOLL_CTL_DEL, stream.fd, nullptr);
  control_->suspect(peer);
}

void SocketStreams::watch(int peer, bool for_room) {
  RemoteStream& stream = remote_streams_[static_cast<size_t>(peer)];
  stream.writable = !for_room;
  if (stream.watches_output == for_room || stream.ended) return;
  stream.watches_output = for_room;
  set_events(peer);
}

void SocketStreams::set_events(int peer) {
  const RemoteStream& stream = remote_streams_[static_cast<size_t>(peer)];
  epoll_event event{EPOLLIN, {.u32 = static_cast<uint32_t>(peer)}};
  if (stream.watches_output) event.events |= EPOLLOUT;
  epoll_ctl(poll_, EPOLL_CTL_MOD, stream.fd, &event);
}

void SocketStreams::disconnect(int peer) {
  if (group_.on_this_host(peer)) return;
  RemoteStream& stream = remote_streams_[static_cast<size_t>(peer)];
  if (stream.ended.exchange(true)) return;
  stream.writable = stream.readable = false;
  epoll_ctl(poll_, EPOLL_CTL_DEL, stream.fd, nullptr);
  shutdown(stream.fd, SHUT_RDWR);
}

void SocketStreams::poll_sockets() {
  if (poll_ < 0) return;
  epoll_event events[kEvents];
  const int count = epoll_wait(poll_, events, kEvents, 0);
  for (int i = 0; i < count; ++i) {
    const auto peer = static_cast<int>(events[i].data.u32);
    if ((events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0)
      remote_streams_[static_cast<size_t>(peer)].readable = true;
    if ((events[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) != 0) watch(peer, false);
  }
}

void SocketStreams::close_copies() {
  for (RemoteStream& stream : remote_streams_) stream.fd.reset();
}

FileDescriptors SocketStreams::take() {
  FileDescriptors taken(remote_streams_.size());
  for (size_t peer = 0; peer < remote_streams_.size(); ++peer) {
    if (remote_streams_[peer].fd < 0) continue;
    epoll_ctl(poll_, EPOLL_CTL_DEL, remote_streams_[peer].fd,
              nullptr);  // closing does not, where others keep it open
    taken[peer] = std::move(remote_streams_[peer].fd);
    remote_streams_[peer].ended = true;
  }
  return taken;
}

void SocketStreams::finish() {
  for (const RemoteStream& stream : remote_streams_)
    if (stream.fd >= 0) shutdown(stream.fd, SHUT_WR);
}

// ---- sleeping --------------------------------------------------------------------------------------

void SocketStreams::wake() {
  notify(group_.cell(rank_).message_event);
  if (wake_ < 0) return;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  const int sleepers = sleepers_.load(std::memory_order_seq_cst);
  if (sleepers == 0) return;
  const auto count = static_cast<uint64_t>(sleepers);  // each takes one
  (void)!::write(wake_, &count, sizeof count);
}

// `epoch`: read before the caller's last check. A thread that has changed something since has raised it, or
// sees that this thread sleeps.
void SocketStreams::sleep(int, Nanoseconds slice, uint32_t epoch) {
  if (group_.region().ranks() > 1) slice = std::min(slice, kMixedSlice);
  pollfd polled[2] = {{poll_, POLLIN, 0}, {wake_, POLLIN, 0}};
  const timespec timeout{slice / 1'000'000'000LL, slice % 1'000'000'000LL};
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (epoch_.load(std::memory_order_seq_cst) == epoch)  // R2
    ppoll(polled, 2, &timeout, nullptr);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  uint64_t count;
  if (polled[1].revents != 0) (void)!::read(wake_, &count, sizeof count);
}

}  // namespace unisono
