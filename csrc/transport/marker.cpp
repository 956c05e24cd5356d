#include "transport/marker.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <vector>

namespace unisono {
namespace {

constexpr size_t kPeekBytes = 64 * 1024;

bool comes_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

struct Passing {
  int fd;
  size_t sent = 0;
  bool arrived = false, ended = false;
  bool incomplete = false;  // fewer bytes than a marker have arrived

  bool done(size_t marker) const { return ended || (arrived && sent == marker); }
};

void send_more(Passing& one, std::span<const unsigned char> marker) {
  while (!one.ended && one.sent < marker.size()) {
    const ssize_t sent =
        send(one.fd, marker.data() + one.sent, marker.size() - one.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && comes_later(errno)) return;
    if (sent < 0)
      one.ended = true;
    else
      one.sent += static_cast<size_t>(sent);
  }
}

// Drops `nbytes`, which have arrived.
void drop(Passing& one, std::vector<unsigned char>& into, size_t nbytes) {
  while (nbytes > 0 && !one.ended) {
    const ssize_t got = recv(one.fd, into.data(), std::min(nbytes, into.size()), MSG_DONTWAIT);
    if (got > 0)
      nbytes -= static_cast<size_t>(got);
    else if (got == 0 || errno != EINTR)
      one.ended = true;
  }
}

// Whether the other end sends no more bytes than have arrived.
bool has_last_bytes(int fd) {
  pollfd polled{fd, POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0;
}

// Reads up to the marker, and not a byte more: what follows belongs to the next membership.
void read_more(Passing& one, std::span<const unsigned char> marker, std::vector<unsigned char>& into) {
  while (!one.ended && !one.arrived) {
    const bool last = has_last_bytes(one.fd);  // before they are looked at
    const ssize_t there = recv(one.fd, into.data(), into.size(), MSG_DONTWAIT | MSG_PEEK);
    if (there < 0 && comes_later(errno)) return;
    if (there <= 0) {
      one.ended = true;
      return;
    }
    const auto end = into.begin() + there;
    const auto found = std::search(into.begin(), end, marker.begin(), marker.end());
    one.arrived = found != end;
    const size_t before = static_cast<size_t>(found - into.begin());
    // The last bytes may be the marker's first.
    const size_t keep = std::min<size_t>(static_cast<size_t>(there), marker.size() - 1);
    const size_t drops = one.arrived ? before + marker.size() : static_cast<size_t>(there) - keep;
    one.incomplete = drops == 0;
    if (one.incomplete) {
      one.ended = last;  // a rank that died before it sent its marker
      return;
    }
    drop(one, into, drops);
  }
}

}  // namespace

void pass_markers(std::span<const int> sockets, std::span<const unsigned char> marker, Nanoseconds deadline) {
  if (marker.size() != kMarkerBytes) throw std::invalid_argument("a marker has 32 bytes");
  std::vector<Passing> all;
  for (const int fd : sockets)
    if (fd >= 0) all.push_back({fd});
  std::vector<unsigned char> into(kPeekBytes);
  for (;;) {
    std::vector<pollfd> polled;
    bool incomplete = false;
    for (Passing& one : all) {
      send_more(one, marker);
      read_more(one, marker, into);
      if (one.done(marker.size())) continue;
      // Where bytes are there already, POLLIN would not wait for more.
      const short arrives = one.arrived || one.incomplete ? POLLRDHUP : POLLIN;
      incomplete = incomplete || one.incomplete;
      polled.push_back(
          {one.fd, static_cast<short>(one.sent < marker.size() ? arrives | POLLOUT : arrives), 0});
    }
    const Nanoseconds left = deadline - now_ns();
    if (polled.empty() || left <= 0) return;
    poll(polled.data(), polled.size(),
         static_cast<int>(std::min<Nanoseconds>(left / kMillisecond, incomplete ? 1 : 20)));
  }
}

}  // namespace unisono
