#include "windows/window.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/reduce.hpp"
#include "protocol/control.hpp"

namespace unisono {
namespace {

// A call that synchronises looks so often whether its target is alive: it may have written into the memory of
// a dead one without noticing.
constexpr Nanoseconds kLookInterval = 10 * kMillisecond;
constexpr uint32_t kPollsBeforeNaming = 1000;  // a fence first waits, then finds out for whom

template <class T>
const unsigned char* bytes(const T* from) {
  return reinterpret_cast<const unsigned char*>(from);
}

}  // namespace

// Holds the cell of a rank that this process reaches.
class HeldCell {
 public:
  HeldCell(Window& window, int rank, const WindowLimits& limits) : window_(window), rank_(rank) {
    window.hold_directly(rank, limits);
  }
  ~HeldCell() { window_.direct(rank_)->let_go(window_.context_.group); }
  HeldCell(const HeldCell&) = delete;
  HeldCell& operator=(const HeldCell&) = delete;

 private:
  Window& window_;
  const int rank_;
};

Window::Window(const WaitContext& context, std::vector<int> members, std::vector<WindowPart> parts,
               const std::vector<bool>& direct, FileDescriptors asking, FileDescriptors serving, bool dynamic)
    : context_(context),
      members_(std::move(members)),
      parts_(std::move(parts)),
      dynamic_(dynamic),
      cells_(parts_.size()),
      posts_(parts_.size()),
      completions_(parts_.size()),
      looked_at_(std::make_unique<std::atomic<Nanoseconds>[]>(parts_.size())),
      links_(context, *this) {
  const auto ranks = static_cast<size_t>(context.group.ranks());
  if (parts_.size() != ranks || direct.size() != ranks || asking.size() != ranks || serving.size() != ranks)
    throw std::invalid_argument("parts, direct, asking and serving name every rank once");
  const size_t nbytes = WindowCell::bytes_needed(static_cast<uint32_t>(ranks), 0);
  for (const int rank : members_) {
    const auto at = static_cast<size_t>(context.group.member(rank));
    if (direct[at]) cells_[at] = static_cast<WindowCell*>(mapped(rank, parts_[at].cell, nbytes));
    if (cells_[at] == nullptr && (asking[at] < 0 || serving[at] < 0))
      throw std::invalid_argument("a rank of a window is neither reached nor connected");
  }
  if (cells_[static_cast<size_t>(context.rank)] == nullptr)
    throw std::invalid_argument("a rank reaches its own part of a window");
  links_.connect(std::move(asking), std::move(serving));
}

int Window::member(int64_t rank) const {
  if (std::ranges::find(members_, rank) != members_.end()) return static_cast<int>(rank);
  throw std::invalid_argument("rank " + std::to_string(rank) + " is not in this window of " +
                              std::to_string(members_.size()) + " ranks");
}

Window::~Window() { end(); }

void Window::end() {
  ended_ = true;
  notify_sleepers(context_.group.cell(context_.rank).window_event);
  links_.end();
}

bool Window::reaches(const WaitContext& context, int rank, uint64_t cell, size_t nbytes) {
  if (rank == context.rank) return true;
  if (!context.group.on_this_host(rank) || !context.group.region().zero_copy()) return false;
  const ArenaView* const view = context.group.memory_of(rank).view;
  return view != nullptr && view->at(cell, nbytes) != nullptr;
}

// ---- waiting ---------------------------------------------------------------------------------------

template <class Ready>
void Window::wait(int& awaited, WindowWait what, const WindowLimits& limits, Ready ready) {
  Waiter waiter(context_.group, context_.peers, context_.rank, &RankCell::window_event, context_.policy,
                context_.control == nullptr ? nullptr : &links_, context_.control);
  waiter.begin(0, 0, 0, limits.timeout);
  waiter.set_interrupt(context_.interrupted);
  waiter.set_caller_lock(limits.caller_lock);
  waiter.set_window(what);
  waiter.until(awaited, [&] {
    if (ended_) throw Fault{FaultKind::kPeerLeft, context_.rank, context_.rank};
    return ready();
  });
}

void Window::hold_directly(int rank, const WindowLimits& limits) {
  WindowCell& cell = *direct(rank);
  if (cell.try_hold(context_.rank)) return;
  const CountedWait counted(cell.waiting);
  int awaited = std::max(cell.holder(), 0);
  wait(awaited, WindowWait::kUpdate, limits, [&] {
    if (cell.try_hold(context_.rank)) return true;
    if (const int holder = cell.holder(); holder >= 0) awaited = holder;
    return false;
  });
}

// Throws where the call cannot begin.
void Window::begin(int rank, uint64_t address, size_t nbytes, const WindowLimits& limits) {
  if (context_.group.aborted()) throw context_.group.fault();
  if (ended_) throw Fault{FaultKind::kPeerLeft, context_.rank, context_.rank};
  if (context_.group.cell(rank).left.load(std::memory_order_relaxed) != 0) [[unlikely]]
    context_.group.fail({FaultKind::kPeerLeft, context_.rank, rank});  // its memory is its own again
  bool inside = true;  // only the target itself knows, and tells
  const WindowPart& part = parts_[static_cast<size_t>(rank)];
  if (!dynamic_) {
    const uint64_t offset = address - part.base;
    inside = offset <= part.nbytes && nbytes <= part.nbytes - offset;
  } else if (direct(rank) != nullptr && direct(rank)->holder() == context_.rank) {
    inside = direct(rank)->exposes(address, nbytes);
  } else if (direct(rank) != nullptr) {
    const HeldCell held(*this, rank, limits);
    inside = direct(rank)->exposes(address, nbytes);
  }
  if (!inside) throw std::out_of_range("outside the memory that the target exposes");
}

void Window::refuse_access(int rank, FaultKind kind) {
  if (kind == FaultKind::kNone) return;
  Fault fault;
  if (kind != FaultKind::kPeerLost || !context_.peers.find_dead(fault, rank))
    fault = {kind, context_.rank, kind == FaultKind::kUnwritable ? context_.rank : rank};
  fault.found_by = context_.rank;
  context_.group.fail(fault);
}

// Finds the death of a rank whose memory this process still reaches.
void Window::look_after(int rank) {
  if (context_.group.aborted()) throw context_.group.fault();
  const Nanoseconds now = now_ns();
  auto& looked_at = looked_at_[static_cast<size_t>(rank)];
  if (rank == context_.rank || now < looked_at.load(std::memory_order_relaxed) + kLookInterval) return;
  looked_at.store(now, std::memory_order_relaxed);
  Fault fault;
  const bool left = context_.group.cell(rank).left.load(std::memory_order_acquire) != 0;
  if (!left && !context_.peers.find_dead(fault, rank)) return;
  if (left) fault = {FaultKind::kPeerLeft, context_.rank, rank};
  fault.found_by = context_.rank;
  context_.group.fail(fault);
}

// ---- moving and updating ---------------------------------------------------------------------------

void* Window::mapped(int rank, uint64_t address, size_t nbytes) {
  if (rank == context_.rank) return reinterpret_cast<void*>(address);
  const ArenaView* const view = context_.group.memory_of(rank).view;
  return view == nullptr ? nullptr : view->at(address, nbytes);
}

void Window::put(int rank, uint64_t address, const void* from, size_t nbytes, const WindowLimits& limits) {
  begin(rank, address, nbytes, limits);
  if (nbytes == 0) return;
  if (rank == context_.rank) {
    std::memmove(reinterpret_cast<void*>(address), from, nbytes);
  } else if (direct(rank) != nullptr) {
    refuse_access(rank, copy_to(context_.group.memory_of(rank), address, from, nbytes));
  } else {
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kPut), 0, 0, 0, address, nbytes, 0};
    links_.ask(rank, request, {bytes(from), nbytes}, {}, dynamic_, limits);
  }
}

