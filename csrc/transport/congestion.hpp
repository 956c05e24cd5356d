// Chooses the congestion control of a connection.
#pragma once

namespace unisono {

// Replaces BBR on a connection with a short round trip. BBR paces: it sends a burst in small portions, at a
// rate that it estimates from earlier bursts, which are too short for a good estimate. Other algorithms are
// kept, and so is BBR on long connections, for which it was made.
void avoid_pacing(int socket);

}  // namespace unisono
