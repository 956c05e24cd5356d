// What a rank does for those that cannot reach its memory, in the threads of WindowLinks.
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "windows/window.hpp"

namespace unisono {
namespace {

constexpr Nanoseconds kSlice = 20 * kMillisecond;  // bounds the delay of an abort
constexpr int kPolls = 200;

}  // namespace

// Waits in a thread that serves; false: the group has failed, the window has ended, or time is up.
template <class Ready>
bool Window::await_here(Nanoseconds timeout, Ready ready) {
  for (int polls = 0; polls < kPolls; ++polls) {
    if (ready()) return true;
    sched_yield();
  }
  const CountedWait counted(own().waiting);
  const Nanoseconds deadline = to_deadline(std::max<Nanoseconds>(timeout, 0));
  EventCount& event = context_.group.cell(context_.rank).window_event;
  while (!ended_ && !context_.group.aborted() && now_ns() < deadline)
    if (sleep_until(event, std::min(kSlice, deadline - now_ns()), ready)) return true;
  return false;
}

bool Window::serve(int peer, const WindowRequest& request) {
  if (const FrameError bad = check(request); bad.kind != FrameErrorKind::kNone) {
    Fault fault{FaultKind::kBadFrame, context_.rank, peer};
    fault.frame = bad;
    context_.group.abort_with(fault);
    return false;
  }
  WindowReply done{static_cast<uint32_t>(WindowStatus::kDone), -1};
  switch (static_cast<WindowCall>(uint32_t{request.call})) {
    case WindowCall::kLock:
    case WindowCall::kHold:
      done = serve_lock(peer, request);
      break;
    case WindowCall::kUnlock:
      if (!await_here(INT64_MAX, [&] { return own().try_hold(peer); })) return false;
      own().drop_lock(peer);
      own().let_go(context_.group);
      break;
    case WindowCall::kRelease:
      if (own().holder() == peer) own().let_go(context_.group);
      break;
    case WindowCall::kSignal:  // the reply first: whoever sees the signal may end the window
      if (!links_.write(peer, &done, sizeof done)) return false;
      note_signal(peer, request.detail);
      return true;
    default:
      return serve_access(peer, request);
  }
  return links_.write(peer, &done, sizeof done);
}

WindowReply Window::serve_lock(int peer, const WindowRequest& request) {
  LockAttempt attempt(context_.group, own(), peer, request.detail != 0);
  int holder = -1;
  const bool got = await_here(request.timeout_ns, [&] {
    if (request.call == static_cast<uint32_t>(WindowCall::kLock)) return attempt(holder);
    holder = own().holder();
    return own().try_hold(peer);
  });
  return {static_cast<uint32_t>(got ? WindowStatus::kDone : WindowStatus::kLate), got ? -1 : holder};
}

// Puts, gets, updates and swaps.
bool Window::serve_access(int peer, const WindowRequest& request) {
  const auto call = static_cast<WindowCall>(uint32_t{request.call});
  const auto hold = [&] { return await_here(INT64_MAX, [&] { return own().try_hold(peer); }); };
  const size_t nbytes = request.nbytes;
  const size_t arriving = call == WindowCall::kGet ? 0 : call == WindowCall::kSwap ? 2 * nbytes : nbytes;
  const bool changes = dynamic_ && own().holder() != peer;
  if (changes && !hold()) return false;
  const bool inside = own().exposes(request.address, nbytes);
  if (changes) own().let_go(context_.group);
  auto* const target = reinterpret_cast<unsigned char*>(uint64_t{request.address});
  WindowReply reply{static_cast<uint32_t>(inside ? WindowStatus::kDone : WindowStatus::kOutside), -1};
  if (!inside) return links_.skip(peer, arriving) && links_.write(peer, &reply, sizeof reply);
  if (call == WindowCall::kPut)
    return links_.read(peer, target, nbytes) && links_.write(peer, &reply, sizeof reply);
  if (call == WindowCall::kGet)
    return links_.write(peer, &reply, sizeof reply) && links_.write(peer, target, nbytes);
  std::vector<unsigned char>& operand = links_.scratch(peer);
  operand.resize(arriving + nbytes);
  unsigned char* const former = operand.data() + arriving;
  if (!links_.read(peer, operand.data(), arriving) || !hold()) return false;
  if (call == WindowCall::kUpdate) {
    const auto dtype = static_cast<DType>(uint32_t{request.dtype});
    combine(target, dtype, request.op, operand.data(), former, nbytes / itemsize(dtype));
  } else {
    std::memcpy(former, target, nbytes);
    if (std::memcmp(target, operand.data(), nbytes) == 0)
      std::memcpy(target, operand.data() + nbytes, nbytes);
  }
  own().let_go(context_.group);
  const bool fetches = call == WindowCall::kSwap || request.detail != 0;
  return links_.write(peer, &reply, sizeof reply) && (!fetches || links_.write(peer, former, nbytes));
}

void Window::note_signal(int peer, uint32_t what) {
  WindowPeer& theirs = own().peer(peer);
  auto& count = what == kPosted      ? theirs.posted
                : what == kCompleted ? theirs.completed
                                     : own().rounds[what - kFirstRound];
  count.fetch_add(1, std::memory_order_seq_cst);
  notify_sleepers(context_.group.cell(context_.rank).window_event);
}

}  // namespace unisono