void Window::get(int rank, uint64_t address, void* into, size_t nbytes, const WindowLimits& limits) {
  begin(rank, address, nbytes, limits);
  if (nbytes == 0) return;
  if (rank == context_.rank) {
    std::memmove(into, reinterpret_cast<const void*>(address), nbytes);
  } else if (direct(rank) != nullptr) {
    refuse_access(rank, copy_from(context_.group.memory_of(rank), into, address, nbytes));
  } else {
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kGet), 0, 0, 0, address, nbytes, 0};
    links_.ask(rank, request, {}, {static_cast<unsigned char*>(into), nbytes}, true, limits);
  }
}

void Window::update(int rank, uint64_t address, DType dtype, uint32_t op, const void* operand, void* former,
                    size_t numel, const WindowLimits& limits) {
  const size_t item = itemsize(dtype);
  begin(rank, address, numel * item, limits);
  const size_t most = kUpdateBytes / item;
  for (size_t first = 0; first < numel; first += most) {
    const size_t count = std::min(most, numel - first), nbytes = count * item;
    const uint64_t there = address + first * item;
    const unsigned char* const from = bytes(static_cast<const char*>(operand)) + first * item;
    unsigned char* const into =
        former == nullptr ? nullptr : static_cast<unsigned char*>(former) + first * item;
    if (direct(rank) != nullptr) {
      const HeldCell held(*this, rank, limits);
      update_piece(rank, there, dtype, op, from, into, count);
      continue;
    }
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kUpdate),
                                static_cast<uint32_t>(dtype),
                                op,
                                into != nullptr ? 1u : 0u,
                                there,
                                nbytes,
                                0};
    links_.ask(rank, request, {from, nbytes}, {into, into == nullptr ? 0 : nbytes},
               dynamic_ || into != nullptr, limits);
  }
}

