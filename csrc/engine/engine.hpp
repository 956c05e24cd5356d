// One rank of one group. The engine numbers the rank's operations and runs them in order: in the caller's
// thread or, for asynchronous calls, in a thread of its own. It remembers recent operations for error
// messages.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "engine/buffer_packer.hpp"
#include "engine/executor.hpp"
#include "p2p/channels.hpp"
#include "transport/shm.hpp"
#include "transport/tcp.hpp"

namespace unisono {

constexpr uint64_t kLateTicket = UINT64_MAX;  // a call queued after the group was left: done, and failed

// How the ranks of a group are connected. Empty lists: all are on one host, rank r at place r. Owns the
// sockets until an engine takes them over.
struct Connections {
  std::vector<int> region_indices, hosts;   // see GroupState
  FileDescriptors control, data, messages;  // sockets by rank, -1 for those of this host
};

struct EngineOptions {
  FileDescriptors pidfds;  // see PeerProcesses
  int status_fd = -1;
  int cores = 1;                      // cores that the ranks of this host share
  double spin_us = -1;                // < 0: chosen from ranks and cores
  size_t segment_bytes = 256 * 1024;  // what one pass over all chunks touches, on one host
  bool spread = true;                 // waiting threads may move to other cores; see Placement
  std::vector<int> pids = {};         // see GroupState
};

// The caller's source line of an asynchronous call. The engine has no access to Python, so it stores
// pointers and a function that describes them. Their targets outlive the call.
struct CallSite {
  std::string (*describe)(const CallSite&) = nullptr;
  const void* code = nullptr;
  const char* file = nullptr;
  const char* note = nullptr;  // further text about the call for an error
  int at = 0;
  std::string text() const { return describe == nullptr ? std::string() : describe(*this); }
};

// The buffers of a coalesced call.
struct CoalescedBuffers {
  BufferPacker out, in;
  // A reference to itself when it must never be freed: setting a pointer needs no memory.
  std::shared_ptr<CoalescedBuffers> never_freed = nullptr;
};

// One call of a collective. `numel` is part of the fingerprint; 0 where ranks may differ in it.
struct CollectiveCall {
  // A constructor, because compilers clear an aggregate of this size as a whole: slower than its members.
  CollectiveCall(uint8_t kind, DType dtype, ReduceOp op, int32_t root, uint64_t numel, double factor,
                 const Program* program, BufferBinding&& binding, Nanoseconds timeout)
      : kind(kind),
        dtype(dtype),
        op(op),
        root(root),
        numel(numel),
        factor(factor),
        program(program),
        binding(std::move(binding)),
        timeout(timeout) {}

  uint8_t kind;
  DType dtype;
  ReduceOp op;
  int32_t root;
  uint64_t numel;
  double factor;
  const Program* program;
  BufferBinding binding;
  Nanoseconds timeout;       // counted from the call's first long wait
  Nanoseconds deadline = 0;  // set for a queued call instead; 0: unset
  bool large = false;        // the call takes much longer than waking a thread
  CallSite site{};
  std::shared_ptr<CoalescedBuffers> packed = nullptr;
  EdgeCoding coding{};
  const Combiner* combiner = nullptr;  // of kFunction; the caller keeps it alive
};

class Engine {
 public:
  Engine(std::shared_ptr<Region> region, int rank, EngineOptions options, Connections connections = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return group_.ranks(); }
  GroupState& group() { return group_; }
  Channels& channels() { return channels_; }

  // Whether the calling thread is already inside a call: then it runs a signal handler or a reduction
  // function.
  bool in_signal_handler() const {
    return running_thread_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }

  // Throws std::runtime_error in a forked child: the group belongs to the parent.
  void check_process() const;

  int member(int64_t rank) const { return group_.member(rank); }

  // Keeps a program until the engine ends. plan: the number that ranks compare, see Program.
  const Program* load(std::span<const int32_t> code, uint64_t plan = 0);

  // Runs a call to its end: here, or behind the calls that `start` has queued. kNone: success.
  // caller_lock: a lock that the caller's thread holds, if any.
  FaultKind run(CollectiveCall&& call, ReleasableLock* caller_lock = nullptr);
  // Whether other ranks are threads of this process. They cannot run while this rank keeps the held lock.
  bool shares_process() const { return shares_process_; }
  // Queues a call and returns its ticket. Calls end in the order of their tickets.
  uint64_t start(CollectiveCall&& call);
  bool done(uint64_t ticket) const {
    return tickets_completed_.load(std::memory_order_acquire) >= ticket || ticket == kLateTicket;
  }
  // Waits for a ticket; kTimeout when it is not done by the deadline (the call continues). Without a deadline
  // the caller's thread runs the calls that no other thread has begun. caller_lock: as in `run`.
  FaultKind wait(uint64_t ticket, Nanoseconds deadline, ReleasableLock* caller_lock = nullptr);

  // Whether more than one thread has issued calls: then their order may differ between ranks.
  bool several_threads() const { return several_threads_.load(std::memory_order_relaxed); }

  // The number of calls issued up to now: run directly or queued.
  uint64_t issued() const {
    return unqueued_calls_.load(std::memory_order_relaxed) + tickets_issued_.load(std::memory_order_relaxed);
  }

  // The number of a call among those, by the ticket that `start` has given it.
  uint64_t number(uint64_t ticket) const {
    return ticket == kLateTicket ? issued() : unqueued_calls_.load(std::memory_order_relaxed) + ticket;
  }

  // Reports the fault to the other ranks, with its details; the first report counts.
  void report(uint64_t seq, const std::string& text);

