// What the machine can do without any collective: the numbers the cost model stands on, and the least that a
// collective's bytes have to be moved. Threads of this process stand in for ranks; nothing is kept between
// calls.
#pragma once

#include <cstddef>
#include <vector>

namespace unisono::calibrate {

// Seconds from a store by one core to its being seen by another: half a round trip of a cache line.
double flag(int first_core, int second_core, int round_trips);

// Seconds from a wake-up to the sleeper's running, when both have to share `core`.
double wake(int core, int round_trips);

// Seconds until every thread has seen every other come, two on each of `cores`, all of which poll and give
// their core away in between, as ranks do that outnumber the cores.
double crowd(const std::vector<int>& cores, int rounds);

struct Handing {
  double give;
  double take;
};

// Bytes per second of a thread that copies `nbytes` into memory that another core has read before, and from
// memory that another core has just written, while the other does the same.
Handing hand(size_t nbytes, int first_core, int second_core, int rounds);

enum class Pass { kCopy, kReduce };

// Bytes per second of one thread, the slowest, when one thread on each of `cores` works on buffers of
// `nbytes` of its own for `seconds`: copied from one to another, or f32 added from one into another.
double rate(Pass pass, size_t nbytes, const std::vector<int>& cores, double seconds);

struct Socket {
  double latency_s;
  double bytes_per_s;
};

// A message of one byte over loopback TCP, one way, and what a stream of large ones reaches.
Socket loopback(double seconds);

enum class Touch { kRead, kWrite, kUpdate, kCopy };

// Goes over `nbytes` once: reads them, writes them, reads and writes them in place, or copies them.
void touch(Touch kind, void* out, const void* in, size_t nbytes);

// Waits until as many processes have come as there are slots, each of which writes its own, one line apart,
// in memory they share. No order of leaving is favoured. Polls; `crowded`: gives the core away between polls.
constexpr size_t kLineUpSlot = 128;
void line_up(void* slots, size_t count, size_t mine, bool crowded);

}  // namespace unisono::calibrate
