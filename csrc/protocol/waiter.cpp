#include "protocol/waiter.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "protocol/control.hpp"
#include "protocol/proc_files.hpp"
#include "protocol/stack_sample.hpp"

namespace unisono {
namespace {

constexpr Nanoseconds kFirstSlice = kMillisecond;
constexpr Nanoseconds kLongestSlice = 20 * kMillisecond;  // bounds the delay of a death or Ctrl-C
// The same with many ranks: a check looks at all of them, so the cores need this for all to check once.
constexpr Nanoseconds kSlicePerPair = 1'000;
constexpr Nanoseconds kSocketSlice = 10 * kMillisecond;  // the same on sockets, where no rank notifies
constexpr Nanoseconds kBusySlice = kMillisecond;         // the same while queued bytes wait for the kernel
constexpr Nanoseconds kFirstAsk = 5 * kMillisecond;
constexpr Nanoseconds kLongestAsk = 640 * kMillisecond;
// In an elastic group: how often the states of the processes are read, and how long a question may stay
// unanswered.
constexpr Nanoseconds kStateInterval = 25 * kMillisecond;
constexpr Nanoseconds kSilence = 1000 * kMillisecond;
constexpr Nanoseconds kAskPatience = 50 * kMillisecond;
constexpr Nanoseconds kDyingPatience = 3000 * kMillisecond;
constexpr Nanoseconds kStatusPatience = 2000 * kMillisecond;
// A rank looks at all processes of a host with so few ranks. Otherwise at its neighbours, and at some others
// in turn: of any ranks that die, one is the neighbour of a living rank.
constexpr size_t kMostWatched = 64, kNeighbours = 16;

// The launcher's board: records of four int32, see unisono/commands/launch/process.py.
enum { kBoardPid, kBoardState, kBoardCode, kBoardWidth = 4 };
enum { kBoardExited = 2, kBoardSignalled = 3 };

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

Nanoseconds now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

Nanoseconds to_deadline(Nanoseconds timeout) {
  const Nanoseconds now = now_ns();
  return timeout < INT64_MAX - now ? now + timeout : INT64_MAX;
}

// ---- PeerProcesses ----------------------------------------------------------------------------------

PeerProcesses::PeerProcesses(FileDescriptors pidfds, int status_fd, GroupState& group, int rank)
    : group_(group), pidfds_(std::move(pidfds)) {
  const size_t ranks = pidfds_.size();
  for (size_t i = 1; i < ranks; ++i) {
    const size_t peer = (static_cast<size_t>(rank) + i) % ranks;
    if (pidfds_[peer] >= 0) watched_.push_back(static_cast<int>(peer));
  }
  struct stat info;
  if (status_fd < 0 || fstat(status_fd, &info) != 0 || info.st_size == 0) return;
  void* const board = mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, status_fd, 0);
  if (board == MAP_FAILED) return;  // only the dead rank's signal stays unknown
  board_ = static_cast<const int32_t*>(board);
  board_records_ = static_cast<size_t>(info.st_size) / (kBoardWidth * sizeof(int32_t));
}

PeerProcesses::~PeerProcesses() {
  if (board_ != nullptr) munmap(const_cast<int32_t*>(board_), board_records_ * kBoardWidth * sizeof(int32_t));
}

bool PeerProcesses::dead(int rank) const {
  pollfd entry{pidfds_[static_cast<size_t>(rank)], POLLIN, 0};
  return entry.fd >= 0 && (poll(&entry, 1, 0) == 1 || runs_another_program(rank));
}

bool PeerProcesses::runs_another_program(int rank) const {
  if (pidfd(rank) < 0) return false;
  RankCell& cell = group_.cell(rank);
  if (cell.pid.load(std::memory_order_acquire) == 0) return false;  // R1
  const ProcessIdentity process = cell.process();
  return replaced(process) && !is_killed(process.pid);
}

void PeerProcesses::await_end(int rank, Nanoseconds deadline) const {
  pollfd entry{pidfd(rank), POLLIN, 0};
  const Nanoseconds left = std::clamp<Nanoseconds>(deadline - now_ns(), 0, kDyingPatience);
  poll(&entry, 1, static_cast<int>(left / kMillisecond));
}

// The ranks to look at now: all, or the neighbours, `in_turn` others, and the awaited one.
std::vector<int> PeerProcesses::chosen(size_t in_turn, int awaited) const {
  if (watched_.size() <= kMostWatched) return watched_;
  std::vector<int> ranks(watched_.begin(), watched_.begin() + kNeighbours);
  const size_t first = next_turn_.fetch_add(in_turn, std::memory_order_relaxed);
  for (size_t i = 0; i < in_turn; ++i) ranks.push_back(watched_[(first + i) % watched_.size()]);
  if (awaited >= 0 && pidfd(awaited) >= 0) ranks.push_back(awaited);
  return ranks;
}

std::vector<int> PeerProcesses::dead_of(const std::vector<int>& ranks) const {
  std::vector<pollfd> entries;
  entries.reserve(ranks.size());
  for (const int rank : ranks) entries.push_back({pidfd(rank), POLLIN, 0});
  std::vector<int> dead;
  if (poll(entries.data(), entries.size(), 0) <= 0) return dead;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (entries[i].revents != 0) dead.push_back(ranks[i]);
  return dead;
}

std::vector<int> PeerProcesses::ended() const {
  std::vector<int> found;
  std::ranges::copy_if(watched_, std::back_inserter(found), [&](int rank) { return dead(rank); });
  return found;
}

bool PeerProcesses::find_dead(Fault& fault, int awaited) const {
  for (const int rank : dead_of(chosen(kMostWatched - kNeighbours, awaited))) {
    if (has_left(rank)) continue;
    fault.kind = FaultKind::kPeerLost;
    fault.rank = rank;
    look_up(group_.process_of(rank), fault);
    return true;
  }
  if (watched_.empty()) return false;
  const size_t turn = next_program_.fetch_add(1, std::memory_order_relaxed);
  for (const int rank : {awaited, watched_[turn % watched_.size()]}) {
    if (rank < 0 || !runs_another_program(rank) || has_left(rank)) continue;
    fault.kind = FaultKind::kReplaced;
    fault.rank = rank;
    return true;
  }
  return false;
}

int PeerProcesses::find_stopped(int awaited) const {
  for (const int rank : chosen(0, awaited)) {
    if (has_left(rank)) continue;
    char text[512];
    const char* const name_end = state_of(group_.process_of(rank), text);
    if (name_end != nullptr && (name_end[1] == ' ') && (name_end[2] == 'T' || name_end[2] == 't'))
      return rank;
  }
  return -1;
}

// A rank can see a death before the launcher has reaped the process and recorded how it ended: wait for it.
void PeerProcesses::look_up(int pid, Fault& fault) const {
  const Nanoseconds end = now_ns() + kStatusPatience;
  for (size_t i = 0; i < board_records_; ++i) {
    const int32_t* const record = board_ + i * kBoardWidth;
    if (__atomic_load_n(record + kBoardPid, __ATOMIC_ACQUIRE) != pid) continue;
    int32_t state;
    while ((state = __atomic_load_n(record + kBoardState, __ATOMIC_ACQUIRE)) < kBoardExited && now_ns() < end)
      usleep(1000);
    if (state == kBoardExited) fault.exit_code = record[kBoardCode];
    if (state == kBoardSignalled) fault.signal = record[kBoardCode];
    return;
  }
}

// ---- Waiter ----------------------------------------------------------------------------------------

// After an abort, a wait still succeeds if its condition already holds. False: the group is not aborted.
bool Waiter::ready_though_aborted(Poll ready, void* context) {
  if (!group_.aborted()) return false;
  if (ready(context)) return true;
  rethrow();
}

void Waiter::yield_then_sleep(const int& awaited, Poll ready, void* context) {
  if (ready_though_aborted(ready, context)) return;
  if (caller_lock_ != nullptr) caller_lock_->release();
  if (deadline_ == 0) deadline_ = to_deadline(timeout_);
  // Polling a socket has already taken time, and yielding the core does not help a rank of another host.
  if (!through_socket(awaited) && spin_and_yield(awaited, ready, context)) return;
  const Nanoseconds started = now_ns();
  Nanoseconds next_ask_at = started + kFirstAsk, ask_interval = 4 * kFirstAsk;
  const Nanoseconds local_ranks = group_.region().ranks();
  const Nanoseconds longest = std::max(kLongestSlice, local_ranks * local_ranks * kSlicePerPair);
  for (Nanoseconds slice = kFirstSlice;; slice = std::min(2 * slice, longest)) {
    if (sleep_once(awaited, ready, context, slice)) return;
    if (control_ != nullptr &&
        now_ns() >= next_ask_at) {  // check_for_faults needs the status of remote ranks
      control_->ask();
      next_ask_at += ask_interval;
      ask_interval = std::min(2 * ask_interval, kLongestAsk);
    }
    // A rank posts all messages before it sets `left`: load `left`, then check for the message again.
    const int suspect = awaited;
    const bool left = has_left(suspect);
    if (ready(context) || ready_though_aborted(ready, context)) return;
    check_for_faults(awaited, left && awaited == suspect);
  }
}

bool Waiter::awaits_rank_of_this_core(int awaited) const {
  if (placement_.shares_core_with(awaited)) return true;
  for (const int rank : sources_)
    if (placement_.shares_core_with(rank) && group_.cell(rank).started.load(std::memory_order_relaxed) < seq_)
      return true;
  return false;
}

bool Waiter::spin_and_yield(int awaited, Poll ready, void* context) {
  Nanoseconds started = now_ns();
  const bool shares_core = awaited >= 0 && awaits_rank_of_this_core(awaited);
  for (Nanoseconds now = started; !shares_core && now < started + wait_policy_.spin_ns; now = now_ns()) {
    for (int i = 0; i < 32; ++i) {
      if (poll_once(ready, context)) return true;
      cpu_pause();
    }
    if (ready_though_aborted(ready, context)) return true;
  }
  started = now_ns();
  for (Nanoseconds now = started; now < started + wait_policy_.yield_ns; now = now_ns()) {
    for (int i = 0; i < 4; ++i) {
      sched_yield();
      if (poll_once(ready, context)) return true;
    }
    placement_.publish_core();
    if (wait_policy_.spread) placement_.spread(now);
    if (ready_though_aborted(ready, context)) return true;
  }
  return false;
}

bool Waiter::poll_once(Poll ready, void* context) {
  if (sockets_ != nullptr) sockets_->flush();
  return ready(context);
}

bool Waiter::has_left(int awaited) const {
  const auto left = [&](int rank) {
    return group_.cell(rank).left.load(std::memory_order_seq_cst) != 0 &&
           (group_.on_this_host(rank) || sockets_->ended(rank));
  };
  if (awaited >= 0) return left(awaited);
  if (fingerprint_ != 0 || group_.ranks() == 1 || expects_own_messages_) return false;
  for (int rank = 0; rank < group_.ranks(); ++rank)
    if (rank != rank_ && !left(rank)) return false;
  return true;
}

// Sleeps until a notification, arriving bytes, or the end of `slice`; true when the condition holds.
bool Waiter::sleep_once(int awaited, Poll ready, void* context, Nanoseconds slice) {
  if (sockets_ != nullptr) {
    const uint32_t epoch = sockets_->epoch();
    if (poll_once(ready, context)) return true;
    if (through_socket(awaited)) {
      if (!group_.aborted()) sockets_->sleep(awaited, std::min(slice, kSocketSlice), epoch);
      return poll_once(ready, context);
    }
    if (sockets_->busy()) slice = kBusySlice;
  }
  EventCount& event = group_.cell(rank_).*event_;
  const uint32_t epoch = event.epoch.load(std::memory_order_seq_cst);  // before `ready` is checked below
  event.sleepers.fetch_add(1, std::memory_order_seq_cst);              // R2, with what `ready` loads
  bool done = ready(context);
  if (!done && !group_.aborted()) {
    const timespec timeout{slice / 1'000'000'000LL, slice % 1'000'000'000LL};
    futex(&event.epoch, FUTEX_WAIT, epoch, &timeout);
    done = ready(context);
  }
  event.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return done;
}

void Waiter::check_for_faults(int awaited, bool awaited_has_left) {
  throw_if_aborted();
  Fault fault;
  if (peers_.find_dead(fault, awaited)) fail(fault);
  if ((fault.rank = find_mismatch()) >= 0) {
    fault.kind = FaultKind::kMismatch;
    fail(fault);
  }
  if (group_.elastic()) check_for_silence(awaited);
  if (awaited_has_left) {
    fault.kind = FaultKind::kPeerLeft;
    fault.rank = awaited >= 0 ? awaited : (rank_ == 0 ? 1 : 0);
    fail(fault);
  }
  if (interrupted_ != nullptr && *interrupted_ && (*interrupted_)()) {
    fault.kind = FaultKind::kInterrupted;
    fault.rank = rank_;
    fail(fault);
  }
  if (now_ns() >= deadline_) {
    if (control_ != nullptr) control_->refresh(kAskPatience);
    fault.kind = FaultKind::kTimeout;
    fault.rank = find_absent();
    if (fault.rank < 0) fault.rank = awaited;
    fail(fault);
  }
}

// A stopped rank, found twice; or a rank of another host that does not answer.
void Waiter::check_for_silence(int awaited) {
  Fault fault;
  if (control_ != nullptr && (fault.rank = control_->find_silent(kSilence)) >= 0) {
    fault.kind = FaultKind::kHostSilent;
    fail(fault);
  }
  if (now_ns() < stopped_checked_at_ + kStateInterval) return;
  const int before = std::exchange(stopped_rank_, peers_.find_stopped(awaited));
  const bool again = stopped_checked_at_ != 0 && now_ns() < stopped_checked_at_ + 4 * kStateInterval;
  stopped_checked_at_ = now_ns();
  if (stopped_rank_ < 0 || stopped_rank_ != before || !again) return;
  fault.kind = FaultKind::kStopped;
  fault.rank = stopped_rank_;
  fail(fault);
}

// A rank whose operation of this number differs from ours, or -1. This finds ranks that wait for each other
// in different operations, where no message would show the difference.
int Waiter::find_mismatch() {
  if (fingerprint_ == 0) return -1;
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    RankCell& cell = group_.cell(rank);
    const uint64_t started = cell.started.load(std::memory_order_acquire);
    if (rank == rank_ || started < seq_ || started >= seq_ + kHistory - 1) continue;
    const CallRecord record = group_.record_of(rank, seq_);
    std::atomic_thread_fence(std::memory_order_acquire);
    // R3: a rank far ahead may have overwritten the record during the read.
    const bool current = cell.started.load(std::memory_order_relaxed) < seq_ + kHistory - 1;
    if (record.seq == seq_ && record.fingerprint != fingerprint_ && current) return rank;
  }
  return -1;
}

