#include "protocol/placement.hpp"

namespace unisono {
namespace {

// The shortest time between two moves. Another busy process makes the kernel move ranks back; more moves
// would only fight against it.
constexpr int64_t kRestNs = 10'000'000;

}  // namespace

int Placement::ranks_on(int core) const {
  int count = 0;
  for (int rank = 0; rank < group_.ranks(); ++rank)
    count += group_.cell(rank).core.load(std::memory_order_relaxed) == core;
  return count;
}

bool Placement::highest_rank_on_core() const {
  for (int rank = rank_ + 1; rank < group_.ranks(); ++rank)
    if (shares_core_with(rank)) return false;
  return true;
}

void Placement::spread(int64_t now_ns) {
  std::atomic<int64_t>& moved_ns = group_.cell(rank_).moved_ns;
  if (now_ns < moved_ns.load(std::memory_order_relaxed) + kRestNs || !highest_rank_on_core()) return;
  int target = 0, fewest = ranks_on(core_) - 1;
  cpu_set_t allowed;
  if (fewest < 1 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int core = 1; core <= CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core - 1, &allowed)) continue;
    const int count = ranks_on(core);
    if (count >= fewest) continue;
    fewest = count;
    target = core;
  }
  if (target == 0) return;
  moved_ns.store(now_ns, std::memory_order_relaxed);
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(target - 1, &only);
  if (sched_setaffinity(0, sizeof only, &only) != 0) return;
  // Restore the affinity, unless another process has changed it meanwhile. This fails only where the thread
  // may run on none of these cores any more: then the kernel has already chosen others.
  cpu_set_t now_allowed;
  if (sched_getaffinity(0, sizeof now_allowed, &now_allowed) == 0 && CPU_EQUAL(&now_allowed, &only))
    sched_setaffinity(0, sizeof allowed, &allowed);
  publish_core();
}

}  // namespace unisono
