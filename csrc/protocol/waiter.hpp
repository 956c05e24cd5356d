// How a rank waits: it spins, then yields, then sleeps on its event count. It always checks its deadline, the
// abort cell and the liveness of the other ranks. A wait ends by its condition or by throwing a Fault, never
// otherwise.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "protocol/descriptor.hpp"
#include "protocol/group_state.hpp"
#include "protocol/placement.hpp"

namespace unisono {

using Nanoseconds = int64_t;
constexpr Nanoseconds kMicrosecond = 1000;
constexpr Nanoseconds kMillisecond = 1000 * kMicrosecond;
Nanoseconds now_ns();
Nanoseconds to_deadline(Nanoseconds timeout);  // now + timeout, or never

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The processes of the other ranks on this host: which are dead, and how they ended. A process that runs
// another program, by exec, is dead as a rank, though its pidfd does not show it.
class PeerProcesses {
 public:
  // pidfds[rank]: a descriptor of that rank's process, or -1 (this rank; a rank that is a thread of this
  // process). Takes them over. status_fd: the launcher's board, which says how its children ended, or -1.
  // rank: this one.
  PeerProcesses(FileDescriptors pidfds, int status_fd, GroupState& group, int rank);
  ~PeerProcesses();
  PeerProcesses(const PeerProcesses&) = delete;
  PeerProcesses& operator=(const PeerProcesses&) = delete;

  // Finds a rank that has ended, and stores it in `fault`, with how it ended when the launcher knows. With
  // many ranks a call looks at a part of them: `awaited`, the ranks after this one, and others in turn. It
  // looks for another program in `awaited` and one in turn.
  bool find_dead(Fault& fault, int awaited) const;
  // A rank of this host that is stopped (SIGSTOP, a debugger), or -1. With many ranks it looks at `awaited`
  // and the ranks after this one.
  int find_stopped(int awaited) const;
  // All ranks whose process has ended.
  std::vector<int> ended() const;
  int pidfd(int rank) const { return pidfds_[static_cast<size_t>(rank)]; }
  bool dead(int rank) const;
  // Waits until the rank's process has ended; a signal ends the wait, too.
  void await_end(int rank, Nanoseconds deadline) const;
  // Stores how the process ended in `fault`, if the launcher reports it within a short time.
  void look_up(int pid, Fault& fault) const;

 private:
  std::vector<int> chosen(size_t in_turn, int awaited) const;
  std::vector<int> dead_of(const std::vector<int>& ranks) const;
  bool runs_another_program(int rank) const;
  bool has_left(int rank) const { return group_.cell(rank).left.load(std::memory_order_acquire) != 0; }

  GroupState& group_;
  FileDescriptors pidfds_;
  std::vector<int> watched_;  // ranks with a descriptor, from the one after this rank on
  mutable std::atomic<size_t> next_turn_{0}, next_program_{0};  // in `watched_`
  const int32_t* board_ = nullptr;
  size_t board_records_ = 0;
};

class ControlPlane;

// Whether the other end has ended its side of a connection in order, and not by a reset or by silence.
bool has_finished(int socket);

// What a waiting thread does with the sockets of its rank: it sends queued bytes, and sleeps on them.
class SocketPoller {
 public:
  virtual ~SocketPoller() = default;
  // Sends bytes that the kernel did not accept before.
  virtual void flush() = 0;
  // Whether something is left to flush.
  virtual bool busy() const = 0;
  // Changes when another thread of this rank may have made the awaited condition true.
  virtual uint32_t epoch() const { return 0; }
  // Sleeps until bytes from `awaited` (-1: any rank) may have arrived, queued bytes can be sent, the epoch
  // differs from `epoch`, or `slice` has passed.
  virtual void sleep(int awaited, Nanoseconds slice, uint32_t epoch) = 0;
  // Whether nothing more will come from a rank of another host.
  virtual bool ended(int peer) const = 0;
};

// A lock of the waiting thread that other threads need, such as Python's GIL: it is kept during short waits
// and released before a long one. release may be called twice.
class ReleasableLock {
 public:
  virtual ~ReleasableLock() = default;
  virtual void release() = 0;
  virtual bool held() const = 0;
};

struct WaitPolicy {
  int spins;             // polls before the clock is read
  int socket_spins;      // the same for a socket: one poll takes as long as about thirty of memory
  Nanoseconds spin_ns;   // then poll this long
  Nanoseconds yield_ns;  // then yield the core between polls this long, then sleep
  bool spread = false;   // move to another core when this one carries more ranks; see Placement
};

// Waits for one thread of execution (collectives, or point-to-point).
class Waiter {
 public:
  // sockets, control: nullptr when all ranks are on one host.
  Waiter(GroupState& group, const PeerProcesses& peers, int rank, EventCount RankCell::* event,
         WaitPolicy wait_policy, SocketPoller* sockets = nullptr, ControlPlane* control = nullptr)
      : group_(group),
        peers_(peers),
        rank_(rank),
        event_(event),
        wait_policy_(wait_policy),
        placement_(group, rank),
        sockets_(sockets),
        control_(control) {}