void Window::update_piece(int rank, uint64_t address, DType dtype, uint32_t op, const void* operand,
                          void* former, size_t numel) {
  const size_t nbytes = numel * itemsize(dtype);
  if (void* const target = mapped(rank, address, nbytes))
    return combine(target, dtype, op, operand, former, numel);
  const PeerMemory memory = context_.group.memory_of(rank);
  std::vector<unsigned char> copy(nbytes);
  refuse_access(rank, copy_from(memory, copy.data(), address, nbytes));
  combine(copy.data(), dtype, op, operand, former, numel);
  if (op != kNoOp) refuse_access(rank, copy_to(memory, address, copy.data(), nbytes));
}

void Window::swap(int rank, uint64_t address, const void* expected, const void* desired, void* former,
                  size_t nbytes, const WindowLimits& limits) {
  if (nbytes == 0 || nbytes > kMostSwapped) throw std::invalid_argument("an element has 1 to 32 bytes");
  begin(rank, address, nbytes, limits);
  unsigned char found[kMostSwapped], both[2 * kMostSwapped];
  if (direct(rank) == nullptr) {
    std::memcpy(both, expected, nbytes);
    std::memcpy(both + nbytes, desired, nbytes);
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kSwap), 0, 0, 0, address, nbytes, 0};
    links_.ask(rank, request, {both, 2 * nbytes}, {static_cast<unsigned char*>(former), nbytes}, true,
               limits);
    return;
  }
  const HeldCell held(*this, rank, limits);
  const auto u8 = DType::kU8;
  update_piece(rank, address, u8, kNoOp, nullptr, found, nbytes);
  if (std::memcmp(found, expected, nbytes) == 0)
    update_piece(rank, address, u8, kReplaceOp, desired, nullptr, nbytes);
  std::memcpy(former, found, nbytes);
}

void Window::flush(int rank, const WindowLimits& limits) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (direct(rank) == nullptr) links_.flush(rank, limits);
  look_after(rank);
}

void Window::flush_all(const WindowLimits& limits) {
  for (const int rank : members_) flush(rank, limits);
}

// ---- locks -----------------------------------------------------------------------------------------

void Window::lock(int rank, bool shared, const WindowLimits& limits) {
  look_after(rank);
  if (direct(rank) == nullptr) {
    const WindowRequest request{
        static_cast<uint32_t>(WindowCall::kLock), 0, 0, shared ? 1u : 0u, 0, 0, limits.timeout};
    links_.ask(rank, request, {}, {}, true, limits);
    return;
  }
  LockAttempt attempt(context_.group, *direct(rank), context_.rank, shared);
  int awaited = rank;
  if (attempt(awaited)) return;
  const CountedWait counted(direct(rank)->waiting);
  wait(awaited, WindowWait::kLock, limits, [&] { return attempt(awaited); });
}

void Window::unlock(int rank, const WindowLimits& limits) {
  flush(rank, limits);
  if (direct(rank) == nullptr) {
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kUnlock), 0, 0, 0, 0, 0, 0};
    links_.ask(rank, request, {}, {}, true, limits);
    return;
  }
  const HeldCell held(*this, rank, limits);
  direct(rank)->drop_lock(context_.rank);
}

void Window::hold(int rank, const WindowLimits& limits) {
  look_after(rank);
  if (direct(rank) != nullptr) return hold_directly(rank, limits);
  const WindowRequest request{static_cast<uint32_t>(WindowCall::kHold), 0, 0, 0, 0, 0, limits.timeout};
  links_.ask(rank, request, {}, {}, true, limits);
}

