#include "protocol/region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "protocol/region_layout.hpp"

namespace unisono {
namespace {

// Limits within which the layout does not overflow.
constexpr uint32_t kMostRanks = 1 << 16;
constexpr size_t kMostStaging = size_t{1} << 40;

size_t whole_pages(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

struct RegionLayout {
  size_t cells, fifos, channels, staging, rings, end;
  RegionLayout(size_t ranks, size_t staging_bytes) {
    cells = whole_pages(sizeof(RegionHeader));
    fifos = cells + whole_pages(ranks * sizeof(RankCell));
    channels = fifos + whole_pages(ranks * ranks * sizeof(Fifo));
    staging = channels + whole_pages(ranks * ranks * sizeof(Channel));
    rings = staging + ranks * staging_bytes;
    end = rings + ranks * ranks * channel_bytes_of(ranks);
  }
};

// Allocates the pages of a part of a file, in steps: in older kernels a signal undoes the step under way.
int back(int fd, size_t start, size_t nbytes) {
  constexpr size_t kStepBytes = 4 << 20;
  for (const size_t end = start + nbytes; start < end;) {
    const size_t step = std::min(kStepBytes, end - start);
    const int failed = posix_fallocate(fd, static_cast<off_t>(start), static_cast<off_t>(step));
    if (failed == 0)
      start += step;
    else if (failed != EINTR)
      return failed;
  }
  return 0;
}

std::system_error no_memory(int failed, size_t nbytes) {
  return {failed, std::generic_category(),
          "cannot allocate " + std::to_string(nbytes) +
              " bytes of shared memory; lower UNISONO_STAGING_BYTES, or run fewer ranks on this host"};
}

// Lengthens the file and allocates the pages that no rank allocates for itself: see back_rank, back_fifo and
// back_channel. Several ranks may do so at once: a file never becomes shorter.
void allocate(int fd, size_t start, uint32_t ranks, const RegionLayout& layout) {
  struct stat info;
  if (fstat(fd, &info) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot size the shared memory");
  const auto end = static_cast<off_t>(start + layout.end);
  // Not ftruncate, which could shorten it again behind another rank's next region.
  if (const int failed = info.st_size >= end ? 0 : back(fd, start + layout.end - kPageBytes, kPageBytes);
      failed != 0)
    throw std::system_error(failed, std::generic_category(), "cannot size the shared memory");
  const size_t eager = ranks <= kEagerRanks ? layout.channels : layout.fifos;
  if (const int failed = back(fd, start, eager); failed != 0) throw no_memory(failed, eager);
}

}  // namespace

size_t Region::bytes_needed(uint32_t ranks, size_t staging_bytes) {
  return RegionLayout(ranks, staging_bytes).end;
}

Region::Region(int fd, uint32_t ranks, size_t staging_bytes, bool create)
    : Region(FileDescriptor(fd), 0, ranks, staging_bytes, create ? Maker::kFirst : Maker::kNone) {}

Region::Region(FileDescriptor fd, size_t start, uint32_t ranks, size_t staging_bytes, Maker maker)
    : fd_(std::move(fd)),
      start_(start),
      ranks_(ranks),
      staging_bytes_(staging_bytes),
      channel_bytes_(channel_bytes_of(ranks)) {
  if (ranks == 0 || ranks > kMostRanks)
    throw std::invalid_argument("a group has 1 to " + std::to_string(kMostRanks) + " ranks on a host");
  if (staging_bytes < 16 * kPageBytes || staging_bytes > kMostStaging || staging_bytes % kPageBytes != 0)
    throw std::invalid_argument("staging memory must be a multiple of 4096, from 65536 bytes to 2^40");
  const RegionLayout layout(ranks, staging_bytes);
  bytes_ = layout.end;
  if (fd_ >= 0 && maker != Maker::kNone) allocate(fd_, start, ranks, layout);
  struct stat info;
  if (fd_ >= 0 && (fstat(fd_, &info) != 0 || static_cast<size_t>(info.st_size) < start + bytes_))
    throw std::invalid_argument("the shared memory is smaller than the group needs");
  const int flags = fd_ >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd_, static_cast<off_t>(start));
  if (base == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "cannot map the shared memory");
  base_ = static_cast<unsigned char*>(base);
  header_ = reinterpret_cast<RegionHeader*>(base_);
  cells_ = reinterpret_cast<RankCell*>(base_ + layout.cells);
  fifos_ = reinterpret_cast<Fifo*>(base_ + layout.fifos);
  channels_ = reinterpret_cast<Channel*>(base_ + layout.channels);
  staging_ = base_ + layout.staging;
  channel_rings_ = base_ + layout.rings;
  if (maker == Maker::kAll) return;  // the ranks know its numbers from their decision
  if (maker == Maker::kFirst) {      // a new memfd reads as zeros, which is every counter's first value
    header_->ranks = ranks;
    header_->staging_bytes = staging_bytes;
    header_->magic = kMagic;
  } else if (header_->magic != kMagic || header_->ranks != ranks || header_->staging_bytes != staging_bytes) {
    munmap(base_, bytes_);
    throw std::invalid_argument("the shared memory was made for another group or by another version");
  }
}

std::shared_ptr<Region> Region::next(const Region& former, uint32_t ranks) {
  FileDescriptor copy;
  if (former.fd_ >= 0) {
    copy = FileDescriptor(fcntl(former.fd_, F_DUPFD_CLOEXEC, 0));
    if (copy < 0) throw std::system_error(errno, std::generic_category(), "cannot keep the shared memory");
  } else if (ranks != 1) {
    throw std::invalid_argument("memory without a file cannot be shared by the next membership");
  }
  const size_t start = former.fd_ >= 0 ? former.start_ + former.bytes_ : 0;
  return std::shared_ptr<Region>(
      new Region(std::move(copy), start, ranks, former.staging_bytes_, Maker::kAll));
}

void Region::discard() {
  if (fd_ < 0) return;
  const RegionLayout layout(ranks_, staging_bytes_);
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start_ + layout.fifos),
                  static_cast<off_t>(layout.end - layout.fifos));
}

Region::~Region() { munmap(base_, bytes_); }

int Region::member(int64_t index) const {
  if (index >= 0 && index < int64_t{ranks_}) return static_cast<int>(index);
  throw std::invalid_argument("place " + std::to_string(index) + " is none of the " + std::to_string(ranks_) +
                              " in this shared memory");
}

// 0, or the error's number.
int Region::back(const void* first, size_t nbytes) {
  if (fd_ < 0) return 0;
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(first) - base_);
  return unisono::back(fd_, start_ + offset, nbytes);
}

void Region::back_rank(int index) {
  int failed = back(staging(index), staging_bytes_);
  if (failed == 0) failed = back(&channel(0, index), ranks_ * sizeof(Channel));
  if (failed != 0) throw no_memory(failed, staging_bytes_ + ranks_ * sizeof(Channel));
}

void Region::back_fifo(int sender, int receiver) {
  if (ranks_ <= kEagerRanks) return;
  if (const int failed = back(&fifo(sender, receiver), sizeof(Fifo)); failed != 0)
    throw no_memory(failed, sizeof(Fifo));
}

bool Region::back_channel(int sender, int receiver) {
  return back(&channel(sender, receiver), sizeof(Channel)) == 0 &&
         back(channel_ring(sender, receiver), channel_bytes_) == 0;
}

}  // namespace unisono
