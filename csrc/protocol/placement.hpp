// On which cores the ranks of this host run. Waiting depends on it: a rank that polls for another rank on the
// same core keeps that rank from running. Three ranks on one core and one on another take half as long again
// as two and two.
#pragma once

#include <sched.h>

#include "protocol/group_state.hpp"

namespace unisono {

class Placement {
 public:
  Placement(GroupState& group, int rank) : group_(group), rank_(rank) {}

  // Publishes the core on which this thread runs.
  void publish_core() {
    core_ = sched_getcpu() + 1;
    std::atomic<int32_t>& published = group_.cell(rank_).core;
    if (published.load(std::memory_order_relaxed) != core_) published.store(core_, std::memory_order_relaxed);
  }
  // Whether a rank was last seen on this core.
  bool shares_core_with(int rank) const {
    return group_.cell(rank).core.load(std::memory_order_relaxed) == core_;
  }
  // Moves this thread to the allowed core with the fewest ranks if its own core has at least two more. The
  // thread's affinity is restored afterwards. Only the highest rank on a core moves. The kernel also
  // balances, but leaves threads that never sleep in place for some tenths of a second.
  void spread(int64_t now_ns);

 private:
  int ranks_on(int core) const;
  bool highest_rank_on_core() const;

  GroupState& group_;
  const int rank_;
  int32_t core_ = 0;
};

}  // namespace unisono
