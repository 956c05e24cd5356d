#include "calibrate/measure.hpp"

#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "kernels/reduce.hpp"
#include "protocol/descriptor.hpp"
#include "protocol/shared_copy.hpp"

namespace unisono::calibrate {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLine = 128;
constexpr size_t kLargeMessage = 256 * 1024;
constexpr size_t kRingBytes = 1024 * 1024;  // as the ring of a rank by default
constexpr int kFewestBatches = 3;
constexpr time_t kSilenceSeconds = 10;
constexpr int kBatches = 8;  // the fastest one counts: disturbances only add time

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// No error if the core is no longer allowed: the thread then runs on an allowed core.
void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

double middle(
    std::vector<double>& times) {  // where two threads meet, the fastest time is luck: use the median
  const auto mid = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), mid, times.end());
  return *mid;
}

struct alignas(kLine) FlagWord {
  std::atomic<uint32_t> value{0};
};

void wait_spinning(std::atomic<uint32_t>& word, uint32_t wanted) {
  for (uint32_t polls = 1; word.load(std::memory_order_acquire) != wanted; ++polls)
    if (polls % 4096 == 0) std::this_thread::yield();  // the partner may have lost its core
}

void wait_sleeping(std::atomic<uint32_t>& word, uint32_t wanted) {
  for (uint32_t seen; (seen = word.load(std::memory_order_acquire)) != wanted;)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void give(std::atomic<uint32_t>& word, uint32_t value, bool wake) {
  word.store(value, std::memory_order_release);
  if (wake)
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// Two threads pass a word back and forth; returns the seconds one way of the fastest batch.
double hand_over(int first_core, int second_core, int round_trips, bool sleeping) {
  FlagWord there, back;
  const auto wait = sleeping ? wait_sleeping : wait_spinning;
  const uint32_t all = static_cast<uint32_t>(round_trips) * kBatches;
  std::thread partner([&] {
    pin(second_core);
    for (uint32_t number = 1; number <= all; ++number) {
      wait(there.value, number);
      give(back.value, number, sleeping);
    }
  });
  double best = 1e9;
  std::thread self([&] {
    pin(first_core);
    for (uint32_t number = 0; number < all;) {
      const auto start = Clock::now();
      for (int trip = 0; trip < round_trips; ++trip) {
        give(there.value, ++number, sleeping);
        wait(back.value, number);
      }
      best = std::min(best, since(start) / round_trips / 2);
    }
  });
  self.join();
  partner.join();
  return best;
}

// ---- bytes in memory ------------------------------------------------------------------------------------

using Bytes = std::unique_ptr<unsigned char[], void (*)(void*)>;

// Not touched here: the thread that uses it touches it first, so that its pages are on that thread's NUMA
// node.
Bytes allocate(size_t nbytes) {
  void* memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  if (memory == nullptr) throw std::bad_alloc();
  return {static_cast<unsigned char*>(memory), std::free};
}

void add(void* out, const void* in, size_t nbytes) {
  const void* inputs[] = {out, in};
  const auto kernel = kernels().reduce[static_cast<size_t>(DType::kF32)][static_cast<size_t>(ReduceOp::kSum)];
  kernel(out, inputs, 2, nbytes / sizeof(float), PostOperation{});
}

// ---- sockets --------------------------------------------------------------------------------------------

int must(int result) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), "loopback TCP");
  return result;
}

FileDescriptor connected(int listener) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  must(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length));
  FileDescriptor made(must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  must(connect(made, reinterpret_cast<sockaddr*>(&address), length));
  return made;
}

bool move(int descriptor, unsigned char* data, size_t nbytes, bool out) {
  while (nbytes > 0) {
    const ssize_t moved =
        out ? send(descriptor, data, nbytes, MSG_NOSIGNAL) : recv(descriptor, data, nbytes, 0);
    if (moved <= 0 && !(moved < 0 && errno == EINTR)) return false;
    if (moved > 0) data += moved, nbytes -= static_cast<size_t>(moved);
  }
  return true;
}