  // Begins an operation that ends by `deadline`; 0: `timeout` after its first wait that outlasts `spins`
  // polls. So operations that never wait long do not read the clock.
  void begin(uint64_t seq, uint64_t fingerprint, Nanoseconds deadline, Nanoseconds timeout = INT64_MAX,
             std::span<const int> sources = {}) {
    placement_.publish_core();
    sources_ = sources;
    seq_ = seq;
    fingerprint_ = fingerprint;
    deadline_ = deadline;
    timeout_ = timeout;
  }
  void set_wait_policy(WaitPolicy wait_policy) { wait_policy_ = wait_policy; }
  void set_interrupt(const std::function<bool()>* interrupted) { interrupted_ = interrupted; }
  // A message from any rank may also come from this rank itself, of another thread or later.
  void expect_own_messages() { expects_own_messages_ = true; }
  void set_caller_lock(ReleasableLock* caller_lock) { caller_lock_ = caller_lock; }
  // What a Timeout tells of the awaited rank.
  void set_window(WindowWait window) { window_ = window; }

  // Waits for `ready`, which depends on rank `awaited` (-1: on any rank), and may change `awaited`.
  template <class Ready>
  void until(const int& awaited, Ready ready) {
    if (ready()) return;
    for (int i = spins(awaited); i > 0; --i) {
      cpu_pause();
      if (ready()) return;
    }
    yield_then_sleep(awaited, [](void* r) { return (*static_cast<Ready*>(r))(); }, &ready);
  }

  // Records the group's first fault, wakes all ranks, throws the recorded fault.
  [[noreturn]] void fail(Fault fault);
  [[noreturn]] void fail_here(FaultKind kind) { fail({kind, rank_, rank_}); }  // by a fault of this rank
  // The same for a message of `peer` that has another fingerprint or size.
  // sizes: the expected bytes in total, and the bytes that had arrived before this message.
  [[noreturn]] void refuse(int peer, uint64_t fingerprint, uint64_t nbytes, SizeMismatch sizes);
  void throw_if_aborted() {
    if (group_.aborted()) [[unlikely]]
      rethrow();
  }
  // Checks for what ends a wait with a fault: an abort, a death, a mismatch, an interrupt, the deadline.
  // `awaited_has_left`: the awaited rank has closed the group.
  void check_for_faults(int awaited, bool awaited_has_left);
  // Whether the awaited rank has closed the group; for a message from any rank: whether all others have.
  bool has_left(int awaited) const;

 private:
  using Poll = bool (*)(void*);
  void yield_then_sleep(const int& awaited, Poll ready, void* context);
  bool ready_though_aborted(Poll ready, void* context);
  bool sleep_once(int awaited, Poll ready, void* context, Nanoseconds slice);
  bool spin_and_yield(int awaited, Poll ready, void* context);
  bool poll_once(Poll ready, void* context);
  int spins(int awaited) const {
    if (through_socket(awaited)) return wait_policy_.socket_spins;
    return awaited >= 0 && awaits_rank_of_this_core(awaited) ? 0 : wait_policy_.spins;
  }
  // Whether a rank that has to run before the awaited message can arrive was last seen on this core.
  bool awaits_rank_of_this_core(int awaited) const;
  // Whether the awaited message comes through a socket.
  bool through_socket(int awaited) const {
    return sockets_ != nullptr && (awaited < 0 || !group_.on_this_host(awaited));
  }
  [[noreturn]] void rethrow() { throw group_.fault(); }
  void check_for_silence(int awaited);
  int find_mismatch();
  int find_absent();

  GroupState& group_;
  const PeerProcesses& peers_;
  const int rank_;
  EventCount RankCell::* const event_;
  WaitPolicy wait_policy_;
  Placement placement_;
  SocketPoller* const sockets_;
  ControlPlane* const control_;
  const std::function<bool()>* interrupted_ = nullptr;
  ReleasableLock* caller_lock_ = nullptr;
  bool expects_own_messages_ = false;
  std::span<const int> sources_;
  uint64_t seq_ = 0;
  uint64_t fingerprint_ = 0;
  Nanoseconds deadline_ = INT64_MAX;
  Nanoseconds timeout_ = INT64_MAX;
  Nanoseconds stopped_checked_at_ = 0;  // when it last looked for stopped ranks
  int stopped_rank_ = -1;               // the one that it found then
  WindowWait window_ = WindowWait::kNone;
};

// What a thread of a rank waits with, outside the engine's own operations. `control`: nullptr on one host.
struct WaitContext {
  GroupState& group;
  const PeerProcesses& peers;
  ControlPlane* control;
  WaitPolicy policy;
  const std::function<bool()>* interrupted;
  int rank;
};

}  // namespace unisono
