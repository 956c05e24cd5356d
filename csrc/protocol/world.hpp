// The ranks of a group as one of them sees them: those on its host in the memory they share, the others
// in cells of its own, which hold what they have reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "protocol/region.hpp"

namespace unisono {

// The number of a remark of why its rank leaves, or left a wait.
constexpr uint64_t kLeaving = UINT64_MAX;

// What a rank tells of itself: where it stands, and its newest operations.
struct RankStatus {
  uint64_t started, finished;
  CallRecord history[kHistory];
  uint32_t remarked;  // whether it has said the following
  uint64_t remark_seq;
  char remark[kRemarkBytes];
};

class World {
 public:
  // places[rank]: the number of that rank in `region`, or -1 when it is on another host. hosts[rank]: a
  // number that two ranks share when their host is one. pids[rank]: of those on other hosts. rank: this one.
  World(std::shared_ptr<Region> region, std::vector<int> places, std::vector<int> hosts,
        const std::vector<int>& pids, int rank);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int ranks() const { return static_cast<int>(cells_.size()); }
  // The rank, which has to be one of the group: throws std::invalid_argument. Whatever comes from outside and
  // names a rank goes through here.
  int member(int64_t rank) const;
  bool near(int rank) const { return places_[static_cast<size_t>(rank)] >= 0; }
  bool spans_hosts() const { return far_ != nullptr; }
  bool share_host(int one, int other) const {
    return hosts_[static_cast<size_t>(one)] == hosts_[static_cast<size_t>(other)];
  }
  // Whether any two ranks of the group share a host.
  bool shares_memory() const;
  int place(int rank) const { return places_[static_cast<size_t>(rank)]; }
  RankCell& cell(int rank) { return *cells_[static_cast<size_t>(rank)]; }
  Region& region() { return *region_; }

  bool aborted() const { return region_->abort().state.load(std::memory_order_seq_cst) != 0; }
  // Why; of kind kNone: the group is not aborted.
  Fault fault() const;
  // Aborts the group, unless another rank has, and wakes all ranks of this host.
  void abort_with(const Fault& fault);
  // Wakes every sleeper on this host.
  void wake_all();
  // What is known of an operation of `rank`. Of its host's ranks possibly half of it and half of another one.
  CallRecord record_of(int rank, uint64_t seq);
  // The number of the operation of `rank` that has this fingerprint, or 0: none that is remembered.
  uint64_t find(int rank, uint64_t fingerprint);
  // Stores the status that a rank of another host sent; several threads of this process receive them.
  void take_status(int rank, const RankStatus& standing);
  // Where a rank stands, and its newest operations.
  RankStatus status_of(int rank);
  // How this process gets at the memory of a rank of this host; maps its arena once that is published.
  PeerMemory memory_of(int rank);
  // Publishes this process's arena, if it has one: before a message, or a place for one, is published.
  void publish_arena(int rank);
  // Readable when the abort cell was written by this process; -1 when there are no other hosts.
  int control_event() const { return control_event_; }
  void wake_control();

 private:
  const std::shared_ptr<Region> region_;
  const std::vector<int> places_, hosts_;
  const int own_place_;
  std::mutex aborting_;  // guards this rank's `fault` until the abort cell names it
  std::unique_ptr<RankCell[]> far_;
  std::vector<RankCell*> cells_;
  int control_event_ = -1;
  std::mutex remote_status_mutex_;  // guards the histories in far_
  std::mutex views_mutex_;
  struct PeerArena {
    std::atomic<const ArenaView*> view{nullptr};
    std::shared_ptr<const ArenaView> kept;  // guarded by views_mutex_
  };
  std::vector<PeerArena> arenas_;  // by rank
};

// Wakes every sleeper on the event count of a rank of this host. Call after the store that makes its
// condition true; both that store and the sleeper's are sequentially consistent, so that one sees the other
// (R2).
void notify_sleepers(EventCount& event);
inline void notify(EventCount& event) {
  if (event.sleepers.load(std::memory_order_seq_cst) != 0) notify_sleepers(event);
}

RankStatus read_status(RankCell& cell);
// Stores the status that another rank sent, unless a newer one is known.
void write_status(RankCell& cell, const RankStatus& standing);
void write_record(RankCell& cell, const CallRecord& record);
// Only the first remark counts; whether this is it.
bool write_remark(RankCell& cell, uint64_t seq, std::string_view text);
// This process's rank in that place has failed before it had an engine: for the others it has left.
void give_up(Region& region, int place, std::string_view why);
CallRecord read_record(const RankCell& cell, uint64_t seq);

}  // namespace unisono
