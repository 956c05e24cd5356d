// A stream of bytes between two ranks passes from one membership to the next. Nobody knows how many bytes of
// the former one are still under way, so each end sends a marker behind its last byte, and drops what comes
// before the other end's. The marker is a secret of the two memberships: no byte of a program can look like
// it.
#pragma once

#include <span>

#include "protocol/waiting.hpp"

namespace unisono {

constexpr size_t kMarkerBytes = 32;

// Sends the marker on all connections (-1: none), and reads up to it. A connection that ends, or has not
// passed by the deadline, stays as it is: its next reader finds the end, or no frame.
void pass_markers(std::span<const int> sockets, std::span<const unsigned char> marker, Nanoseconds deadline);

}  // namespace unisono