// The first rank that has not begun this operation, or -1.
int Waiter::find_absent() {
  if (fingerprint_ == 0) return -1;
  for (int rank = 0; rank < group_.ranks(); ++rank)
    if (group_.cell(rank).started.load(std::memory_order_acquire) < seq_) return rank;
  return -1;
}

void Waiter::fail(Fault fault) {
  fault.found_by = rank_, fault.seq = seq_;
  if (fault.kind == FaultKind::kTimeout) fault.window = window_;
  group_.abort_with(fault);
  locate_late_ranks(group_, peers_);  // at once: who waits for an asynchronous call may read the fault late
  rethrow();
}

// Ranks that made the same call may differ in sizes, which are not part of the fingerprint where each rank
// has its own. Then a message is too short or too long, or one is missing, or there is one too many, which is
// found in a later operation.
void Waiter::refuse(int peer, uint64_t fingerprint, uint64_t nbytes, SizeMismatch sizes) {
  Fault fault;
  fault.kind = FaultKind::kMismatch;
  fault.rank = peer;
  fault.frame = check(DataHeader{nbytes, fingerprint});
  if (fault.frame.kind != FrameErrorKind::kNone) {
    fault.kind = FaultKind::kBadFrame;
    fail(fault);
  }
  if (fingerprint == fingerprint_) {
    fault.size_mismatch = sizes;
    fault.size_mismatch.sent_nbytes += nbytes;
    fault.size_mismatch.seq = seq_;
  } else if (const uint64_t earlier = group_.find(rank_, fingerprint); earlier != 0) {
    fault.size_mismatch.seq = earlier;
  } else {
    if (control_ != nullptr && !group_.on_this_host(peer))
      control_->refresh(kAskPatience);  // get the peer's calls
    if (group_.find(peer, fingerprint_) == seq_) {
      fault.size_mismatch = sizes;
      fault.size_mismatch.more = 0;
      fault.size_mismatch.seq = seq_;
    }
  }
  fail(fault);
}

}  // namespace unisono