void Window::release(int rank, const WindowLimits& limits) {
  if (direct(rank) != nullptr) return direct(rank)->let_go(context_.group);
  const WindowRequest request{static_cast<uint32_t>(WindowCall::kRelease), 0, 0, 0, 0, 0, 0};
  links_.ask(rank, request, {}, {}, true, limits);
}

// ---- signals ---------------------------------------------------------------------------------------

void Window::signal(int rank, uint32_t what, const WindowLimits& limits) {
  if (direct(rank) == nullptr) {
    const WindowRequest request{static_cast<uint32_t>(WindowCall::kSignal), 0, 0, what, 0, 0, 0};
    links_.ask(rank, request, {}, {}, false, limits);
    return;
  }
  WindowCell& cell = *direct(rank);
  WindowPeer& mine = cell.peer(context_.rank);
  auto& count = what == kPosted      ? mine.posted
                : what == kCompleted ? mine.completed
                                     : cell.rounds[what - kFirstRound];
  count.fetch_add(1, std::memory_order_seq_cst);  // R1, R2
  notify(context_.group.cell(rank).window_event);
}

// The first rank that has not called this fence, as far as this process sees; otherwise `otherwise`.
int Window::absent(uint64_t fences, int otherwise) {
  for (const int rank : members_)
    if (direct(rank) != nullptr && direct(rank)->fences.load(std::memory_order_relaxed) < fences) return rank;
  return otherwise;
}

// Dissemination: Hensgen, Finkel, Manber, International Journal of Parallel Programming 17, 1988.
void Window::fence(const WindowLimits& limits, bool last) {
  const size_t size = members_.size();
  const auto own_place = static_cast<size_t>(std::ranges::find(members_, context_.rank) - members_.begin());
  const uint64_t turn = ++fences_;
  flush_all(limits);
  own().fences.store(turn, std::memory_order_seq_cst);
  uint32_t round = 0;
  for (size_t distance = 1; distance < size; distance *= 2, ++round) {
    signal(members_[(own_place + distance) % size], kFirstRound + round, limits);
    const int from = members_[(own_place + size - distance) % size];
    const auto& arrived = own().rounds[round];
    int awaited = from;
    uint32_t polls = 0;
    wait(awaited, WindowWait::kFence, limits, [&] {
      if (arrived.load(std::memory_order_seq_cst) >= turn) return true;
      if (!last && ++polls > kPollsBeforeNaming) awaited = absent(turn, from);
      return false;
    });
  }
}

// The others have answered all that this rank asked in the fence, before they may end the window. A rank that
// has passed the last fence frees its cell, and its memory may hold anything. So the fence that looks into
// cells is the one before: nobody passes the last one until all have left that.
void Window::finish(const WindowLimits& limits) {
  fence(limits);
  fence(limits, true);
  for (const int rank : members_)
    if (direct(rank) == nullptr) links_.flush(rank, limits);
}

void Window::post(std::span<const int> ranks, const WindowLimits& limits) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const int rank : ranks) signal(rank, kPosted, limits);
}

void Window::start(std::span<const int> ranks, const WindowLimits& limits) {
  for (int rank : ranks) {
    const uint64_t turn = ++posts_[static_cast<size_t>(rank)];
    const auto& posted = own().peer(rank).posted;
    wait(rank, WindowWait::kPost, limits, [&] { return posted.load(std::memory_order_seq_cst) >= turn; });
  }
}

void Window::complete(std::span<const int> ranks, const WindowLimits& limits) {
  for (const int rank : ranks) flush(rank, limits);
  for (const int rank : ranks) signal(rank, kCompleted, limits);
}

bool Window::completed(std::span<const int> ranks, bool waits, const WindowLimits& limits) {
  for (int rank : ranks) {
    const uint64_t turn = completions_[static_cast<size_t>(rank)] + 1;
    const auto& count = own().peer(rank).completed;
    const auto done = [&] { return count.load(std::memory_order_seq_cst) >= turn; };
    if (waits) wait(rank, WindowWait::kComplete, limits, done);
    if (!waits && !done()) {
      look_after(rank);
      return false;
    }
  }
  for (const int rank : ranks) ++completions_[static_cast<size_t>(rank)];
  return true;
}

// ---- the own memory --------------------------------------------------------------------------------

bool Window::attach(uint64_t address, uint64_t nbytes, const WindowLimits& limits) {
  const HeldCell held(*this, context_.rank, limits);
  return own().attach(address, nbytes);
}

bool Window::detach(uint64_t address, const WindowLimits& limits) {
  const HeldCell held(*this, context_.rank, limits);
  return own().detach(address);
}

}  // namespace unisono
