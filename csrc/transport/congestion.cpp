#include "transport/congestion.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string_view>

namespace unisono {
namespace {

constexpr uint32_t kNearMicroseconds = 2000;  // round trip; generous, for the first one may meet a busy host

bool is_near(int socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_rtt > 0 &&
         info.tcpi_rtt <= kNearMicroseconds;
}

bool is_paced(int socket) {
  char name[16] = {};
  socklen_t size = sizeof name;
  return getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 &&
         std::string_view(name).starts_with("bbr");
}

}  // namespace

void avoid_pacing(int socket) {
  if (!is_paced(socket) || !is_near(socket)) return;
  for (const std::string_view name : {"cubic", "reno"})  // the system may not allow users the first one
    if (setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0) break;
}

}  // namespace unisono
