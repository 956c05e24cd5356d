#include "world.hpp"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace unisono {

World::World(std::shared_ptr<Region> region, std::vector<int> places, std::vector<int> hosts,
             const std::vector<int>& pids)
    : region_(std::move(region)),
      places_(std::move(places)),
      hosts_(std::move(hosts)),
      arenas_(places_.size()) {
  const size_t ranks = places_.size();
  if (ranks == 0 || hosts_.size() != ranks || pids.size() != ranks)
    throw std::invalid_argument("places, hosts and pids name every rank once");
  size_t near = 0;
  for (int place : places_) {
    if (place >= static_cast<int>(region_->ranks()))
      throw std::invalid_argument("a rank has no place in the shared memory");
    near += place >= 0;
  }
  if (near < ranks) {
    far_ = std::make_unique<RankCell[]>(ranks);
    alarm_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (alarm_ < 0) throw std::system_error(errno, std::generic_category(), "cannot make an eventfd");
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    cells_.push_back(places_[rank] >= 0 ? &region_->cell(places_[rank]) : &far_[rank]);
    if (places_[rank] < 0) cells_[rank]->pid.store(pids[rank], std::memory_order_relaxed);
  }
}

World::~World() {
  if (alarm_ >= 0) close(alarm_);
}

Reach World::reach(int rank) {
  const RankCell& other = cell(rank);
  Seen& seen = arenas_[static_cast<size_t>(rank)];
  const ArenaView* view = seen.view.load(std::memory_order_acquire);
  if (view == nullptr && other.arena().bytes > 0) {
    const std::lock_guard lock(seeing_);
    if (!seen.kept) seen.kept = ArenaView::of(other.process(), other.arena());
    view = seen.kept.get();
    seen.view.store(view, std::memory_order_release);
  }
  return {other.process(), view};
}

void World::show_arena(int rank) {
  const Arena* const arena = Arena::made();
  if (arena != nullptr && cell(rank).arena().bytes == 0) cell(rank).set_arena(arena->place());
}

bool World::shares_memory() const {
  for (int rank = 0; rank < ranks(); ++rank)
    for (int other = 0; other < rank; ++other)
      if (share_host(rank, other)) return true;
  return false;
}

void World::abort_with(const Fault& fault) {
  AbortCell& cell = abort();
  uint32_t fine = 0;
  if (cell.state.compare_exchange_strong(fine, kAbortBegun, std::memory_order_seq_cst)) write_abort(fault);
}

void World::finish_abort(const Fault& fault) {
  AbortCell& cell = abort();
  uint32_t begun = kAbortBegun;
  if (cell.state.compare_exchange_strong(begun, kAbortTakenOver, std::memory_order_seq_cst))
    write_abort(fault);
}

void World::write_abort(const Fault& fault) {
  AbortCell& cell = abort();
  cell.fault = fault;
  cell.state.store(kAbortWritten, std::memory_order_seq_cst);
  ring_all();
  sound_alarm();
}

CallRecord World::record_of(int rank, uint64_t seq) {
  if (near(rank)) return read_record(cell(rank), seq);
  const std::lock_guard lock(told_);
  return read_record(cell(rank), seq);
}

uint64_t World::find(int rank, uint64_t fingerprint) {
  for (uint64_t slot = 0; slot < kHistory; ++slot) {
    const CallRecord record = record_of(rank, slot);
    if (record.seq != 0 && record.fingerprint == fingerprint) return record.seq;
  }
  return 0;
}

void World::hear(int rank, const Standing& standing) {
  const std::lock_guard lock(told_);
  write_standing(cell(rank), standing);
}

void World::ring_all() {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (!near(rank)) continue;
    ring_slowly(cell(rank).bell);
    ring_slowly(cell(rank).channel_bell);
  }
}

void World::sound_alarm() {
  if (alarm_ < 0) return;
  const uint64_t one = 1;
  (void)!write(alarm_, &one, sizeof one);  // only a counter that is full already refuses
}

void ring_slowly(Bell& bell) {
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&bell.rings), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// ---- standings -------------------------------------------------------------------------------------

void write_record(RankCell& cell, const CallRecord& record) {
  uint64_t words[sizeof record / sizeof(uint64_t)];
  std::memcpy(words, &record, sizeof record);
  auto& slot = cell.history[record.seq % kHistory];
  std::atomic_thread_fence(std::memory_order_release);  // behind the number that makes the old record old
  for (size_t i = 0; i < std::size(words); ++i) slot[i].store(words[i], std::memory_order_relaxed);
}

bool write_remark(RankCell& cell, uint64_t seq, std::string_view text) {
  Remark& remark = cell.remark;
  uint32_t none = 0;
  if (!remark.state.compare_exchange_strong(none, 1)) return false;
  remark.seq = seq;
  remark.text[text.copy(remark.text, kRemarkBytes - 1)] = '\0';
  remark.state.store(2, std::memory_order_release);
  return true;
}

void give_up(Region& region, int place, std::string_view why) {
  constexpr uint64_t kLeaving = UINT64_MAX;
  RankCell& cell = region.cell(place);
  write_remark(cell, kLeaving, why);
  cell.set_process(identity());
  cell.left.store(1, std::memory_order_seq_cst);
  for (int mate = 0; mate < static_cast<int>(region.ranks()); ++mate) {
    ring_slowly(region.cell(mate).bell);
    ring_slowly(region.cell(mate).channel_bell);
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

Standing read_standing(RankCell& cell) {
  Standing standing{};
  standing.finished = cell.finished.load(std::memory_order_acquire);
  standing.started = cell.started.load(std::memory_order_acquire);
  for (uint64_t i = 0; i < kHistory; ++i) standing.history[i] = read_record(cell, i);
  // Its rank may have begun an operation meanwhile: what was being written, or written over, is half of each.
  std::atomic_thread_fence(std::memory_order_acquire);
  const uint64_t next = cell.started.load(std::memory_order_relaxed) + 1;
  for (CallRecord& record : standing.history)
    if (record.seq > standing.started || record.seq + kHistory <= next) record = {};
  if (cell.remark.state.load(std::memory_order_acquire) == 2) {
    standing.remarked = 1;
    standing.remark_seq = cell.remark.seq;
    std::memcpy(standing.remark, cell.remark.text, kRemarkBytes);
  }
  return standing;
}

void write_standing(RankCell& cell, const Standing& standing) {
  const auto raise = [](std::atomic<uint64_t>& held, uint64_t value) {
    uint64_t seen = held.load(std::memory_order_relaxed);
    while (seen < value && !held.compare_exchange_weak(seen, value, std::memory_order_release)) {
    }
  };
  for (const CallRecord& record : standing.history)
    if (record.seq > read_record(cell, record.seq).seq) write_record(cell, record);
  raise(cell.started, standing.started);
  raise(cell.finished, standing.finished);
  if (standing.remarked != 0)
    write_remark(cell, standing.remark_seq, {standing.remark, strnlen(standing.remark, kRemarkBytes)});
}

}  // namespace unisono
