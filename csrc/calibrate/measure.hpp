// Measures the machine without any collective: the figures of the cost model, and the cost of moving a
// collective's bytes at least once. Threads of this process take the place of ranks. No state is kept between
// calls.
#pragma once

#include <cstddef>
#include <vector>

namespace unisono::calibrate {

// Seconds until one core sees a store of another: half a round trip of a cache line.
double flag(int first_core, int second_core, int round_trips);

// Seconds from a wake-up until the sleeper runs, when both share `core`.
double wake(int core, int round_trips);

// Seconds of a barrier of two threads on each of `cores`. They poll, and yield the core between polls, as
// ranks do when there are more ranks than cores.
double crowd(const std::vector<int>& cores, int rounds);

struct HandoverRates {
  double give;
  double take;
};

// Bytes per second of a thread that copies `nbytes`: into a ring that another core has read before (give),
// and out of the ring that another core has just written (take). The other thread does the same at that time.
HandoverRates hand(size_t nbytes, int first_core, int second_core, int rounds);

enum class MemoryPass { kCopy, kReduce };

// Bytes per second of the slowest thread, when one thread on each of `cores` works for `seconds` on its own
// buffers of `nbytes`: it copies one to another, or adds the f32 of one to another.
double rate(MemoryPass pass, size_t nbytes, const std::vector<int>& cores, double seconds);

struct SocketRates {
  double latency_s;
  double bytes_per_s;
};

// Loopback TCP: the one-way latency of a message of one byte, and the bandwidth of large messages.
SocketRates loopback(double seconds);

enum class MemoryAccess { kRead, kWrite, kUpdate, kCopy };

// Passes over `nbytes` once: reads them, writes them, updates them in place, or copies them.
void touch(MemoryAccess kind, void* out, const void* in, size_t nbytes);

// A barrier of `count` processes in shared memory. Each process counts in its own slot; slots are one line
// apart. No process leaves systematically first. It polls; `crowded`: it yields the core between polls.
constexpr size_t kStartBarrierSlot = 128;
void start_barrier(void* slots, size_t count, size_t mine, bool crowded);

}  // namespace unisono::calibrate