// Answers every message of `nbytes` with one byte, until the other end closes.
void answer(int descriptor, unsigned char* bytes, size_t nbytes) {
  while (move(descriptor, bytes, nbytes, false) && move(descriptor, bytes, 1, true)) continue;
}

// Seconds of one round trip: a message of `nbytes`, answered by one byte.
double exchange(size_t nbytes, double seconds) {
  const FileDescriptor listener(must(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  must(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address));
  must(listen(listener, 1));
  const FileDescriptor mine = connected(listener);
  const FileDescriptor there(must(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)));
  const int on = 1;
  const timeval patience{kSilenceSeconds, 0};  // bounded: another process may have connected first
  for (const int end : {static_cast<int>(mine), static_cast<int>(there)}) {
    must(setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    must(setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience));
    must(setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience));
  }
  const Bytes bytes = allocate(nbytes), theirs = allocate(nbytes);
  std::memset(bytes.get(), 0, nbytes);
  std::thread partner(answer, static_cast<int>(there), theirs.get(), nbytes);
  double best = 1e9;
  bool whole = true;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  // At least kFewestBatches, even if one batch lost its core for longer than `seconds`.
  for (int batch = 0; whole && (batch < kFewestBatches || Clock::now() < end); ++batch) {
    const auto start = Clock::now();
    int trips = 0;
    for (; whole && trips < 16; ++trips)
      whole = move(mine, bytes.get(), nbytes, true) && move(mine, bytes.get(), 1, false);
    best = std::min(best, since(start) / 16);
  }
  shutdown(mine, SHUT_RDWR);
  partner.join();
  if (!whole) throw std::system_error(ECONNRESET, std::generic_category(), "loopback TCP");
  return best;
}

}  // namespace

double flag(int first_core, int second_core, int round_trips) {
  return hand_over(first_core, second_core, round_trips, false);
}

double wake(int core, int round_trips) { return hand_over(core, core, round_trips, true); }

double crowd(const std::vector<int>& cores, int rounds) {
  const size_t count = 2 * cores.size();
  std::vector<FlagWord> come(count);
  std::vector<double> took;
  const auto work = [&](size_t me) {
    pin(cores[me % cores.size()]);
    uint32_t round = 0;
    for (int batch = 0; batch <= kBatches; ++batch) {  // during batch 0 some threads still start: not counted
      const auto start = Clock::now();
      for (int number = 0; number < rounds; ++number) {
        come[me].value.store(++round, std::memory_order_release);
        for (auto& other : come)
          while (static_cast<int32_t>(other.value.load(std::memory_order_acquire) - round) < 0)
            std::this_thread::yield();
      }
      if (me == 0 && batch > 0) took.push_back(since(start) / rounds);
    }
  };
  std::vector<std::thread> threads;
  for (size_t me = 0; me < count; ++me) threads.emplace_back(work, me);
  for (auto& thread : threads) thread.join();
  return middle(took);
}

HandoverRates hand(size_t nbytes, int first_core, int second_core, int rounds) {
  // As messages in the rings of two ranks: each one is written behind the one before.
  const size_t places = std::max<size_t>(1, kRingBytes / nbytes), ring_bytes = places * nbytes;
  const Bytes rings[] = {allocate(ring_bytes), allocate(ring_bytes)},
              owns[] = {allocate(nbytes), allocate(nbytes)};
  for (const auto& each : rings) std::memset(each.get(), 0, ring_bytes);
  for (const auto& each : owns) std::memset(each.get(), 0, nbytes);
  FlagWord come[2];
  std::vector<double> gave, took;
  const auto work = [&](int me, int core) {
    pin(core);
    unsigned char* const own = owns[me].get();
    SharedCopy shared_copy;
    uint32_t phase = 0;
    const auto meet = [&] {
      come[me].value.store(++phase, std::memory_order_release);
      while (static_cast<int32_t>(come[1 - me].value.load(std::memory_order_acquire) - phase) < 0)
        std::this_thread::yield();
    };
    for (int number = 0; number < rounds; ++number) {
      const size_t offset = static_cast<size_t>(number) % places * nbytes;
      meet();
      auto start = Clock::now();
      shared_copy.copy(rings[me].get() + offset, own, nbytes);
      const double giving = since(start);
      meet();
      start = Clock::now();
      kernels().copy(own, rings[1 - me].get() + offset, nbytes);
      const double taking = since(start);
      if (me == 0) gave.push_back(giving), took.push_back(taking);
    }
  };
  std::thread first(work, 0, first_core), second(work, 1, second_core);
  first.join();
  second.join();
  return {static_cast<double>(nbytes) / middle(gave), static_cast<double>(nbytes) / middle(took)};
}

