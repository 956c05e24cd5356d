#include "engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace unisono {
namespace {

constexpr Nanoseconds kMicrosecond = 1000;
constexpr auto kWaitSlice = std::chrono::nanoseconds(20'000'000);  // bounds how late an interrupt is seen

// With a core for every rank a short spin beats every sleep. With more ranks than cores a spin keeps the
// rank that is waited for from running, and giving the core away beats sleeping by far.
Patience foreground(const EngineOptions& options, uint32_t ranks) {
  const bool crowded = static_cast<int>(ranks) > options.cores;
  const double spin_us = options.spin_us >= 0 ? options.spin_us : (crowded ? 0 : 50);
  return {crowded ? 20 : 400, static_cast<Nanoseconds>(spin_us * kMicrosecond), 200 * kMicrosecond};
}

// The background thread competes with the caller's computation for the core: it spins hardly at all.
constexpr Patience kBackground{50, 0, 50 * kMicrosecond};

// How many forks lie between this process and the first: counted in each child, for looking is cheaper
// than asking for one's pid.
uint32_t forks() {
  static std::atomic<uint32_t> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  (void)registered;
  return count.load(std::memory_order_relaxed);
}

std::vector<Transport*> every_edge(Transport* transport, uint32_t ranks, int rank) {
  std::vector<Transport*> edges(ranks, transport);
  edges.at(static_cast<size_t>(rank)) = nullptr;
  return edges;
}

}  // namespace

Engine::Engine(std::shared_ptr<Region> region, int rank, EngineOptions options)
    : region_(std::move(region)),
      rank_(rank),
      forks_(forks()),
      owner_(getpid()),
      peers_(std::move(options.pidfds), options.status_fd),
      patience_(foreground(options, region_->ranks())),
      shm_(*region_, rank),
      executor_(every_edge(&shm_, region_->ranks(), rank), rank),
      waiter_(*region_, peers_, rank, &RankCell::bell, patience_),
      channels_(*region_, peers_, rank, patience_, kBackground) {
  region_->cell(rank).pid.store(getpid(), std::memory_order_release);
}

Engine::~Engine() { leave(); }

const Program* Engine::load(std::span<const int32_t> code) {
  Program program(code, rank_, size());
  const std::lock_guard lock(programs_mutex_);
  programs_.push_back(std::move(program));
  return &programs_.back();
}

uint64_t Engine::fingerprint(const Call& call, uint64_t seq) const {
  uint64_t mixed = seq * 0x9e3779b97f4a7c15ULL ^ before_;
  mixed ^= (call.numel + 1) * 0xc2b2ae3d27d4eb4fULL;
  if (call.luggage != nullptr) mixed ^= call.luggage->out.shape() + 3 * call.luggage->in.shape();
  mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9ULL;
  mixed ^= uint64_t{call.kind} | uint64_t{static_cast<uint8_t>(call.dtype)} << 8 |
           uint64_t{static_cast<uint8_t>(call.op)} << 16 |
           uint64_t{static_cast<uint8_t>(call.program->algorithm())} << 24 |
           uint64_t{static_cast<uint32_t>(call.root)} << 32;
  mixed = (mixed ^ (mixed >> 32)) * 0x94d049bb133111ebULL;
  return mixed | 1;  // 0 means "no operation"
}

void Engine::record(const Call& call, uint64_t seq, uint64_t fingerprint) {
  RankCell& cell = region_->cell(rank_);
  CallRecord record{seq,
                    fingerprint,
                    call.numel,
                    call.root,
                    call.kind,
                    static_cast<uint8_t>(call.dtype),
                    static_cast<uint8_t>(call.op),
                    static_cast<uint8_t>(call.program->algorithm())};
  uint64_t words[sizeof record / sizeof(uint64_t)];
  std::memcpy(words, &record, sizeof record);
  auto& slot = cell.history[seq % kHistory];
  for (size_t i = 0; i < std::size(words); ++i) slot[i].store(words[i], std::memory_order_relaxed);
  cell.started.store(seq, std::memory_order_release);
}

FaultKind Engine::execute(const Call& call, bool in_background) {
  const uint64_t seq = ++seq_;
  const uint64_t print = fingerprint(call, seq);
  before_ = print;
  waiter_.begin(seq, print, call.deadline, call.timeout);
  waiter_.set_patience(in_background ? kBackground : patience_);
  waiter_.set_interrupt(in_background ? nullptr : &interrupted_);
  try {
    waiter_.throw_if_aborted();
    record(call, seq, print);
    perform(call, print);
  } catch (const Fault& fault) {
    if (fault.kind == FaultKind::kMismatch && call.luggage != nullptr && !call.luggage->site.empty())
      remark(seq, call.luggage->site);
    return fault.kind;
  } catch (const std::bad_alloc&) {
    abort(Fault{FaultKind::kNoMemory, rank_, rank_});
    return FaultKind::kNoMemory;
  }
  region_->cell(rank_).finished.store(seq, std::memory_order_release);
  return FaultKind::kNone;
}

