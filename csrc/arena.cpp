#include "arena.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

namespace unisono {
namespace {

constexpr uint64_t kPage = 4096;  // the first one holds the mark of the process

constexpr uint64_t kHugePage = 2 << 20;

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
uint64_t pages(uint64_t nbytes) { return round_up(nbytes, kPage); }

uint64_t memory_bytes() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

constexpr char kName[] = "unisono-arrays";

// To open just any file of another process may have effects.
bool is_arena(const std::string& path) {
  char target[64];
  const ssize_t length = readlink(path.c_str(), target, sizeof target);
  return length > 0 &&
         std::string_view(target, static_cast<size_t>(length)).starts_with(std::string("/memfd:") + kName);
}

// Pages that are there: in huge pieces where the system gives such memory any, and mapped here already.
bool populate(void* pages, uint64_t nbytes) {
  int failed;
  do failed = madvise(pages, nbytes, MADV_POPULATE_WRITE);
  while (failed != 0 && (errno == EINTR || errno == EAGAIN));
  return failed == 0;
}

bool back(int fd, uint64_t offset, uint64_t nbytes) {
  int failed;
  do failed = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  while (failed == EINTR);
  return failed == 0;
}

struct Kept {
  std::mutex mutex;
  std::shared_ptr<Arena> arena;
  std::atomic<Arena*> made{nullptr};
};

Kept& kept() {
  static Kept& it = *new Kept;  // never destroyed: arrays may outlive everything
  return it;
}

// A fork's child starts without: its parent's arrays are plain memory to it.
void forget_in_children() {
  static const int registered =
      pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); },
                     [] {
                       kept().made = nullptr;
                       new std::shared_ptr<Arena>(std::move(kept().arena));  // kept for those arrays
                       kept().mutex.unlock();
                     });
  (void)registered;
}

}  // namespace

std::shared_ptr<Arena> Arena::own() {
  forget_in_children();
  const std::lock_guard lock(kept().mutex);
  if (!kept().arena) {
    kept().arena.reset(new Arena);
    kept().made = kept().arena.get();
  }
  return kept().arena;
}

Arena* Arena::made() { return kept().made.load(std::memory_order_acquire); }

Arena::Arena() : owner_(getpid()) {
  const auto give_up = [&](const char* what) {
    const int error = errno;
    if (place_.fd >= 0) close(place_.fd);
    throw std::system_error(error, std::generic_category(), what);
  };
  const uint64_t bytes = pages(memory_bytes());
  place_.fd = memfd_create(kName, MFD_CLOEXEC);
  if (place_.fd < 0) give_up("cannot make memory that ranks share");
  if (ftruncate(place_.fd, static_cast<off_t>(bytes)) != 0 || !back(place_.fd, 0, kPage))
    give_up("cannot size the memory that ranks share");
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, place_.fd, 0);
  if (base == MAP_FAILED) give_up("cannot map the memory that ranks share");
  madvise(base, bytes, MADV_HUGEPAGE);
  place_.base = reinterpret_cast<uint64_t>(base);
  place_.bytes = bytes;
  *static_cast<uint64_t*>(base) = identity().mark;
  free_.emplace(kPage, bytes - kPage);
}

Arena::~Arena() {
  munmap(reinterpret_cast<void*>(place_.base), place_.bytes);
  close(place_.fd);
}

void* Arena::take(size_t nbytes) {
  const uint64_t wanted = pages(std::max<uint64_t>(nbytes, 1));
  const uint64_t grain = wanted >= kHugePage ? kHugePage : kPage;
  const std::lock_guard lock(mutex_);
  const auto start = [&](const auto& hole) { return round_up(hole.first, grain); };
  const auto found = std::ranges::find_if(
      free_, [&](const auto& hole) { return start(hole) + wanted <= hole.first + hole.second; });
  if (found == free_.end()) throw std::bad_alloc();
  const auto [offset, length] = *found;
  const uint64_t first = start(*found), rest = offset + length - first - wanted;
  void* const taken = reinterpret_cast<void*>(place_.base + first);
  if (!populate(taken, wanted) && (errno != EINVAL || !back(place_.fd, first, wanted))) {
    punch(first, wanted);
    throw std::bad_alloc();
  }
  free_.erase(found);
  if (first > offset) free_.emplace(offset, first - offset);
  if (rest > 0) free_.emplace(first + wanted, rest);
  return taken;
}

void Arena::give_back(void* pages_taken, size_t nbytes) {
  if (getpid() != owner_) return;
  const uint64_t offset = reinterpret_cast<uint64_t>(pages_taken) - place_.base;
  const uint64_t length = pages(std::max<uint64_t>(nbytes, 1));
  const std::lock_guard lock(mutex_);
  punch(offset, length);
  release(offset, length);
}

void Arena::punch(uint64_t offset, uint64_t nbytes) {
  fallocate(place_.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(nbytes));
}

// Adds a hole, joined with those that touch it.
void Arena::release(uint64_t offset, uint64_t nbytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + nbytes == next->first) {
    nbytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += nbytes;
      return;
    }
  }
  free_.emplace(offset, nbytes);
}

// ---- others' ---------------------------------------------------------------------------------------

// The number of its descriptor may be another file's by now, and its pid another process's: its mark tells.
ArenaView::ArenaView(const Identity& owner, const ArenaPlace& place) : place_(place) {
  if (place.bytes == 0) return;
  if (owner.mark == identity().mark) {  // a thread of this process
    base_ = reinterpret_cast<unsigned char*>(place.base);
    return;
  }
  const std::string path = "/proc/" + std::to_string(owner.pid) + "/fd/" + std::to_string(place.fd);
  if (!is_arena(path)) return;
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  if (lseek(fd, 0, SEEK_END) == static_cast<off_t>(place.bytes)) {
    void* const base = mmap(nullptr, place.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (base != MAP_FAILED) mapped_ = base;
  }
  close(fd);
  if (mapped_ != nullptr && *static_cast<const uint64_t*>(mapped_) == owner.mark)
    base_ = static_cast<unsigned char*>(mapped_);
}

ArenaView::~ArenaView() {
  if (mapped_ != nullptr) munmap(mapped_, place_.bytes);
}

void* ArenaView::at(uint64_t address, size_t nbytes) const {
  const uint64_t offset = address - place_.base;
  if (base_ == nullptr || offset >= place_.bytes || nbytes > place_.bytes - offset) return nullptr;
  return base_ + offset;
}

}  // namespace unisono