double rate(MemoryPass pass, size_t nbytes, const std::vector<int>& cores, double seconds) {
  std::atomic<size_t> ready{0};
  std::vector<double> rates(cores.size());
  std::vector<Bytes> buffers;
  for (size_t number = 0; number < 2 * cores.size(); ++number) buffers.push_back(allocate(nbytes));
  std::vector<std::thread> threads;
  for (size_t number = 0; number < cores.size(); ++number)
    threads.emplace_back([&, number] {
      pin(cores[number]);
      unsigned char *const from = buffers[2 * number].get(), *const to = buffers[2 * number + 1].get();
      std::memset(from, 0, nbytes);
      std::memset(to, 0, nbytes);
      for (ready.fetch_add(1); ready.load() < cores.size();) std::this_thread::yield();
      const auto start = Clock::now();
      size_t passes = 0;
      for (; passes < 2 || since(start) < seconds; ++passes)
        pass == MemoryPass::kCopy ? static_cast<void>(std::memcpy(to, from, nbytes)) : add(to, from, nbytes);
      rates[number] = static_cast<double>(passes * nbytes) / since(start);
    });
  for (auto& thread : threads) thread.join();
  return *std::min_element(rates.begin(), rates.end());
}

SocketRates loopback(double seconds) {
  const double small = exchange(1, seconds / 2), large = exchange(kLargeMessage, seconds / 2);
  return {small / 2, kLargeMessage / std::max(large - small, large / 4)};
}

void touch(MemoryAccess kind, void* out, const void* in, size_t nbytes) {
  constexpr size_t kTile = 16 * 1024;
  alignas(64) thread_local unsigned char tile[kTile];
  switch (kind) {
    case MemoryAccess::kCopy:
      std::memcpy(out, in, nbytes);
      return;
    case MemoryAccess::kWrite:
      std::memset(out, 0, nbytes);
      return;
    case MemoryAccess::kUpdate: {  // adds a tile that stays in the first-level cache
      auto* bytes = static_cast<unsigned char*>(out);
      for (size_t done = 0; done < nbytes; done += kTile)
        add(bytes + done, tile, std::min(kTile, nbytes - done));
      return;
    }
    case MemoryAccess::kRead: {
      const auto* bytes = static_cast<const unsigned char*>(in);
      for (size_t done = 0; done < nbytes; done += kTile)
        std::memcpy(tile, bytes + done, std::min(kTile, nbytes - done));
      std::atomic_signal_fence(std::memory_order_seq_cst);  // so that the compiler keeps the copies
      return;
    }
  }
}

void start_barrier(void* slots, size_t count, size_t mine, bool crowded) {
  static_assert(sizeof(FlagWord) == kStartBarrierSlot);
  FlagWord* const words = static_cast<FlagWord*>(slots);
  const uint32_t round = words[mine].value.load(std::memory_order_relaxed) + 1;
  words[mine].value.store(round, std::memory_order_release);
  for (size_t other = 0; other < count; ++other)
    for (uint32_t polls = 1;
         static_cast<int32_t>(words[other].value.load(std::memory_order_acquire) - round) < 0; ++polls)
      if (crowded || polls % 4096 == 0) std::this_thread::yield();
}

}  // namespace unisono::calibrate
