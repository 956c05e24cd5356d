#include "protocol/arena.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace unisono {
namespace {

constexpr uint64_t kHugePage = 2 << 20;  // the first one holds the token of the process
constexpr char kName[] = "unisono-arrays";

uint64_t page_bytes() {
  static const auto bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t round_down(uint64_t value, uint64_t multiple) { return value / multiple * multiple; }
uint64_t round_up(uint64_t value, uint64_t multiple) { return round_down(value + multiple - 1, multiple); }
uint64_t pages(uint64_t nbytes) { return round_up(std::max<uint64_t>(nbytes, 1), page_bytes()); }

uint64_t memory_bytes() {
  return round_up(static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes(), kHugePage);
}

// Maps the file without access, and excludes it from core dumps.
void* reserve(int fd, uint64_t nbytes) {
  void* const base = mmap(nullptr, nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base != MAP_FAILED) madvise(base, nbytes, MADV_DONTDUMP);
  return base;
}

struct ProcessArenas {
  std::mutex mutex;
  std::shared_ptr<Arena> arena;
  std::atomic<Arena*> made{nullptr};
  std::mutex seeing;
  std::map<uint64_t, std::weak_ptr<const ArenaView>> views;  // by the token of the owner; guarded by `seeing`
};

ProcessArenas& process_arenas() {
  static ProcessArenas& it = *new ProcessArenas;  // never destroyed: arrays may outlive everything
  return it;
}

// A forked child starts without an arena: its parent's arrays are ordinary memory in it. It has no views
// either: they are not mapped in the child.
void look_after_forks() {
  static const int registered = pthread_atfork(
      [] {
        process_arenas().mutex.lock();
        process_arenas().seeing.lock();
        if (process_arenas().arena) process_arenas().arena->before_fork();
      },
      [] {
        process_arenas().seeing.unlock();
        if (process_arenas().arena) process_arenas().arena->after_fork();
        process_arenas().mutex.unlock();
      },
      [] {
        if (process_arenas().arena) {
          process_arenas().arena->become_private();
          process_arenas().arena->after_fork();
        }
        process_arenas().views.clear();
        process_arenas().seeing.unlock();
        process_arenas().made = nullptr;
        never_free(std::move(process_arenas().arena));  // the parent's arrays still use its mapping
        process_arenas().mutex.unlock();
      });
  (void)registered;
}

}  // namespace

std::shared_ptr<Arena> Arena::own() {
  look_after_forks();
  const std::lock_guard lock(process_arenas().mutex);
  if (!process_arenas().arena) {
    process_arenas().arena.reset(new Arena);
    process_arenas().made.store(process_arenas().arena.get(), std::memory_order_release);
  }
  return process_arenas().arena;
}

Arena* Arena::made() { return process_arenas().made.load(std::memory_order_acquire); }

Arena::Arena() : owner_(getpid()) {
  const auto give_up = [&](const char* what) {
    const int error = errno;
    if (location_.base != 0) munmap(at(0), location_.bytes);
    if (location_.fd >= 0) close(location_.fd);
    throw std::system_error(error, std::generic_category(), what);
  };
  const uint64_t bytes = memory_bytes();
  free_.emplace(kHugePage, bytes - kHugePage);  // first: it may throw
  struct stat info;
  location_.fd = memfd_create(kName, MFD_CLOEXEC);
  if (location_.fd < 0 || fstat(location_.fd, &info) != 0) give_up("cannot make memory that ranks share");
  if (ftruncate(location_.fd, static_cast<off_t>(bytes)) != 0)
    give_up("cannot size the memory that ranks share");
  void* const base = reserve(location_.fd, bytes);
  if (base == MAP_FAILED) give_up("cannot map the memory that ranks share");
  location_.base = reinterpret_cast<uint64_t>(base);
  location_.bytes = bytes;
  device_ = info.st_dev;
  inode_ = info.st_ino;
  madvise(base, bytes, MADV_HUGEPAGE);
  if (!populate(0, page_bytes())) give_up("no memory that ranks share");
  *static_cast<uint64_t*>(base) = identity().token;
}

Arena::~Arena() {
  munmap(at(0), location_.bytes);
  if (has_file()) close(location_.fd);
}

// Makes the range accessible and allocates its pages, huge ones where the system has them for shared memory.
bool Arena::populate(uint64_t offset, uint64_t nbytes) {
  if (mprotect(at(offset), nbytes, PROT_READ | PROT_WRITE) != 0) return false;
  int failed;
  do failed = madvise(at(offset), nbytes, MADV_POPULATE_WRITE);
  while (failed != 0 && errno == EINTR);
  if (failed == 0 || errno != EINVAL) return failed == 0;
  if (!has_file()) return false;  // Linux before 5.14 needs the descriptor
  do failed = posix_fallocate(location_.fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  while (failed == EINTR);
  return failed == 0;
}

// Returns the pages to the system, and removes access to the range.
void Arena::empty(uint64_t offset, uint64_t nbytes) noexcept {
  constexpr int kPunch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  const bool gone = madvise(at(offset), nbytes, MADV_REMOVE) == 0;
  if (!gone && has_file())  // the memory is locked
    fallocate(location_.fd, kPunch, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  madvise(at(offset), nbytes, MADV_DONTDUMP);
  mprotect(at(offset), nbytes, PROT_NONE);
}

// The program may have closed the descriptor, and its number may belong to another file now.
bool Arena::has_file() const {
  struct stat info;
  return fstat(location_.fd, &info) == 0 && info.st_dev == device_ && info.st_ino == inode_;
}

void* Arena::take(size_t nbytes) {
  if (nbytes > location_.bytes) throw std::bad_alloc();
  const uint64_t wanted = pages(nbytes), grain = wanted >= kHugePage ? kHugePage : page_bytes();
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(free_, [&](const auto& hole) {
    const uint64_t start = round_up(hole.first, grain), end = hole.first + hole.second;
    return start < end && wanted <= end - start;
  });
  if (found == free_.end()) throw std::bad_alloc();
  const auto [offset, length] = *found;
  const uint64_t first = round_up(offset, grain), rest = offset + length - first - wanted;
  Pieces spare{{first, wanted}, {first + wanted, rest}};  // map nodes first: nothing throws after `populate`
  if (!populate(first, wanted)) {
    empty(first, wanted);
    throw std::bad_alloc();
  }
  madvise(at(first), wanted, MADV_DODUMP);
  taken_.insert(spare.extract(first));
  if (rest > 0) free_.insert(spare.extract(first + wanted));
  if (first > offset)
    found->second = first - offset;
  else
    free_.erase(found);
  return at(first);
}

void Arena::give_back(void* taken) noexcept {
  if (getpid() != owner_) return;
  const uint64_t offset = reinterpret_cast<uint64_t>(taken) - location_.base;
  const std::lock_guard lock(mutex_);
  Pieces::node_type piece = taken_.extract(offset);
  empty(piece.key(), piece.mapped());
  release(std::move(piece));
}

// Adds a piece to the free ones, merged with its neighbours.
void Arena::release(Pieces::node_type piece) noexcept {
  auto next = free_.lower_bound(piece.key());
  if (next != free_.end() && piece.key() + piece.mapped() == next->first) {
    piece.mapped() += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == piece.key()) {
      before->second += piece.mapped();
      return;
    }
  }
  free_.insert(std::move(piece));
}

// A forked child must not write into its parent's arrays, nor several children into one. Pages that the child
// has not written to are still the parent's, which may change or free them.
void Arena::become_private() {
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (!has_file()) return;
  for (const auto& [offset, nbytes] : taken_)
    mmap(at(offset), nbytes, PROT_READ | PROT_WRITE, kFlags, location_.fd, static_cast<off_t>(offset));
}

// ---- ArenaView -------------------------------------------------------------------------------------

namespace {

// Opening an arbitrary file of another process may have side effects, so the link is checked first.
bool is_arena(const std::string& path) {
  char target[64];
  const ssize_t length = readlink(path.c_str(), target, sizeof target);
  return length > 0 &&
         std::string_view(target, static_cast<size_t>(length)).starts_with(std::string("/memfd:") + kName);
}

}  // namespace

std::shared_ptr<const ArenaView> ArenaView::of(const ProcessIdentity& owner, const ArenaLocation& location) {
  look_after_forks();
  const std::lock_guard lock(process_arenas().seeing);
  std::erase_if(process_arenas().views, [](const auto& one) { return one.second.expired(); });
  std::weak_ptr<const ArenaView>& known = process_arenas().views[owner.token];
  std::shared_ptr<const ArenaView> view = known.lock();
  if (!view) known = view = std::shared_ptr<const ArenaView>(new ArenaView(owner, location));
  return view;
}

// Made for this process's own arena, too, where ranks are threads: a view can read memory that its owner has
// given back.
ArenaView::ArenaView(const ProcessIdentity& owner, const ArenaLocation& location)
    : location_(location), process_(getpid()) {
  const std::string path = "/proc/" + std::to_string(owner.pid) + "/fd/" + std::to_string(location.fd);
  if (!is_arena(path)) return;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void* base = MAP_FAILED;
  if (lseek(fd, 0, SEEK_END) == static_cast<off_t>(location.bytes)) base = reserve(fd, location.bytes);
  close(fd);
  if (base == MAP_FAILED) return;
  madvise(base, location.bytes, MADV_DONTFORK);
  base_ = static_cast<unsigned char*>(base);
  if (shows(owner)) return;
  munmap(base, location.bytes);
  base_ = nullptr;
}

// A forked child does not have the mapping: other memory may be at this address.
ArenaView::~ArenaView() {
  if (base_ != nullptr && getpid() == process_) munmap(base_, location_.bytes);
}

// The descriptor number may belong to another arena by now, and the pid to another process. The token
// decides.
bool ArenaView::shows(const ProcessIdentity& owner) const {
  return widen(0, sizeof owner.token) && *reinterpret_cast<const uint64_t*>(base_) == owner.token;
}

// Extends the accessible range so that it contains [first, last).
bool ArenaView::widen(uint64_t first, uint64_t last) const {
  const std::lock_guard lock(widening_);
  const uint64_t low = low_.load(std::memory_order_relaxed), high = high_.load(std::memory_order_relaxed);
  first = round_down(high > 0 ? std::min(first, low) : first, kHugePage);
  last = std::min(std::max(round_up(last, kHugePage), high), location_.bytes);
  if (mprotect(base_ + first, last - first, PROT_READ | PROT_WRITE) != 0) return false;
  low_.store(first, std::memory_order_release);
  high_.store(last, std::memory_order_release);
  return true;
}

}  // namespace unisono
