#include "engine/engine.hpp"

#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "protocol/stack_sample.hpp"

namespace unisono {
namespace {

constexpr int kMostYieldUs = 20'000;
// Larger segments where nothing is staged, or where a step costs more than within a host.
constexpr size_t kZeroCopySegmentBytes = 4096 * 1024;
constexpr size_t kRemoteSegmentBytes = 2048 * 1024;
constexpr Nanoseconds kAnswerPatience = 700'000'000;
constexpr auto kGrace = std::chrono::microseconds(20);  // within it the caller may begin to wait for its call
constexpr auto kLookInterval = std::chrono::microseconds(100);
constexpr auto kPatientInterval = std::chrono::microseconds(1000);
constexpr int kLooks = 20;
// A program that waited for this many calls in succession will probably wait for the next one, too. A thread
// that wakes up meanwhile gains nothing and takes a core from the ranks.
constexpr int kPatientAfter = 8;
constexpr auto kWaitSlice = std::chrono::nanoseconds(20'000'000);  // bounds the delay of an interrupt

// Of timed locks. A step of the wall clock would lengthen the wait by that much.
#ifdef UNISONO_SANITIZE_THREAD  // it does not intercept timed locks with the monotonic clock
using LockClock = std::chrono::system_clock;
#else
using LockClock = std::chrono::steady_clock;
#endif

bool crowded(uint32_t ranks, int cores) { return static_cast<int>(ranks) > cores; }

// With a core for every rank a short spin is faster than any sleep. With more ranks than cores a spin keeps
// the awaited rank from running, and yielding is much faster than sleeping: the kernel sometimes wakes a
// sleeper on the wrong core, and then three ranks share that core. The yield time grows with the ranks per
// core: once all ranks sleep, every message has to wake its receiver, and each rank is late for the next one.
WaitPolicy foreground(const EngineOptions& options, uint32_t ranks) {
  const bool tight = crowded(ranks, options.cores);
  const double spin_us = options.spin_us >= 0 ? options.spin_us : (tight ? 0 : 50);
  const int turns = (static_cast<int>(ranks) + options.cores - 1) / options.cores;
  const Nanoseconds yield_us = tight ? std::min(1000 * turns, kMostYieldUs) : 200;
  return {tight ? 64 : 400, tight ? 8 : 60, static_cast<Nanoseconds>(spin_us * kMicrosecond),
          yield_us * kMicrosecond, options.spread};
}

// The background thread competes with the caller's computation for the core, so it spins very little.
constexpr WaitPolicy kBackground{50, 8, 0, 50 * kMicrosecond};

// The number of forks between this process and the first. Each child counts; reading the counter is cheaper
// than a getpid call.
uint32_t forks() {
  static std::atomic<uint32_t> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  (void)registered;
  return count.load(std::memory_order_relaxed);
}

// With more ranks than cores collectives use little zero copy: such a sender waits until all receivers had
// their turn on a core, but a rank that stages continues. All ranks of a host know the same number of cores.
ExecutorLimits limits(GroupState& group, const EngineOptions& options) {
  const bool zero_copy = !crowded(group.region().ranks(), options.cores);
  const size_t segment_bytes = group.region().zero_copy() ? kZeroCopySegmentBytes : 0;
  if (!group.spans_hosts())
    return {.segment_bytes = options.segment_bytes,
            .capacity = ShmTransport::capacity(group.region()),
            .zero_copy_segment_bytes = zero_copy ? segment_bytes : 0,
            .zero_copy = zero_copy,
            .ahead_bytes = zero_copy ? 0 : segment_bytes};
  const size_t staged = group.shares_memory() ? ShmTransport::capacity(group.region()) : SIZE_MAX;
  return {.segment_bytes = kRemoteSegmentBytes,
          .capacity = std::min(staged, TcpTransport::kCapacity),
          .zero_copy_segment_bytes = 0,
          .zero_copy = zero_copy,
          .ahead_bytes = 0,
          .one_rank_per_host = !group.shares_memory()};
}

// Whether another rank of this host is a thread of this process.
bool has_threads(const GroupState& group, int rank, const FileDescriptors& pidfds) {
  for (int peer = 0; peer < group.ranks(); ++peer)
    if (peer != rank && group.on_this_host(peer) && pidfds[static_cast<size_t>(peer)] < 0) return true;
  return false;
}

// Fills in the empty lists of a group on one host.
Connections completed(Connections given, uint32_t ranks) {
  if (!given.region_indices.empty()) return given;
  given.region_indices.resize(ranks);
  std::iota(given.region_indices.begin(), given.region_indices.end(), 0);
  given.hosts.assign(ranks, 0);
  return given;
}

// Throws std::invalid_argument where the options or lists do not fit the group.
Connections checked(int rank, const EngineOptions& options, Connections given) {
  const size_t ranks = given.region_indices.size();
  const auto one_each = [&](const auto& list) { return list.size() == ranks; };
  if (rank < 0 || static_cast<size_t>(rank) >= ranks || given.region_indices[static_cast<size_t>(rank)] < 0)
    throw std::invalid_argument("this rank is not in the group, or has no place in the shared memory");
  if (!one_each(given.hosts) || !one_each(options.pidfds) ||
      !(options.pids.empty() || one_each(options.pids)))
    throw std::invalid_argument("hosts, pids and pidfds name every rank once");
  const bool has_remote_ranks =
      std::ranges::any_of(given.region_indices, [](int index) { return index < 0; });
  if (has_remote_ranks && !(one_each(given.control) && one_each(given.data) && one_each(given.messages)))
    throw std::invalid_argument("control, data and messages hold a socket, or -1, for every rank");
  if (options.cores < 1 || options.segment_bytes == 0)
    throw std::invalid_argument("cores and segment_bytes are at least 1");
  return given;
}

// Records the thread that runs a call, until the call ends in any way.
class RunningThread {
 public:
  explicit RunningThread(std::atomic<std::thread::id>& running_thread) : running_thread_(running_thread) {
    running_thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~RunningThread() { running_thread_.store(std::thread::id(), std::memory_order_relaxed); }
  RunningThread(const RunningThread&) = delete;
  RunningThread& operator=(const RunningThread&) = delete;

 private:
  std::atomic<std::thread::id>& running_thread_;
};

}  // namespace

Engine::Engine(std::shared_ptr<Region> region, int rank, EngineOptions options, Connections connections)
    : Engine(region, rank, std::move(options),
             checked(rank, options, completed(std::move(connections), region->ranks())), 0) {}

Engine::Engine(const std::shared_ptr<Region>& region, int rank, EngineOptions&& options,
               Connections connections, int)
    : group_(region, std::move(connections.region_indices), std::move(connections.hosts),
             std::move(options.pids), rank),
      rank_(rank),
      shares_process_(has_threads(group_, rank, options.pidfds)),
      forks_(forks()),
      owner_(getpid()),
      peers_(std::move(options.pidfds), options.status_fd, group_, rank),
      wait_policy_(foreground(options, region->ranks())),
      control_(group_.spans_hosts()
                   ? std::make_unique<ControlPlane>(group_, peers_, rank, std::move(connections.control))
                   : nullptr),
      tcp_(control_ ? std::make_unique<TcpTransport>(group_, *control_, rank, std::move(connections.data))
                    : nullptr),
      shm_(group_, peers_, rank),
      executor_(edges(), tcp_.get(), limits(group_, options)),
      waiter_(group_, peers_, rank, &RankCell::collective_event, wait_policy_, tcp_.get(), control_.get()),
      channels_(group_, peers_, rank, wait_policy_, kBackground, std::move(connections.messages),
                control_.get()) {
  group_.region().back_rank(group_.region_index(rank));
  RankCell& cell = group_.cell(rank);
  cell.stack_fd.store(stack_file().fd + 1, std::memory_order_relaxed);
  cell.thread.store(gettid(), std::memory_order_relaxed);
  cell.set_process(identity());
}

std::vector<Transport*> Engine::edges() {
  std::vector<Transport*> edges;
  for (int peer = 0; peer < group_.ranks(); ++peer) {
    Transport* const carrier = group_.on_this_host(peer) ? static_cast<Transport*>(&shm_) : tcp_.get();
    edges.push_back(peer == rank_ ? nullptr : carrier);
  }
  return edges;
}

Engine::~Engine() { leave(); }

const Program* Engine::load(std::span<const int32_t> code, uint64_t plan) {
  Program program(code, rank_, size(), plan);
  program.sort_receivers([&](int peer) { return group_.on_this_host(peer); });
  back_edges(program);
  const std::lock_guard lock(programs_mutex_);
  programs_.push_back(std::move(program));
  return &programs_.back();
}

// Allocates the FIFOs that a program uses.
void Engine::back_edges(const Program& program) {
  const int own = group_.region_index(rank_);
  for (const Instruction& step : program.instructions()) {
    for (const int peer : step.peers) {
      const int other = group_.region_index(peer);
      if (other < 0) continue;
      const bool sends = step.opcode == Opcode::kSend;
      group_.region().back_fifo(sends ? own : other, sends ? other : own);
    }
  }
}

uint64_t Engine::fingerprint(const CollectiveCall& call, uint64_t seq) const {
  uint64_t mixed = seq * 0x9e3779b97f4a7c15ULL ^ previous_fingerprint_;
  mixed ^= (call.numel + 1) * 0xc2b2ae3d27d4eb4fULL;
  mixed ^= call.program->plan() * 0xff51afd7ed558ccdULL;
  if (call.packed != nullptr) mixed ^= call.packed->out.shape() + 3 * call.packed->in.shape();
  mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9ULL;
  mixed ^= uint64_t{call.kind} | uint64_t{static_cast<uint8_t>(call.dtype)} << 8 |
           uint64_t{static_cast<uint8_t>(call.op)} << 16 |
           uint64_t{static_cast<uint8_t>(call.program->algorithm())} << 24 |
           uint64_t{static_cast<uint32_t>(call.root)} << 32;
  mixed = (mixed ^ (mixed >> 32)) * 0x94d049bb133111ebULL;
  return mixed | 1;  // 0 means "no operation"
}

// The dtype as ranks report it; of a call with codes, whose dtype is float32, the codec.
static uint8_t form(DType dtype, const EdgeCoding& coding) {
  static_assert(kDTypeCount <= kFirstCodec && kFirstCodec + kCodecCount <= 256, "both fit into a byte");
  if (coding.kernels == nullptr) return static_cast<uint8_t>(dtype);
  return static_cast<uint8_t>(kFirstCodec + static_cast<size_t>(coding.codec));
}

void Engine::record(const CollectiveCall& call, uint64_t seq, uint64_t fingerprint) {
  RankCell& cell = group_.cell(rank_);
  CallRecord record{seq,
                    fingerprint,
                    call.numel,
                    call.root,
                    call.kind,
                    form(call.dtype, call.coding),
                    static_cast<uint8_t>(call.op),
                    static_cast<uint8_t>(call.program->algorithm()),
                    static_cast<uint32_t>(call.coding.block),
                    call.coding.coding_bits};
  write_record(cell, record);
  cell.started.store(seq, std::memory_order_release);
}

FaultKind Engine::execute(const CollectiveCall& call, bool in_background, ReleasableLock* caller_lock) {
  const uint64_t seq = ++seq_;
  const uint64_t call_fingerprint = fingerprint(call, seq);
  previous_fingerprint_ = call_fingerprint;
  waiter_.begin(seq, call_fingerprint, call.deadline, call.timeout, call.program->sources());
  waiter_.set_wait_policy(in_background ? kBackground : wait_policy_);
  waiter_.set_interrupt(in_background ? nullptr : &interrupted_);
  waiter_.set_caller_lock(caller_lock);
  try {
    waiter_.throw_if_aborted();
    record(call, seq, call_fingerprint);
    if (tcp_) tcp_->begin(seq, call_fingerprint);
    perform(call, call_fingerprint);
    if (tcp_) drain();
    if (group_.evicted()) throw group_.fault();
  } catch (const Fault& fault) {
    clear_up(call);
    group_.wake_control();  // the rank of this host that found the fault may die before it reports it
    if (fault.kind == FaultKind::kMismatch && call.site.describe != nullptr) report(seq, call.site.text());
    return fault.kind;
  } catch (const std::bad_alloc&) {
    clear_up(call);
    abort(Fault{FaultKind::kNoMemory, rank_, rank_});
    return FaultKind::kNoMemory;
  } catch (const std::domain_error& error) {  // a changed buffer, or a reduction function failed
    clear_up(call);
    report(kLeaving, error.what());
    abort(Fault{FaultKind::kAborted, rank_, rank_});
    return FaultKind::kAborted;
  }
  group_.cell(rank_).finished.store(seq, std::memory_order_release);
  return FaultKind::kNone;
}

// After a failure. Runs in exception handlers, also that of std::bad_alloc: nothing here may throw.
void Engine::clear_up(const CollectiveCall& call) {
  if (tcp_) tcp_->discard_unsent();
  // A peer may still write into the packed memory.
  if (call.packed != nullptr && executor_.has_open_transfers()) call.packed->never_freed = call.packed;
}

// A rank that computes sends nothing, so the kernel has to accept all queued bytes before the call returns.
void Engine::drain() {
  int awaited = tcp_->unsent();
  if (awaited < 0) return;
  waiter_.until(awaited, [&] {
    tcp_->flush();
    return (awaited = tcp_->unsent()) < 0;
  });
}

// Packs the buffers of a coalesced call before, and unpacks them after.
void Engine::perform(const CollectiveCall& call, uint64_t fingerprint) {
  const bool in_place = !call.program->equal_blocks();
  if (call.packed != nullptr) {
    call.packed->in.gather();
    if (in_place) call.packed->out.gather();
  }
  executor_.run(CollectiveTask{call.program, call.binding, call.dtype, call.op, call.factor, fingerprint,
                               call.numel, call.coding, call.combiner},
                waiter_);
  if (call.packed != nullptr && call.program->writes_out()) call.packed->out.scatter();
}

void Engine::check_process() const {
  if (forks() != forks_) [[unlikely]]
    throw std::runtime_error("this group belongs to process " + std::to_string(owner_) +
                             "; a process that was forked from it makes a group of its own");
}

// The call would wait for an operation that ends only after the signal handler.
void Engine::throw_if_in_signal_handler() const {
  if (in_signal_handler()) [[unlikely]]
    throw std::runtime_error(
        "called from a signal handler, or from a reduction function, while an operation of the same group is "
        "under way");
}

void Engine::note_caller() {
  const std::thread::id me = std::this_thread::get_id();
  std::thread::id known = first_caller_.load(std::memory_order_relaxed);
  if (known == me) [[likely]]
    return;
  if (known == std::thread::id() && first_caller_.compare_exchange_strong(known, me))
    return group_.cell(rank_).thread.store(gettid(), std::memory_order_relaxed);
  several_threads_.store(true, std::memory_order_relaxed);
}

FaultKind Engine::run(CollectiveCall&& call, ReleasableLock* caller_lock) {
  check_process();
  throw_if_in_signal_handler();
  note_caller();
  if (tickets_issued_.load(std::memory_order_relaxed) == tickets_completed_.load(std::memory_order_acquire) &&
      executing_.try_lock()) {
    const std::lock_guard lock(executing_, std::adopt_lock);
    if (left_.load(std::memory_order_relaxed)) return FaultKind::kAborted;  // closed since check_process
    const RunningThread running(running_thread_);
    unqueued_calls_.store(unqueued_calls_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return execute(call, false, caller_lock);
  }
  return wait(enqueue(std::move(call)), INT64_MAX, caller_lock);
}

uint64_t Engine::start(CollectiveCall&& call) {
  check_process();
  note_caller();
  return enqueue(std::move(call));
}

uint64_t Engine::enqueue(CollectiveCall&& call) {
  const bool large = call.large;
  const std::lock_guard lock(queue_mutex_);
  if (stopping_) return kLateTicket;
  // The timeout of a call that begins at once starts at its first long wait, as for a blocking call. A call
  // that waits for others gets its deadline now.
  const bool first = queue_.empty() && !running_queued_ &&
                     running_thread_.load(std::memory_order_relaxed) == std::thread::id();
  if (!first) call.deadline = to_deadline(call.timeout);
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  queue_.push_back(std::move(call));
  // A thread that polls the queue needs no wake-up, unless the call takes longer than the next poll.
  if (asleep_ || (large && waited_calls_in_a_row_ < kPatientAfter)) queue_grew_.notify_one();
  return tickets_issued_.fetch_add(1, std::memory_order_acq_rel) + 1;
}

// Runs the call at the head of the queue. Only the holder of `executing_` takes a call to run, so calls keep
// their order. Without it (`executing` is false) the group was left, and the call ends unexecuted.
void Engine::run_queued(bool executing, bool in_background, ReleasableLock* caller_lock) {
  std::unique_lock lock(queue_mutex_);
  if (queue_.empty()) return;
  const CollectiveCall call = std::move(queue_.front());
  queue_.pop_front();
  FaultKind result = FaultKind::kAborted;
  if (executing && !left_.load(std::memory_order_acquire)) {
    running_queued_ = true;
    waited_calls_in_a_row_ = in_background ? 0 : std::min(waited_calls_in_a_row_ + 1, kPatientAfter);
    lock.unlock();
    if (in_background && call.combiner == nullptr) {
      result = execute(call, true, caller_lock);
    } else {
      const RunningThread running(running_thread_);  // a function that calls the group is an error then
      result = execute(call, in_background, caller_lock);
    }
    lock.lock();
    running_queued_ = false;
  }
  if (running_queued_) {  // by a thread whose signal handler leaves the group: its call ends first
    ++tickets_skipped_;
    return;
  }
  // Later calls that ended unexecuted while this one ran get the next tickets, as failed.
  const uint64_t ticket = tickets_completed_.load(std::memory_order_relaxed) + 1;
  const uint64_t skipped = std::exchange(tickets_skipped_, 0);
  const uint64_t failed = result != FaultKind::kNone ? ticket : skipped > 0 ? ticket + 1 : UINT64_MAX;
  if (failed < first_failed_.load()) first_failed_.store(failed);
  tickets_completed_.store(ticket + skipped, std::memory_order_release);
  ticket_done_.notify_all();
}

// Runs the queued calls up to `ticket` in the caller's thread, until another thread runs one.
void Engine::run_up_to(uint64_t ticket, ReleasableLock* caller_lock) {
  while (!done(ticket)) {
    std::unique_lock executing(executing_, std::try_to_lock);
    if (!executing) return;
    if (caller_lock != nullptr && tickets_completed_.load(std::memory_order_acquire) + 1 < ticket)
      caller_lock->release();
    run_queued(true, false, caller_lock);
  }
}

// Waits for a queued call that no caller waits for; false: the group was left. A program that has just made
// asynchronous calls makes more: for a while the thread polls, so that no caller has to wake it.
bool Engine::await_queued() {
  std::unique_lock lock(queue_mutex_);
  uint64_t known = tickets_issued_.load(std::memory_order_relaxed), seen = 0;
  for (int looks = 0;;) {
    if (const uint64_t queued = tickets_issued_.load(std::memory_order_relaxed); queued != known) {
      known = queued;
      looks = 0;
    }
    if (!queue_.empty()) {
      const uint64_t head = tickets_issued_.load(std::memory_order_relaxed) - queue_.size() + 1;
      if (stopping_ || head == seen) return true;
      seen = head;
      queue_grew_.wait_for(lock, kGrace);
    } else if (stopping_) {
      return false;
    } else if (looks++ < kLooks) {
      queue_grew_.wait_for(lock, waited_calls_in_a_row_ < kPatientAfter ? kLookInterval : kPatientInterval);
    } else {
      asleep_ = true;
      queue_grew_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      asleep_ = false;
      looks = 0;
    }
  }
}

// Waits for the call that a thread runs now. False: the group was left. The wait must be bounded: a signal
// handler inside that call may leave the group, and then waits for this thread.
bool Engine::lock_executing(std::unique_lock<std::timed_mutex>& executing) {
  while (!executing.try_lock()) {
    if (left_.load(std::memory_order_acquire)) return false;
    if (executing.try_lock_until(LockClock::now() + kWaitSlice)) break;
  }
  return true;
}

void Engine::serve() {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  while (await_queued()) {
    std::unique_lock executing(executing_, std::defer_lock);
    run_queued(lock_executing(executing), true, nullptr);
  }
}

FaultKind Engine::wait(uint64_t ticket, Nanoseconds deadline, ReleasableLock* caller_lock) {
  check_process();
  if (!done(ticket)) {
    throw_if_in_signal_handler();
    if (deadline == INT64_MAX) run_up_to(ticket, caller_lock);
  }
  if (!done(ticket)) {
    if (caller_lock != nullptr) caller_lock->release();
    std::unique_lock lock(queue_mutex_);
    const auto slice = [&] {
      return std::chrono::nanoseconds(std::clamp<Nanoseconds>(deadline - now_ns(), 0, kWaitSlice.count()));
    };
    while (!ticket_done_.wait_for(lock, slice(), [&] { return done(ticket); })) {
      if (now_ns() >= deadline) return FaultKind::kTimeout;
      if (!interrupted_) continue;
      lock.unlock();
      const bool interrupted = interrupted_();
      if (interrupted) abort(Fault{FaultKind::kInterrupted, rank_, rank_});
      lock.lock();
      if (!interrupted) continue;
      // The engine may still move the bytes of this call; an aborted call ends soon.
      ticket_done_.wait(lock, [&] { return done(ticket); });
      return FaultKind::kInterrupted;
    }
  }
  if (ticket != kLateTicket && first_failed_.load(std::memory_order_acquire) > ticket)
    return FaultKind::kNone;
  const FaultKind kind = fault().kind;
  return kind == FaultKind::kNone ? FaultKind::kAborted : kind;
}

void Engine::report(uint64_t seq, const std::string& text) {
  if (!write_report(group_.cell(rank_), seq, text)) return;
  if (control_) control_->announce();
}

void Engine::abort(Fault fault) {
  Waiter waiter(group_, peers_, rank_, &RankCell::collective_event, wait_policy_);
  waiter.begin(group_.cell(rank_).started.load(std::memory_order_relaxed), 0, INT64_MAX);
  try {
    waiter.fail(fault);
  } catch (const Fault&) {  // this or an earlier one: the abort cell has it
  }
}

Fault Engine::fault_unless_alive(std::span<const int> ranks, size_t needed) {
  Fault found{FaultKind::kNone, rank_};
  size_t there = 0;
  for (const int rank : ranks) {
    if (rank < 0 || rank >= size()) throw std::invalid_argument("no such rank");
    const bool left = group_.cell(rank).left.load(std::memory_order_acquire) != 0;
    const bool ended =
        rank != rank_ && (group_.on_this_host(rank) ? peers_.dead(rank) : control_->ended(rank));
    there += !left && !ended;
    if (found.rank >= 0 || (!left && !ended)) continue;
    found.kind = left ? FaultKind::kPeerLeft : FaultKind::kPeerLost;
    found.rank = rank;
  }
  if (there >= needed) return {};
  if (found.kind == FaultKind::kPeerLost && group_.on_this_host(found.rank))
    peers_.look_up(group_.process_of(found.rank), found);
  return found;
}

void Engine::await_end(int rank, Nanoseconds deadline) {
  if (rank < 0 || rank >= size() || peers_.pidfd(rank) < 0) return;
  Nanoseconds first = 0;
  if (!end_awaited_until_.compare_exchange_strong(first, deadline)) deadline = first;
  peers_.await_end(rank, deadline);
}

void Engine::refresh() {
  if (getpid() != owner_) return;
  if (control_) control_->refresh(kAnswerPatience);
  if (!std::ranges::count(late_ranks(group_), rank_)) locate_late_ranks(group_, peers_);
}

void Engine::close_copies() {
  if (!control_ || getpid() == owner_) return;
  control_->close_copies();
  tcp_->close_copies();
  channels_.close_copies();
}

// Whether a thread is in a call: another one; or this one, which is in a signal handler and must not lock
// again. A thread may keep the lock for a moment after its call has ended.
bool Engine::in_call() {
  if (in_signal_handler()) return true;
  const RankCell& own = group_.cell(rank_);
  std::unique_lock executing(executing_, std::try_to_lock);
  while (!executing) {
    if (own.started.load(std::memory_order_acquire) != own.finished.load(std::memory_order_acquire))
      return true;
    (void)executing.try_lock_until(LockClock::now() + kWaitSlice);
  }
  return false;
}

// Calls under way or queued would end only at their deadlines. The abort ends them now, on the other ranks,
// too: those get the same error as ranks that later wait for this one.
void Engine::leave() {
  if (left_.exchange(true)) return;
  if (getpid() != owner_) {  // a forked child's copy: the shared cell and the threads belong to the parent
    if (thread_.joinable()) thread_.detach();
    channels_.leave(true);
    if (control_) control_->leave(true);
    return;
  }
  stop();
  channels_.leave(false);
  if (tcp_) tcp_->finish();
  if (control_) control_->leave(false);
  group_.wake_all();
}

// Ends the calls and the thread that runs them.
void Engine::stop() {
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    queue_grew_.notify_all();
  }
  if (in_call() || !done(tickets_issued_.load(std::memory_order_acquire)))
    abort(Fault{FaultKind::kPeerLeft, rank_, rank_});
  if (thread_.joinable()) thread_.join();
}

// ---- the next membership ---------------------------------------------------------------------------

void Engine::propose(std::span<const unsigned char> bytes) {
  check_process();
  group_.propose(rank_, bytes);
  if (control_) control_->propose();
}

// A process that ends with unread bytes resets a connection; the end of another one then shows its end. A
// living one ends none, see docs/protocol.md. So a reset alone, which a cut can cause too, says nothing.
ControlPlane::State Engine::state(int rank) const {
  if (group_.on_this_host(rank))
    return peers_.dead(rank) ? ControlPlane::State::kEnded : ControlPlane::State::kOpen;
  const ControlPlane::State state = control_->contact(rank).state;
  if (state != ControlPlane::State::kReset || !(tcp_->finished(rank) || channels_.finished(rank)))
    return state;
  return ControlPlane::State::kEnded;
}

std::vector<int> Engine::ended() {
  std::vector<int> found = peers_.ended();
  for (int rank = 0; rank < size(); ++rank)
    if (rank != rank_ && group_.on_this_host(rank) &&
        group_.cell(rank).left.load(std::memory_order_acquire) != 0)
      found.push_back(rank);
  return found;
}

bool Engine::is_behind_others() {
  const uint64_t mine = group_.cell(rank_).started.load(std::memory_order_acquire);
  for (int rank = 0; rank < size(); ++rank)
    if (group_.cell(rank).started.load(std::memory_order_acquire) > mine) return true;
  return false;
}

Nanoseconds Engine::silence_ns(int rank) const {
  const Nanoseconds at = group_.on_this_host(rank) ? 0 : control_->contact(rank).newest_frame_at;
  return at == 0 ? -1 : now_ns() - at;
}

void Engine::ask() {
  if (control_) control_->ask();
}

std::array<FileDescriptors, 3> Engine::hand_over(const std::vector<bool>& next_members,
                                                 Nanoseconds deadline) {
  check_process();
  throw_if_in_signal_handler();
  if (next_members.size() != static_cast<size_t>(size()))
    throw std::invalid_argument("next_members names every rank once");
  std::array<FileDescriptors, 3> sockets;
  if (left_.exchange(true)) throw std::runtime_error("the group was closed");
  stop();
  FileDescriptors messages = channels_.hand_over();
  if (control_) {
    sockets = {control_->hand_over(next_members, deadline), tcp_->take(), std::move(messages)};
  }
  group_.wake_all();
  return sockets;
}

}  // namespace unisono
