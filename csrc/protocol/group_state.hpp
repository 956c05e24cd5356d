// The ranks of a group as one of them sees them: ranks of its host in the memory they share, remote ranks in
// private cells, which hold what those ranks have reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "protocol/region.hpp"

namespace unisono {

// The `seq` of a report that says why its rank leaves, or has left a wait.
constexpr uint64_t kLeaving = UINT64_MAX;
// The same where it says at which line a late rank is.
constexpr uint64_t kLocated = UINT64_MAX - 1;

// What a rank reports about itself: its progress, and its newest operations.
struct RankStatus {
  uint64_t started, finished;
  CallRecord history[kHistory];
  uint32_t has_report;  // whether the report is set
  uint64_t report_seq;
  char report[kReportBytes];
};

class GroupState {
 public:
  // places[rank]: the index of that rank in `region`, or -1 when it is on another host. hosts[rank]: a number
  // that is equal for ranks of one host. pids[rank]: its process; empty: unknown. rank: this rank.
  GroupState(std::shared_ptr<Region> region, std::vector<int> region_indices, std::vector<int> hosts,
             std::vector<int> pids, int rank);
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  int ranks() const { return static_cast<int>(cells_.size()); }
  // Checks a rank of the group and returns it; throws std::invalid_argument. Every rank number from outside
  // the engine goes through here.
  int member(int64_t rank) const;
  bool on_this_host(int rank) const { return region_indices_[static_cast<size_t>(rank)] >= 0; }
  bool spans_hosts() const { return remote_cells_ != nullptr; }
  bool share_host(int one, int other) const {
    return hosts_[static_cast<size_t>(one)] == hosts_[static_cast<size_t>(other)];
  }
  // Whether any two ranks of the group share a host.
  bool shares_memory() const;
  int region_index(int rank) const { return region_indices_[static_cast<size_t>(rank)]; }
  RankCell& cell(int rank) { return *cells_[static_cast<size_t>(rank)]; }
  // The pid of a rank, also before it has made its engine; 0: unknown.
  int process_of(int rank);
  Region& region() { return *region_; }
  const std::shared_ptr<Region>& shared_region() const { return region_; }

  bool aborted() const { return region_->abort().state.load(std::memory_order_seq_cst) != 0; }
  // The fault that aborted the group; kind kNone: it is not aborted.
  Fault fault() const;
  // Aborts the group, unless another rank has, and wakes all ranks of this host.
  void abort_with(const Fault& fault);
  // The same, and throws the fault that counts.
  [[noreturn]] void fail(const Fault& fault_here) {
    abort_with(fault_here);
    throw fault();
  }
  // Whether a wait also ends because a rank is stopped, or does not answer: the group can go on without it.
  bool elastic() const { return elastic_.load(std::memory_order_relaxed); }
  void set_elastic(bool elastic) { elastic_.store(elastic, std::memory_order_relaxed); }
  // Wakes every sleeper on this host.
  void wake_all();
  // The record of an operation of `rank`. For ranks of this host it may be torn: half of it belongs to
  // another operation.
  CallRecord record_of(int rank, uint64_t seq);
  // The number of the remembered operation of `rank` with this fingerprint, or 0.
  uint64_t find(int rank, uint64_t fingerprint);
  // Stores the status that a rank of another host sent; several threads of this process receive them.
  void take_status(int rank, const RankStatus& status);
  RankStatus status_of(int rank);
  // Stores a proposal of `rank`: of this one, or, in the control thread, of one of another host; wakes those
  // that wait for it.
  void propose(int rank, std::span<const unsigned char> bytes);
  // Reads the newest proposal of `rank` and returns its version; 0: it has made none.
  uint64_t proposal_of(int rank, std::vector<unsigned char>& bytes);
  // What became of a rank of this host, after an attempt to change it from kOpen.
  Fate settle(int rank, Fate fate);
  // Whether this rank was stopped or late, and the others have gone on: they use their memory again, so what
  // this rank has read of it since is worth nothing.
  bool evicted() {
    return aborted() &&
           own_cell().fate.load(std::memory_order_seq_cst) == static_cast<uint32_t>(Fate::kEvicted);
  }
  // The version of the newest proposal of `rank`; 0: it has made none.
  uint64_t proposal_version(int rank) const {
    return cells_[static_cast<size_t>(rank)]->proposal.version.load(std::memory_order_seq_cst);
  }
  // Sleeps until `rank` has a proposal of another version than `known`, or `slice` has passed; whether it
  // has.
  bool await_proposal(int rank, uint64_t known, int64_t slice);
  // How this process accesses the memory of a rank of this host; maps its arena once that is published.
  PeerMemory memory_of(int rank);
  // Publishes this process's arena, if it has one. Call before a message, or a target for one, is published.
  void publish_arena(int rank);
  // Readable when the abort cell was written by this process; -1 when there are no other hosts.
  int control_event() const { return control_event_; }
  void wake_control();

 private:
  RankCell& own_cell() { return region_->cell(own_region_index_); }

  const std::shared_ptr<Region> region_;
  const std::vector<int> region_indices_, hosts_, pids_;
  const int own_region_index_;
  std::atomic<bool> elastic_{false};
  std::mutex aborting_;  // guards this rank's `fault` until the abort cell names it
  std::unique_ptr<RankCell[]> remote_cells_;
  std::vector<RankCell*> cells_;
  FileDescriptor control_event_;
  std::mutex remote_status_mutex_;  // guards the histories in remote_cells_
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

// Sleeps until the event is notified, its epoch differs from `epoch`, or `slice` has passed.
void sleep_on(EventCount& event, uint32_t epoch, int64_t slice);
// The same, unless `ready` holds already; whether it holds afterwards.
template <class Ready>
bool sleep_until(EventCount& event, int64_t slice, Ready ready) {
  const uint32_t epoch = event.epoch.load(std::memory_order_seq_cst);
  event.sleepers.fetch_add(1, std::memory_order_seq_cst);  // R2, with what `ready` loads
  bool done = ready();
  if (!done) {
    sleep_on(event, epoch, slice);
    done = ready();
  }
  event.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return done;
}

RankStatus read_status(RankCell& cell);
// Stores the status that another rank sent, unless a newer one is known.
void write_status(RankCell& cell, const RankStatus& status);
void write_record(RankCell& cell, const CallRecord& record);
// Only the first report of a rank is stored; returns whether this is it.
bool write_report(RankCell& cell, uint64_t seq, std::string_view text);
// Its two halves: whether this caller is the one to write it, and the text.
bool claim_report(RankCell& cell);
void publish_report(RankCell& cell, uint64_t seq, std::string_view text);
// Call when this process's rank fails before it has an engine: the other ranks see that it has left, and why.
void give_up(Region& region, int index, std::string_view why);
CallRecord read_record(const RankCell& cell, uint64_t seq);

}  // namespace unisono
