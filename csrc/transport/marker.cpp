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
  std::vector<unsigned char> tail = {};  // the last bytes that were read: a marker may begin in them

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

// Takes `nbytes`, which have arrived, from the connection.
void take(Passing& one, std::vector<unsigned char>& into, size_t nbytes) {
  while (nbytes > 0 && !one.ended) {
    const ssize_t got = recv(one.fd, into.data(), std::min(nbytes, into.size()), MSG_DONTWAIT);
    if (got > 0)
      nbytes -= static_cast<size_t>(got);
    else if (got == 0 || errno != EINTR)
      one.ended = true;
  }
}

// Reads up to the marker, and not a byte more: what follows belongs to the next membership. Before that no
// byte stays in the kernel: a few of them can hold the memory of a large packet, so that the window stays
// closed and the marker never comes.
void read_more(Passing& one, std::span<const unsigned char> marker, std::vector<unsigned char>& into) {
  while (!one.ended && !one.arrived) {
    const size_t held = one.tail.size();
    std::ranges::copy(one.tail, into.begin());
    const ssize_t there = recv(one.fd, into.data() + held, into.size() - held, MSG_DONTWAIT | MSG_PEEK);
    if (there < 0 && comes_later(errno)) return;
    if (there <= 0) {
      one.ended = true;
      return;
    }
    const auto end = into.begin() + static_cast<ssize_t>(held) + there;
    const auto found = std::search(into.begin(), end, marker.begin(), marker.end());
    one.arrived = found != end;
    const size_t seen = static_cast<size_t>(end - into.begin());
    const size_t before = static_cast<size_t>(found - into.begin());
    const size_t keeps = one.arrived ? 0 : std::min(seen, marker.size() - 1);
    one.tail.assign(end - static_cast<ssize_t>(keeps), end);
    take(one, into, one.arrived ? before + marker.size() - held : static_cast<size_t>(there));
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
    for (Passing& one : all) {
      send_more(one, marker);
      read_more(one, marker, into);
      if (one.done(marker.size())) continue;
      const int events = (one.arrived ? 0 : POLLIN) | (one.sent < marker.size() ? POLLOUT : 0);
      polled.push_back({one.fd, static_cast<short>(events), 0});
    }
    const Nanoseconds left = deadline - now_ns();
    if (polled.empty() || left <= 0) return;
    poll(polled.data(), polled.size(), static_cast<int>(std::min<Nanoseconds>(left / kMillisecond, 20)));
  }
}

}  // namespace unisono
