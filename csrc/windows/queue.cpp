#include "windows/queue.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include "protocol/stack_sample.hpp"

namespace unisono {
namespace {

constexpr int kQueuePolls = 64;  // before the clock is read
// The longest sleep: it bounds the delay of a death or Ctrl-C.
constexpr Nanoseconds kQueueSlice = 20 * kMillisecond;
constexpr Nanoseconds kQueueLook = 10 * kMillisecond;

size_t rounded(size_t nbytes) {
  return (std::max<size_t>(nbytes, 1) + kQueueAlignment - 1) & -kQueueAlignment;
}

size_t record_bytes(size_t places) { return rounded(sizeof(QueueRecord) + places); }

pid_t this_thread() {
  static thread_local const auto number = static_cast<pid_t>(syscall(SYS_gettid));
  return number;
}

}  // namespace

size_t SharedQueue::bytes_before(size_t places) {
  return sizeof(QueueCell) + places * sizeof(QueueReader) + kQueueRecords * record_bytes(places);
}

SharedQueue::SharedQueue(const WaitContext& context, unsigned char* memory, size_t nbytes,
                         std::vector<int> ranks, int owner, bool latest, Nanoseconds spin)
    : context_(context),
      ranks_(std::move(ranks)),
      owner_(context.group.member(owner)),
      latest_(latest),
      spin_(spin),
      stride_(record_bytes(ranks_.size())),
      capacity_((nbytes - bytes_before(ranks_.size())) / kQueueAlignment * kQueueAlignment),
      cell_(*reinterpret_cast<QueueCell*>(memory)),
      readers_(reinterpret_cast<QueueReader*>(cell_.rest)),
      records_(cell_.rest + ranks_.size() * sizeof(QueueReader)),
      process_(getpid()),
      next_(ranks_.size(), 1),
      stopped_(std::make_unique<std::atomic<bool>[]>(ranks_.size() + 1)) {
  if (nbytes < bytes_before(ranks_.size()) + kQueueAlignment)
    throw std::invalid_argument("the memory of a queue is too small");
  for (const int rank : ranks_) context.group.member(rank);
}

template <class Ready, class Check>
void SharedQueue::wait(EventCount& event, const WindowLimits& limits, Ready ready, Check check) {
  for (int i = 0; i < kQueuePolls; ++i, cpu_pause())
    if (ready()) return;
  const Nanoseconds deadline = to_deadline(limits.timeout), spin_end = std::min(to_deadline(spin_), deadline);
  if (limits.caller_lock != nullptr) limits.caller_lock->release();
  while (now_ns() < spin_end)
    for (int i = 0; i < 32; ++i, cpu_pause())
      if (ready()) return;
  for (;;) {
    const Nanoseconds left = deadline - now_ns();
    if (left > 0 && sleep_until(event, std::min(kQueueSlice, left), ready)) return;
    const Fault dead = check();  // what the dead rank did before comes first
    if (ready()) return;
    if (dead.kind != FaultKind::kNone) throw dead;
    check_group();
    if (context_.interrupted != nullptr && *context_.interrupted && (*context_.interrupted)())
      throw Fault{FaultKind::kInterrupted, context_.rank, context_.rank};
    if (now_ns() >= deadline) throw Fault{FaultKind::kTimeout, context_.rank, -1};
  }
}

// A queue goes on after the loss of other ranks: it has its own memory, and looks after its own ranks.
void SharedQueue::check_group() const {
  if (!context_.group.aborted()) return;
  const FaultKind kind = context_.group.fault().kind;
  for (const auto loss : {FaultKind::kPeerLost, FaultKind::kPeerLeft, FaultKind::kReplaced,
                          FaultKind::kHostSilent, FaultKind::kStopped})
    if (kind == loss) return;
  throw Fault{FaultKind::kAborted, context_.rank, context_.rank};
}

// ---- who still needs a message ---------------------------------------------------------------------

bool SharedQueue::needed_by(int place, uint64_t number) {
  const Presence presence = this->presence(place);
  const uint8_t held = record(number).held[place].load();
  if (held == kNotHeld || presence == Presence::kLost) return false;
  return held == kTaken || (presence == Presence::kReading && number >= reader(place).first.load());
}

bool SharedQueue::needed(uint64_t number) {
  for (int place = 0; place < places(); ++place)
    if (needed_by(place, number)) return true;
  return false;
}

void SharedQueue::reclaim() {
  std::erase_if(stored_, [&](const auto& entry) {
    const uint64_t number = entry.second.number;
    if (latest_ && number == cell_.newest.load(std::memory_order_relaxed)) return false;
    if (latest_) record(number).number.store(0);  // R2: before `needed` reads the bytes of the readers
    const bool over = !needed(number);
    if (over) in_use_[number % kQueueRecords] = false;
    return over;
  });
}

// ---- the owner -------------------------------------------------------------------------------------

bool SharedQueue::fits(uint64_t at, size_t nbytes) const {
  const auto next = stored_.lower_bound(at);
  return (next == stored_.end() ? capacity_ : next->first) - at >= nbytes;
}

// The end of the last message is tried first, then the first gap, then one that holds the newest message.
bool SharedQueue::find_room(size_t nbytes) {
  place_ = tail_;
  if (!in_use_[number_ % kQueueRecords] && fits(place_, nbytes)) return true;
  reclaim();
  if (stored_.size() == kQueueRecords) return false;
  while (in_use_[number_ % kQueueRecords]) ++number_;  // a reader keeps that message: see `take_now`
  if (fits(place_, nbytes)) return true;
  place_ = 0;
  for (const auto& [offset, one] : stored_) {
    if (offset - place_ >= nbytes) return true;
    place_ = offset + one.nbytes;
  }
  return capacity_ - place_ >= nbytes || (latest_ && replace_newest(nbytes));
}

// With `latest` the newest message makes room for the next one, which then fits, if no reader has it.
bool SharedQueue::replace_newest(size_t nbytes) {
  const uint64_t newest = cell_.newest.load(std::memory_order_relaxed);
  size_t start = 0;
  for (auto one = stored_.begin(); one != stored_.end(); ++one) {
    const auto next = std::next(one);
    const size_t end = next == stored_.end() ? capacity_ : next->first;
    if (one->second.number == newest) {
      if (end - start < nbytes || needed(newest)) return false;
      record(newest).number.store(0);  // R2, as in `reclaim`
      if (needed(newest)) {            // it stays the newest one for the others, too
        record(newest).number.store(newest);
        notify(cell_.put);
        return false;
      }
      in_use_[newest % kQueueRecords] = false;
      stored_.erase(one);
      place_ = start;
      return true;
    }
    start = one->first + one->second.nbytes;
  }
  return false;
}

uint64_t SharedQueue::reserve(size_t nbytes, const WindowLimits& limits) {
  if (nbytes > capacity_) throw std::invalid_argument("a message is larger than its queue");
  check_group();
  look_for_dead(false);
  reserved_ = nbytes;
  const size_t wanted = rounded(nbytes);
  const auto ready = [&] {
    const std::scoped_lock held(stored_lock_);
    return find_room(wanted) || stopped_[ranks_.size()];
  };
  wait(cell_.returned, limits, ready, [&] {
    look_for_dead(true);
    return Fault{};
  });
  if (stopped_[ranks_.size()]) throw Fault{FaultKind::kPeerLeft, context_.rank, context_.rank};
  return place_;
}

void SharedQueue::publish() {
  const uint64_t number = number_++;
  QueueRecord& made = record(number);
  made.offset = place_, made.nbytes = reserved_;
  made.put_ns.store(now_ns(), std::memory_order_relaxed);
  for (int place = 0; place < places(); ++place) {
    auto joining = static_cast<uint32_t>(Presence::kJoining);
    if (presence(place) == Presence::kJoining) {
      reader(place).first.store(number);
      // It may leave in the same moment: then it stays absent.
      reader(place).presence.compare_exchange_strong(joining, static_cast<uint32_t>(Presence::kReading));
    }
    made.held[place].store(!latest_ && presence(place) == Presence::kReading ? kOwed : kNotHeld);
  }
  made.number.store(number);
  const std::scoped_lock held(stored_lock_);
  stored_.emplace(place_, Stored{rounded(reserved_), number});
  in_use_[number % kQueueRecords] = true;
  tail_ = place_ + rounded(reserved_);
  cell_.newest.store(number);  // R1, R2
  notify(cell_.put);
}

void SharedQueue::end(QueueState state) {
  cell_.state.store(static_cast<uint32_t>(state));
  notify_sleepers(cell_.put);
}

void SharedQueue::look_for_dead(bool now) {
  if (!now && now_ns() < looked_at_ + kQueueLook) return;
  looked_at_ = now_ns();
  for (int place = 0; place < places(); ++place) {
    const int rank = rank_of(place);
    if (presence(place) == Presence::kLost || rank == context_.rank || !context_.peers.dead(rank)) continue;
    const bool reading = reads(place);
    set_presence(place, Presence::kLost);
    if (reading) throw lost(rank);
  }
}

SlowReader SharedQueue::find_slowest() {
  SlowReader found;
  const std::scoped_lock held(stored_lock_);
  for (const auto& [offset, one] : stored_)
    for (int place = 0; place < places(); ++place) {
      if ((found.place >= 0 && found.number <= one.number) || !needed_by(place, one.number)) continue;
      const Nanoseconds put = record(one.number).put_ns.load(std::memory_order_relaxed);
      const Nanoseconds since = std::max(put, reader(place).moved_ns.load(std::memory_order_relaxed));
      found = {place, one.number, now_ns() - since, record(one.number).held[place].load() == kTaken};
    }
  return found;
}

std::string SharedQueue::line_of(int place) {
  const int32_t thread = reader(place).thread.load(std::memory_order_relaxed);
  return locate(context_.group, context_.peers, rank_of(place), thread);
}

// ---- a reader --------------------------------------------------------------------------------------

SharedQueue::QueueMessage SharedQueue::take(int place, const WindowLimits& limits) {
  check_group();
  QueueReader& own = reader(place);
  own.thread.store(this_thread(), std::memory_order_relaxed);
  own.moved_ns.store(now_ns(), std::memory_order_relaxed);
  QueueMessage message{};
  const auto ready = [&] {
    const bool over =
        stopped_[static_cast<size_t>(place)] || state() != QueueState::kOpen;  // before the last message
    return take_now(place, message) || over;
  };
  wait(cell_.put, limits, ready,
       [&] { return owner_ != context_.rank && context_.peers.dead(owner_) ? lost(owner_) : Fault{}; });
  own.moved_ns.store(now_ns(), std::memory_order_relaxed);
  return message;
}

// R2: with `latest` the reader first says that it has the message, then looks whether it is still there; the
// owner does the opposite (hazard pointers: Michael, IEEE Transactions on Parallel and Distributed Systems
// 15, 2004). Otherwise the message stays until this reader has taken it.
bool SharedQueue::take_now(int place, QueueMessage& message) {
  if (presence(place) != Presence::kReading) return false;
  uint64_t& next = next_[static_cast<size_t>(place)];
  if (!latest_) next = std::max(next, reader(place).first.load());
  const uint64_t newest = cell_.newest.load();                                     // R1
  while (!latest_ && next < newest && record(next).number.load() != next) ++next;  // passed over
  if (newest < next) return false;
  const uint64_t number = latest_ ? newest : next;
  QueueRecord& found = record(number);
  found.held[place].store(kTaken);
  if (latest_ && found.number.load() != number) {  // a newer one has come meanwhile
    found.held[place].store(kNotHeld);
    notify(cell_.returned);
    return false;
  }
  message = {number, found.offset, found.nbytes};
  next = number + 1;
  return true;
}

void SharedQueue::join(int place) {
  stopped_[static_cast<size_t>(place)] = false;
  reader(place).moved_ns.store(now_ns(), std::memory_order_relaxed);
  if (!reads(place)) set_presence(place, latest_ ? Presence::kReading : Presence::kJoining);
}

void SharedQueue::leave(int place) {
  if (reads(place)) set_presence(place, Presence::kAbsent);
  notify(cell_.returned);
}

void SharedQueue::stop(int place) {
  stopped_[place < 0 ? ranks_.size() : static_cast<size_t>(place)] = true;
  notify_sleepers(place < 0 ? cell_.returned : cell_.put);
}

void SharedQueue::give_back(int place, uint64_t number) noexcept {
  if (getpid() != process_) return;
  record(number).held[place].store(kNotHeld);  // R2
  reader(place).moved_ns.store(now_ns(), std::memory_order_relaxed);
  notify(cell_.returned);
}

Fault SharedQueue::lost(int rank) const {
  Fault fault{FaultKind::kPeerLost, context_.rank, rank};
  context_.peers.look_up(context_.group.process_of(rank), fault);
  return fault;
}

}  // namespace unisono
