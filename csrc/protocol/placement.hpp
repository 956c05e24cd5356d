// On which cores the ranks of this host run. Waiting well depends on it: to poll for a rank that needs this
// very core is to keep it from running, and three ranks on one core while another has one take half as long
// again.
#pragma once

#include <sched.h>

#include "protocol/world.hpp"

namespace unisono {

class Placement {
 public:
  Placement(World& world, int rank) : world_(world), rank_(rank) {}

  // Lets the others know where this thread is.
  void tell() {
    core_ = sched_getcpu() + 1;
    std::atomic<int32_t>& published = world_.cell(rank_).core;
    if (published.load(std::memory_order_relaxed) != core_) published.store(core_, std::memory_order_relaxed);
  }
  // Whether a rank was last seen on this core.
  bool beside(int rank) const { return world_.cell(rank).core.load(std::memory_order_relaxed) == core_; }
  // Moves this thread to the core with the fewest ranks if this one has two more, among those the caller
  // allows it; afterwards it may run on all of these again, as before. Of the ranks here only the
  // highest rank goes. The system does it too, but lets ranks that never sleep be for some tenths of a
  // second.
  void spread(int64_t now_ns);

 private:
  int ranks_on(int core) const;
  bool foremost_here() const;

  World& world_;
  const int rank_;
  int32_t core_ = 0;
};

}  // namespace unisono