// Buffers that travel together are copied together before, and apart after.
void Engine::perform(const Call& call, uint64_t fingerprint) {
  const bool in_place = !call.program->equal_blocks();
  if (call.luggage != nullptr) {
    call.luggage->in.gather();
    if (in_place) call.luggage->out.gather();
  }
  executor_.run(Job{call.program, call.binding, call.dtype, call.op, call.factor, fingerprint}, waiter_);
  if (call.luggage != nullptr && call.program->writes_out()) call.luggage->out.scatter();
}

void Engine::check_process() const {
  if (forks() != forks_) [[unlikely]]
    throw std::runtime_error("this group belongs to process " + std::to_string(owner_) +
                             "; a process that was forked from it makes a group of its own");
}

FaultKind Engine::run(Call call) {
  check_process();
  if (within())
    throw std::runtime_error(
        "called from a signal handler while an operation of the same group is under way");
  if (queued_.load(std::memory_order_relaxed) == completed_.load(std::memory_order_acquire) &&
      executing_.try_lock()) {
    const std::lock_guard lock(executing_, std::adopt_lock);
    runner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    direct_.store(direct_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    const FaultKind result = execute(call, false);
    runner_.store(std::thread::id(), std::memory_order_relaxed);
    return result;
  }
  return wait(enqueue(std::move(call)), INT64_MAX);
}

uint64_t Engine::start(Call call) {
  check_process();
  return enqueue(std::move(call));
}

uint64_t Engine::enqueue(Call call) {
  call.deadline = later(call.timeout);
  const std::lock_guard lock(queue_mutex_);
  if (stopping_) return kLateTicket;
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  const uint64_t ticket = queued_.fetch_add(1, std::memory_order_acq_rel) + 1;
  queue_.push_back(std::move(call));
  queue_grew_.notify_one();
  return ticket;
}

void Engine::serve() {
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    queue_grew_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Call call = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    FaultKind result;
    {
      const std::lock_guard executing(executing_);
      result = execute(call, true);
    }
    lock.lock();
    const uint64_t ticket = completed_.load(std::memory_order_relaxed) + 1;
    if (result != FaultKind::kNone && first_failed_.load() > ticket) first_failed_.store(ticket);
    completed_.store(ticket, std::memory_order_release);
    ticket_done_.notify_all();
  }
}

FaultKind Engine::wait(uint64_t ticket, Nanoseconds deadline) {
  if (!done(ticket)) {
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
      // The engine may still be moving these very bytes; an aborted call ends soon.
      ticket_done_.wait(lock, [&] { return done(ticket); });
      return FaultKind::kInterrupted;
    }
  }
  if (ticket != kLateTicket && first_failed_.load(std::memory_order_acquire) > ticket)
    return FaultKind::kNone;
  const FaultKind kind = fault().kind;
  return kind == FaultKind::kNone ? FaultKind::kAborted : kind;
}

Fault Engine::fault() const {
  const AbortCell& cell = region_->abort();
  return cell.state.load(std::memory_order_acquire) == 2 ? cell.fault : Fault{};
}

void Engine::remark(uint64_t seq, const std::string& text) {
  Remark& remark = region_->cell(rank_).remark;
  uint32_t none = 0;
  if (!remark.state.compare_exchange_strong(none, 1)) return;
  remark.seq = seq;
  remark.text[text.copy(remark.text, kRemarkBytes - 1)] = '\0';
  remark.state.store(2, std::memory_order_release);
}

std::optional<std::pair<uint64_t, std::string>> Engine::remark_of(int rank) {
  const Remark& remark = region_->cell(rank).remark;
  if (remark.state.load(std::memory_order_acquire) != 2) return std::nullopt;
  return std::pair(remark.seq, std::string(remark.text));
}

void Engine::abort(Fault fault) {
  Waiter waiter(*region_, peers_, rank_, &RankCell::bell, patience_);
  waiter.begin(region_->cell(rank_).started.load(std::memory_order_relaxed), 0, INT64_MAX);
  try {
    waiter.fail(fault);
  } catch (const Fault&) {  // this or an earlier one: it stands in the abort cell
  }
}

// Calls under way or queued would end at their deadlines only: leaving them behind aborts the group.
void Engine::leave() {
  if (left_.exchange(true)) return;
  if (getpid() != owner_) {  // a fork's copy: neither the shared cell nor the threads are this process's
    if (thread_.joinable()) thread_.detach();
    channels_.leave(true);
    return;
  }
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
    queue_grew_.notify_all();
  }
  // A call of another thread, or of this one, which then is in a signal handler and must not lock again.
  const bool running = within() || !executing_.try_lock();
  if (!running) executing_.unlock();
  if (running || !done(queued_.load(std::memory_order_acquire)))
    abort(Fault{FaultKind::kAborted, rank_, rank_});
  if (thread_.joinable()) thread_.join();
  channels_.leave(false);
  region_->cell(rank_).left.store(1, std::memory_order_seq_cst);
  Waiter(*region_, peers_, rank_, &RankCell::bell, patience_).ring_all();
}

}  // namespace unisono
