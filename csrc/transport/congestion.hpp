// Which congestion control a connection gets.
#pragma once

#include <vector>

namespace unisono {

// Between near hosts, takes connections off BBR. It paces: what a rank hands to the kernel at once leaves in
// small portions at a rate learned from bursts that were too short to teach it. Other choices of the
// system stand, and so does BBR on long ways, for which it was made. -1 stands for no connection.
void avoid_pacing(const std::vector<int>& sockets);

}  // namespace unisono
