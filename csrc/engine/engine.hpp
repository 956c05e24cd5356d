// One rank of one group: numbers its operations, runs them in order in the caller's thread or, when
// asked for later completion, in a thread of its own, and remembers what it did for error messages.
#pragma once

#include <sys/types.h>

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

#include "engine/executor.hpp"
#include "engine/packing.hpp"
#include "p2p/channels.hpp"
#include "transport/shm.hpp"
#include "transport/tcp.hpp"

namespace unisono {

constexpr uint64_t kLateTicket = UINT64_MAX;  // of a call queued after the group was left: done, and failed

// How the ranks of a group are joined. Empty lists: all are on one host, rank r at place r.
struct Connections {
  std::vector<int> places, hosts, pids;      // see World
  std::vector<int> control, data, messages;  // sockets by rank, -1 for those of this host
};

struct EngineOptions {
  std::vector<int> pidfds;  // see Peers
  int status_fd = -1;
  int cores = 1;                      // cores that the ranks of this host share
  double spin_us = -1;                // < 0: chosen from ranks and cores
  size_t segment_bytes = 256 * 1024;  // what one pass over all chunks touches, on one host
  bool spread = true;                 // threads that wait may be moved to other cores; see Placement
};

// Where in the caller's source an asynchronous call was made. The engine can only ask for it: it knows no
// Python. What the pointers name outlives the call.
struct CallSite {
  std::string (*describe)(const CallSite&) = nullptr;
  const void* code = nullptr;
  const char* file = nullptr;
  const char* note = nullptr;  // what else an error shows of the call
  int at = 0;
  std::string text() const { return describe == nullptr ? std::string() : describe(*this); }
};

// What only some calls have: buffers that travel together.
struct PackedBuffers {
  Packing out, in;
  // Itself, if it must never be freed: setting a pointer cannot run out of memory.
  std::shared_ptr<PackedBuffers> kept = nullptr;
};

// A collective as the caller means it. `numel` goes into the fingerprint: 0 where ranks may differ.
struct Call {
  uint8_t kind;
  DType dtype;
  ReduceOp op;
  int32_t root;
  uint64_t numel;
  double factor;
  const Program* program;
  Binding binding;
  Nanoseconds timeout;       // counted from the first time the call has to sleep
  Nanoseconds deadline = 0;  // ... or up to here, for a call that was queued; 0: unset
  bool large = false;        // takes so long that waking a thread for it costs nothing
  CallSite site{};
  std::shared_ptr<PackedBuffers> packed = nullptr;
  Coder coder{};
};

class Engine {
 public:
  Engine(std::shared_ptr<Region> region, int rank, EngineOptions options, Connections connections = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return world_.ranks(); }
  World& world() { return world_; }
  Channels& channels() { return channels_; }

