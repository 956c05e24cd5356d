#include "protocol/group_state.hpp"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

namespace unisono {

GroupState::GroupState(std::shared_ptr<Region> region, std::vector<int> region_indices,
                       std::vector<int> hosts, std::vector<int> pids, int rank)
    : region_(std::move(region)),
      region_indices_(std::move(region_indices)),
      hosts_(std::move(hosts)),
      pids_(std::move(pids)),
      own_region_index_(region_indices_.at(static_cast<size_t>(rank))),
      arenas_(region_indices_.size()) {
  const size_t ranks = region_indices_.size();
  if (ranks == 0 || hosts_.size() != ranks || (!pids_.empty() && pids_.size() != ranks))
    throw std::invalid_argument("places, hosts and pids name every rank once");
  if (own_region_index_ < 0) throw std::invalid_argument("a rank has no place in its own host's memory");
  size_t local_ranks = 0;
  for (int index : region_indices_) {
    if (index >= static_cast<int>(region_->ranks()))
      throw std::invalid_argument("a rank has no place in the shared memory");
    local_ranks += index >= 0;
  }
  if (local_ranks < ranks) {
    remote_cells_ = std::make_unique<RankCell[]>(ranks);
    control_event_ = FileDescriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (control_event_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make an eventfd");
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    cells_.push_back(region_indices_[rank] >= 0 ? &region_->cell(region_indices_[rank])
                                                : &remote_cells_[rank]);
  }
}

int GroupState::process_of(int rank) {
  const int joined = cell(rank).pid.load(std::memory_order_relaxed);
  return joined != 0 || pids_.empty() ? joined : pids_[static_cast<size_t>(rank)];
}

int GroupState::member(int64_t rank) const {
  if (rank >= 0 && rank < ranks()) return static_cast<int>(rank);
  throw std::invalid_argument("rank " + std::to_string(rank) + " is not in this group of " +
                              std::to_string(ranks()) + " ranks");
}

PeerMemory GroupState::memory_of(int rank) {
  const RankCell& other = cell(rank);
  PeerArena& seen = arenas_[static_cast<size_t>(rank)];
  const ArenaView* view = seen.view.load(std::memory_order_acquire);
  if (view == nullptr && other.arena().bytes > 0) {
    const std::lock_guard lock(views_mutex_);
    if (!seen.kept) seen.kept = ArenaView::of(other.process(), other.arena());
    view = seen.kept.get();
    seen.view.store(view, std::memory_order_release);
  }
  return {other.process(), view};
}

void GroupState::publish_arena(int rank) {
  const Arena* const arena = Arena::made();
  if (arena != nullptr && cell(rank).arena().bytes == 0) cell(rank).set_arena(arena->location());
}

bool GroupState::shares_memory() const {
  for (int rank = 0; rank < ranks(); ++rank)
    for (int other = 0; other < rank; ++other)
      if (share_host(rank, other)) return true;
  return false;
}

Fault GroupState::fault() const {
  const uint32_t state = region_->abort().state.load(std::memory_order_acquire);  // R1: the fault is whole
  return state == 0 ? Fault{} : region_->cell(static_cast<int>(state) - 1).fault;
}

void GroupState::abort_with(const Fault& fault) {
  const std::lock_guard lock(aborting_);
  if (aborted()) return;  // perhaps by this rank: then other ranks read the fault that stands here
  region_->cell(own_region_index_).fault = fault;
  uint32_t fine = 0;
  const uint32_t found_here = static_cast<uint32_t>(own_region_index_) + 1;
  // Publishes the fault, before this rank's caller can change memory that it has published for zero copy.
  if (!region_->abort().state.compare_exchange_strong(fine, found_here, std::memory_order_seq_cst)) return;
  std::atomic_thread_fence(std::memory_order_release);  // R3
  wake_all();
  wake_control();
}

CallRecord GroupState::record_of(int rank, uint64_t seq) {
  if (on_this_host(rank)) return read_record(cell(rank), seq);
  const std::lock_guard lock(remote_status_mutex_);
  return read_record(cell(rank), seq);
}

uint64_t GroupState::find(int rank, uint64_t fingerprint) {
  for (uint64_t slot = 0; slot < kHistory; ++slot) {
    const CallRecord record = record_of(rank, slot);
    if (record.seq != 0 && record.fingerprint == fingerprint) return record.seq;
  }
  return 0;
}

void GroupState::take_status(int rank, const RankStatus& status) {
  const std::lock_guard lock(remote_status_mutex_);
  write_status(cell(rank), status);
}

RankStatus GroupState::status_of(int rank) {
  if (on_this_host(rank)) return read_status(cell(rank));
  const std::lock_guard lock(remote_status_mutex_);
  return read_status(cell(rank));
}

void GroupState::wake_all() {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (!on_this_host(rank)) continue;
    notify_sleepers(cell(rank).collective_event);
    notify_sleepers(cell(rank).message_event);
    notify_sleepers(cell(rank).membership_event);
    notify_sleepers(cell(rank).window_event);
  }
}

void GroupState::propose(int rank, std::span<const unsigned char> bytes) {
  if (bytes.size() > kProposalBytes) throw std::invalid_argument("a proposal has at most 896 bytes");
  ProposalSlots& proposal = cell(rank).proposal;
  const uint64_t version = proposal.version.load(std::memory_order_relaxed) + 1;  // R4
  auto& words = proposal.words[version % 2];
  std::atomic_thread_fence(std::memory_order_release);  // R3: the proposal before the last becomes invalid
  proposal.nbytes[version % 2].store(bytes.size(), std::memory_order_relaxed);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof word, bytes.size() - at));
    words[at / sizeof word].store(word, std::memory_order_relaxed);
  }
  proposal.version.store(version, std::memory_order_seq_cst);  // R1; R2
  notify(cell(rank).membership_event);
}

