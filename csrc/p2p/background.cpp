// The background thread: moves messages while no caller does.
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <new>

#include "p2p/channels.hpp"

namespace unisono {
namespace {

// How often the background thread looks whether callers are away: at first, and after it has looked in vain,
// since it takes time from what computes. It sleeps when it has seen no requests some times.
constexpr auto kLookInterval = std::chrono::microseconds(50);
constexpr auto kIdleInterval = std::chrono::microseconds(1000);
constexpr int kIdleLooks = 20;

}  // namespace

void Channels::begin_thread(ReleasableLock& caller_lock) {
  const std::unique_lock lock = locked(caller_lock);
  if (stopping_ || thread_.joinable()) return;
  thread_ = std::thread([this] { serve(); });
  has_thread_.store(true, std::memory_order_release);
}

void Channels::detach(ReleasableLock& caller_lock) {
  const std::unique_lock lock = locked(caller_lock);
  if (idle() || stopping_) return;
  if (asleep_) request_posted_.notify_one();
}

// Sleeps until there are requests that no caller moves, or one is late. False: the end.
//
// Callers do not wake it: waking a thread takes longer than most messages. It looks in short intervals
// whether callers have done something since.
bool Channels::callers_are_away(std::unique_lock<std::mutex>& lock) {
  auto interval = kLookInterval;
  for (int idle_looks = 0; !stopping_;) {
    if (idle() && idle_looks++ == kIdleLooks) {
      asleep_ = true;
      request_posted_.wait(lock, [&] { return stopping_ || !idle(); });
      asleep_ = false;
      idle_looks = 0;
    }
    const uint64_t seen = caller_epoch_;
    request_posted_.wait_for(lock, idle() ? kIdleInterval : interval, [&] { return stopping_; });
    if (idle()) continue;
    idle_looks = 0;
    const bool waiting = waiting_callers_.load(std::memory_order_relaxed) > 0;
    if ((caller_epoch_ == seen && !waiting) || now_ns() >= next_deadline_) return !stopping_;
    interval = waiting ? std::min(2 * interval, kIdleInterval) : kLookInterval;
  }
  return false;
}

// The open request with the earliest deadline bounds the wait; a Timeout names its peer.
void Channels::begin_wait(Waiter& waiter, int& awaited) {
  next_deadline_ = INT64_MAX;
  awaited = kAnyRank;
  const auto take_earlier = [&](const Request& request) {
    if (request.deadline >= next_deadline_) return;
    next_deadline_ = request.deadline;
    awaited = request.peer;
  };
  each_send([&](const auto& request) { take_earlier(*request); });
  for (const UnexpectedMessage& message : unexpected_)
    for (const auto& request : {message.request, message.sender})
      if (request) take_earlier(*request);
  for (const auto& request : receives_) take_earlier(*request);
  for (const IncomingMessage& incoming : incoming_)
    if (incoming.request) take_earlier(*incoming.request);
  waiter.begin(0, 0, next_deadline_);
}

// Moves the messages while callers are away. Throws a Fault.
void Channels::serve_while_away(Waiter& waiting) {
  std::unique_lock lock(mutex_);
  const uint64_t callers = caller_epoch_;
  const auto away = [&] {
    return !stopping_ && !idle() && caller_epoch_ == callers &&
           waiting_callers_.load(std::memory_order_relaxed) == 0;
  };
  do {
    int awaited;
    begin_wait(waiting, awaited);
    lock.unlock();
    waiting.until(awaited, [&] {
      const std::lock_guard progressing(mutex_);
      const uint64_t ended = ended_;
      progress();
      wake_others(ended, 0);
      return ended_ != ended || !away();
    });
    lock.lock();
  } while (away());
}

void Channels::serve() {
  prctl(PR_SET_TIMERSLACK, 1000UL);
  Waiter waiting = waiter(background_wait_policy_);
  waiting.expect_own_messages();
  std::unique_lock lock(mutex_);
  while (callers_are_away(lock)) {
    lock.unlock();
    FaultKind fault = FaultKind::kNone;
    try {
      serve_while_away(waiting);
    } catch (const Fault& thrown) {
      fault = thrown.kind;
    } catch (const std::bad_alloc&) {
      fault = out_of_memory(waiting);
    }
    lock.lock();
    if (fault != FaultKind::kNone) fail_all(fault);
  }
}

}  // namespace unisono