  // The fault that aborted the group; kind kNone while there is none.
  Fault fault() const { return group_.fault(); }
  void abort(Fault fault);
  // kNone when at least `needed` of these ranks are alive. Otherwise the fault of the first one that has
  // closed the group or ended. Aborts nothing.
  Fault fault_unless_alive(std::span<const int> ranks, size_t needed);
  // Waits until the process of a rank of this host has ended. All callers share the first caller's deadline.
  void await_end(int rank, Nanoseconds deadline);
  // Asks the ranks of other hosts for their status, and late ranks for their line; waits briefly for the
  // answers.
  void refresh();
  // In a forked child: closes its copies of the connections. Takes no lock: the thread that holds it may
  // exist only in the parent.
  void close_copies();
  // How many of the caller's threads are in a call; `leave` waits briefly for them.
  std::atomic<int> calls_under_way{0};
  // How many of those calls were interrupted by a signal handler that runs now: they end only after it.
  std::atomic<int> calls_interrupted{0};

  // Whether a peer may still write to the buffers of a failed call: then they must never be freed.
  bool has_open_transfers() const { return executor_.has_open_transfers() || channels_.has_open_transfers(); }

  // The bytes of the longest message of a program.
  size_t message_limit(const Program& program) const { return executor_.message_limit(program); }

  uint64_t mapped_messages() const { return executor_.mapped_messages(); }

  // Announces that this rank has left, and ends the thread. Idempotent.
  void leave();

  // ---- the next membership; see docs/protocol.md
  // Publishes what this rank proposes.
  void propose(std::span<const unsigned char> bytes);
  // What is known of another rank: of one of this host, whether its process has ended.
  ControlPlane::State state(int rank) const;
  // The ranks of this host whose process has ended, or that have left; one may be named twice.
  std::vector<int> ended();
  // Whether another rank has begun an operation that this one has not.
  bool is_behind_others();
  Nanoseconds silence_ns(
      int rank) const;  // since its newest frame came, from a rank of another host; -1: none did
  int pidfd(int rank) const { return peers_.pidfd(rank); }
  void ask();
  // Leaves, and returns all connections, see ControlPlane: control, data, messages. `next_members`: by the
  // next membership.
  std::array<FileDescriptors, 3> hand_over(const std::vector<bool>& next_members, Nanoseconds deadline);

  // Called while a caller's thread waits, with no lock held; true: stop waiting.
  void set_interrupt(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }
  const std::function<bool()>* interrupt() const { return &interrupted_; }
  WaitContext wait_context() { return {group_, peers_, control_.get(), wait_policy_, &interrupted_, rank_}; }

 private:
  Engine(const std::shared_ptr<Region>& region, int rank, EngineOptions&& options, Connections connections,
         int complete);
  FaultKind execute(const CollectiveCall& call, bool in_background, ReleasableLock* caller_lock);
  void perform(const CollectiveCall& call, uint64_t fingerprint);
  void clear_up(const CollectiveCall& call);
  uint64_t fingerprint(const CollectiveCall& call, uint64_t seq) const;
  void record(const CollectiveCall& call, uint64_t seq, uint64_t fingerprint);
  std::vector<Transport*> edges();
  void back_edges(const Program& program);
  void drain();
  uint64_t enqueue(CollectiveCall&& call);
  void run_queued(bool executing, bool in_background, ReleasableLock* caller_lock);
  void run_up_to(uint64_t ticket, ReleasableLock* caller_lock);
  void throw_if_in_signal_handler() const;
  void note_caller();
  bool in_call();
  void stop();
  bool await_queued();
  bool lock_executing(std::unique_lock<std::timed_mutex>& executing);
  void serve();

  GroupState group_;
  const int rank_;
  const bool shares_process_;
  const uint32_t forks_;  // of this process, when the engine was made
  const pid_t owner_;     // the process this engine belongs to; a forked child's copy does nothing
  PeerProcesses peers_;
  const WaitPolicy wait_policy_;
  std::unique_ptr<ControlPlane> control_;  // this and tcp_: set when there are other hosts
  std::unique_ptr<TcpTransport> tcp_;
  ShmTransport shm_;
  Executor executor_;
  Waiter waiter_;
  Channels channels_;
  std::function<bool()> interrupted_;
  std::mutex programs_mutex_;
  std::deque<Program> programs_;

  std::timed_mutex executing_;                     // held by the thread that runs a call
  std::atomic<std::thread::id> running_thread_{};  // that thread, if it is a caller's
  std::atomic<std::thread::id> first_caller_{};
  std::atomic<bool> several_threads_{false};
  uint64_t seq_ = 0;  // guarded by executing_
  // The last operation's fingerprint is part of the next one's. Ranks may differ in an operation that each
  // can finish alone, for example when both only send; then all later fingerprints differ. Guarded by
  // executing_.
  uint64_t previous_fingerprint_ = 0;
  std::atomic<uint64_t> unqueued_calls_{0};  // calls that were not queued; written under executing_

  std::atomic<uint64_t> tickets_issued_{0};  // tickets given out
  std::atomic<uint64_t> tickets_completed_{0};
  std::atomic<uint64_t> first_failed_{UINT64_MAX};
  std::mutex queue_mutex_;
  std::condition_variable queue_grew_, ticket_done_;
  std::deque<CollectiveCall> queue_;
  bool stopping_ = false;
  bool asleep_ = false;            // the thread waits to be notified
  int waited_calls_in_a_row_ = 0;  // successive queued calls that a caller ran because it waited for them
  bool running_queued_ = false;    // a call of the queue is being executed
  uint64_t tickets_skipped_ = 0;   // later calls that ended before that one, because the group was left
  std::atomic<bool> left_{false};
  std::atomic<Nanoseconds> end_awaited_until_{0};  // the first deadline of await_end; 0: not called yet
  std::thread thread_;
};

}  // namespace unisono