uint64_t GroupState::proposal_of(int rank, std::vector<unsigned char>& bytes) {
  const ProposalSlots& proposal = cell(rank).proposal;
  for (;;) {
    const uint64_t version = proposal.version.load(std::memory_order_seq_cst);
    const size_t nbytes =
        std::min<size_t>(proposal.nbytes[version % 2].load(std::memory_order_relaxed), kProposalBytes);
    uint64_t words[kProposalBytes / sizeof(uint64_t)];
    for (size_t i = 0; i * sizeof(uint64_t) < nbytes; ++i)
      words[i] = proposal.words[version % 2][i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (proposal.version.load(std::memory_order_relaxed) != version) continue;  // R3
    const auto* const first = reinterpret_cast<const unsigned char*>(words);
    bytes.assign(first, first + nbytes);
    return version;
  }
}

Fate GroupState::settle(int rank, Fate fate) {
  auto found = static_cast<uint32_t>(Fate::kOpen);
  std::atomic<uint32_t>& held = cell(rank).fate;
  if (fate == Fate::kOpen) return static_cast<Fate>(held.load(std::memory_order_seq_cst));
  if (held.compare_exchange_strong(found, static_cast<uint32_t>(fate), std::memory_order_seq_cst))
    return fate;
  return static_cast<Fate>(found);
}

bool GroupState::await_proposal(int rank, uint64_t known, int64_t slice) {
  return sleep_until(cell(rank).membership_event, slice, [&] { return proposal_version(rank) != known; });
}

void GroupState::wake_control() {
  if (control_event_ < 0) return;
  const uint64_t one = 1;
  (void)!write(control_event_, &one,
               sizeof one);  // fails only where the counter is full, which wakes as well
}

void sleep_on(EventCount& event, uint32_t epoch, int64_t slice) {
  const timespec timeout{slice / 1'000'000'000LL, slice % 1'000'000'000LL};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&event.epoch), FUTEX_WAIT, epoch, &timeout, nullptr, 0);
}

void notify_sleepers(EventCount& event) {
  event.epoch.fetch_add(1,
                        std::memory_order_seq_cst);  // first: a thread that is about to sleep then does not
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&event.epoch), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// ---- status of a rank ------------------------------------------------------------------------------

void write_record(RankCell& cell, const CallRecord& record) {
  uint64_t words[sizeof record / sizeof(uint64_t)];
  std::memcpy(words, &record, sizeof record);
  auto& slot = cell.history[record.seq % kHistory];
  std::atomic_thread_fence(std::memory_order_release);  // R3: after `started` has made the old record invalid
  for (size_t i = 0; i < std::size(words); ++i) slot[i].store(words[i], std::memory_order_relaxed);
}

bool write_report(RankCell& cell, uint64_t seq, std::string_view text) {
  if (!claim_report(cell)) return false;
  publish_report(cell, seq, text);
  return true;
}

bool claim_report(RankCell& cell) {
  uint32_t none = 0;
  return cell.report.state.compare_exchange_strong(none, 1);
}

void publish_report(RankCell& cell, uint64_t seq, std::string_view text) {
  RankReport& report = cell.report;
  report.seq = seq;
  report.text[text.copy(report.text, kReportBytes - 1)] = '\0';
  report.state.store(2, std::memory_order_release);
}

void give_up(Region& region, int index, std::string_view why) {
  RankCell& cell = region.cell(index);
  write_report(cell, kLeaving, why);
  cell.set_process(identity());
  cell.left.store(1, std::memory_order_seq_cst);
  for (int index = 0; index < static_cast<int>(region.ranks()); ++index) {
    notify_sleepers(region.cell(index).collective_event);
    notify_sleepers(region.cell(index).message_event);
  }
}

CallRecord read_record(const RankCell& cell, uint64_t seq) {
  const auto& slot = cell.history[seq % kHistory];
  uint64_t words[sizeof(CallRecord) / sizeof(uint64_t)];
  for (size_t i = 0; i < std::size(words); ++i) words[i] = slot[i].load(std::memory_order_relaxed);
  CallRecord record;
  std::memcpy(&record, words, sizeof record);
  return record;
}

RankStatus read_status(RankCell& cell) {
  RankStatus status{};
  status.finished = cell.finished.load(std::memory_order_acquire);  // before `started`: never above it
  status.started = cell.started.load(std::memory_order_acquire);
  for (uint64_t i = 0; i < kHistory; ++i) status.history[i] = read_record(cell, i);
  // R3. The rank may have begun an operation meanwhile: a record that it was writing is torn, and is dropped.
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t next = cell.started.load(std::memory_order_relaxed) + 1;
  for (CallRecord& record : status.history)
    if (record.seq > status.started || record.seq + kHistory <= next) record = {};
  if (cell.report.state.load(std::memory_order_acquire) == 2) {
    status.has_report = 1;
    status.report_seq = cell.report.seq;
    std::memcpy(status.report, cell.report.text, kReportBytes);
  }
  return status;
}

void write_status(RankCell& cell, const RankStatus& status) {
  const auto raise = [](std::atomic<uint64_t>& held, uint64_t value) {
    uint64_t seen = held.load(std::memory_order_relaxed);
    while (seen < value && !held.compare_exchange_weak(seen, value, std::memory_order_release)) {
    }
  };
  for (const CallRecord& record : status.history)
    if (record.seq > read_record(cell, record.seq).seq) write_record(cell, record);
  raise(cell.started, status.started);
  raise(cell.finished, status.finished);
  if (status.has_report != 0)
    write_report(cell, status.report_seq, {status.report, strnlen(status.report, kReportBytes)});
}

}  // namespace unisono