  // Whether this very thread is in a call: then it is in a signal handler.
  bool within() const { return runner_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  // Throws std::runtime_error in a fork's child: the group is its parent's.
  void check_process() const;

  int member(int64_t rank) const { return world_.member(rank); }

  // Keeps a program for the life of the engine. plan: what ranks compare, see Program.
  const Program* load(std::span<const int32_t> code, uint64_t plan = 0);

  // Runs a call to its end: here, or behind those that `start` has queued. kNone: all went well.
  // held: what the caller's thread holds, if anything.
  FaultKind run(Call&& call, HeldLock* held = nullptr);
  // Whether other ranks are threads of this process, which cannot go on while this one keeps what it holds.
  bool shares_process() const { return shares_process_; }
  // Queues a call; its ticket. Calls end in the order of their tickets.
  uint64_t start(Call&& call);
  bool done(uint64_t ticket) const {
    return completed_.load(std::memory_order_acquire) >= ticket || ticket == kLateTicket;
  }
  // Waits for a ticket; kTimeout when it is not done by then (the call goes on). Without a deadline the
  // caller's thread runs what no other thread has begun. held: what that thread holds, if anything.
  FaultKind wait(uint64_t ticket, Nanoseconds deadline, HeldLock* held = nullptr);

  // Calls issued up to now: those run and those queued.
  uint64_t issued() const {
    return direct_.load(std::memory_order_relaxed) + queued_.load(std::memory_order_relaxed);
  }

  // Reports to the others what this rank knows of the fault that ended the group; the first report counts.
  void remark(uint64_t seq, const std::string& text);

  // The fault that aborted the group; kind kNone while there is none.
  Fault fault() const { return world_.fault(); }
  void abort(Fault fault);
  // Why fewer than `needed` of these ranks are left: of the first that has closed the group or ended. kNone:
  // enough are. Aborts nothing.
  Fault lacking(std::span<const int> ranks, size_t needed);
  // Waits until the process of a rank of this host has ended; whoever asks, up to the first one's deadline.
  void await_end(int rank, Nanoseconds deadline);
  // Learns where the ranks of other hosts stand, which takes a moment.
  void refresh();
  // In a fork's child: closes its copies of the connections. Takes no lock: its owner was left behind.
  void close_copies();
  // Threads of the caller that are in a call; `leave` gives them a moment to return.
  std::atomic<int> callers{0};
  // Of those calls the ones of the main thread whose signal handler runs now: they end after it only.
  std::atomic<int> handling{0};

  // Whether buffers of a call that failed may still be written to: then they must never be freed.
  bool unsettled() const { return executor_.unsettled() || channels_.unsettled(); }

  uint64_t opened() const { return executor_.opened(); }

  // Tells the others that this rank is gone and ends the thread. Idempotent.
  void leave();

  // Called with no lock held while a caller's thread waits; true: stop waiting.
  void set_interrupt(std::function<bool()> interrupted) { interrupted_ = std::move(interrupted); }
  const std::function<bool()>* interrupt() const { return &interrupted_; }

 private:
  Engine(const std::shared_ptr<Region>& region, int rank, const EngineOptions& options,
         Connections connections, int complete);
  FaultKind execute(const Call& call, bool in_background, HeldLock* held);
  void perform(const Call& call, uint64_t fingerprint);
  void clear_up(const Call& call);
  uint64_t fingerprint(const Call& call, uint64_t seq) const;
  void record(const Call& call, uint64_t seq, uint64_t fingerprint);
  std::vector<Transport*> edges();
  void drain();
  uint64_t enqueue(Call&& call);
  void run_queued(bool executing, bool in_background, HeldLock* held);
  void run_up_to(uint64_t ticket, HeldLock* held);
  void throw_if_within() const;
  bool await_queued();
  bool lock_executing(std::unique_lock<std::timed_mutex>& executing);
  void serve();

  World world_;
  const int rank_;
  const bool shares_process_;
  const uint32_t forks_;  // of this process, when the engine was made
  const pid_t owner_;     // the process this engine belongs to; a fork's copy does nothing
  Peers peers_;
  const WaitPolicy patience_;
  std::unique_ptr<Control> control_;  // these two: when there are other hosts
  std::unique_ptr<TcpTransport> tcp_;
  ShmTransport shm_;
  Executor executor_;
  Waiter waiter_;
  Channels channels_;
  std::function<bool()> interrupted_;
  std::mutex programs_mutex_;
  std::deque<Program> programs_;

  std::timed_mutex executing_;             // held by whoever runs a call
  std::atomic<std::thread::id> runner_{};  // the caller's thread that does
  uint64_t seq_ = 0;                       // guarded by executing_
  // The last operation's fingerprint, part of the next one's: ranks that differed in an operation that each
  // could finish alone (one only sent, another too) differ in all that follow. Guarded by executing_.
  uint64_t before_ = 0;
  std::atomic<uint64_t> direct_{0};  // calls that were not queued; written under executing_

  std::atomic<uint64_t> queued_{0};  // tickets given out
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> first_failed_{UINT64_MAX};
  std::mutex queue_mutex_;
  std::condition_variable queue_grew_, ticket_done_;
  std::deque<Call> queue_;
  bool stopping_ = false;
  bool asleep_ = false;          // the thread waits to be notified
  int waited_for_ = 0;           // calls in a row that a caller came to wait for before the thread took them
  bool running_queued_ = false;  // a call of the queue is being executed
  uint64_t skipped_ = 0;         // calls behind that one which ended before it, as the group was left
  std::atomic<bool> left_{false};
  std::atomic<Nanoseconds> end_awaited_until_{0};  // 0: nobody has asked yet
  std::thread thread_;
};

}  // namespace unisono
