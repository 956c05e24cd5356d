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

#include "protocol/region_layout.hpp"

namespace unisono {
namespace {

// Limits within which the layout does not overflow.
constexpr uint32_t kMostRanks = 1 << 16;
constexpr size_t kMostStaging = size_t{1} << 40;

size_t whole_pages(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

struct RegionLayout {
  size_t cells, fifos, channels, staging, channel_bytes, end;
  RegionLayout(size_t ranks, size_t staging_bytes) {
    cells = whole_pages(sizeof(RegionHeader));
    fifos = cells + whole_pages(ranks * sizeof(RankCell));
    channels = fifos + whole_pages(ranks * ranks * sizeof(Fifo));
    staging = channels + whole_pages(ranks * ranks * sizeof(Channel));
    channel_bytes = staging + ranks * staging_bytes;
    end = channel_bytes + ranks * ranks * kChannelBytes;
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

// Sets the length of the file and allocates its pages, except those of the point-to-point buffers: see
// back_channel.
void allocate(int fd, const RegionLayout& layout) {
  if (ftruncate(fd, static_cast<off_t>(layout.end)) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot size the shared memory");
  if (const int failed = back(fd, 0, layout.channel_bytes); failed != 0)
    throw std::system_error(failed, std::generic_category(),
                            "cannot allocate " + std::to_string(layout.channel_bytes) +
                                " bytes of shared memory; lower UNISONO_STAGING_BYTES");
}

}  // namespace

size_t Region::bytes_needed(uint32_t ranks, size_t staging_bytes) {
  return RegionLayout(ranks, staging_bytes).end;
}

Region::Region(int fd, uint32_t ranks, size_t staging_bytes, bool create)
    : fd_(fd), ranks_(ranks), staging_bytes_(staging_bytes) {
  if (ranks == 0 || ranks > kMostRanks)
    throw std::invalid_argument("a group has 1 to " + std::to_string(kMostRanks) + " ranks on a host");
  if (staging_bytes < 16 * kPageBytes || staging_bytes > kMostStaging || staging_bytes % kPageBytes != 0)
    throw std::invalid_argument("staging memory must be a multiple of 4096, from 65536 bytes to 2^40");
  const RegionLayout layout(ranks, staging_bytes);
  bytes_ = layout.end;
  if (fd >= 0 && create) allocate(fd, layout);
  struct stat info;
  if (fd >= 0 && (fstat(fd, &info) != 0 || static_cast<size_t>(info.st_size) < bytes_))
    throw std::invalid_argument("the shared memory is smaller than the group needs");
  const int flags = fd >= 0 ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "cannot map the shared memory");
  base_ = static_cast<unsigned char*>(base);
  header_ = reinterpret_cast<RegionHeader*>(base_);
  cells_ = reinterpret_cast<RankCell*>(base_ + layout.cells);
  fifos_ = reinterpret_cast<Fifo*>(base_ + layout.fifos);
  channels_ = reinterpret_cast<Channel*>(base_ + layout.channels);
  staging_ = base_ + layout.staging;
  channel_bytes_ = base_ + layout.channel_bytes;
  if (create) {  // a new memfd reads as zeros, which is every counter's first value
    header_->ranks = ranks;
    header_->staging_bytes = staging_bytes;
    header_->magic = kMagic;
  } else if (header_->magic != kMagic || header_->ranks != ranks || header_->staging_bytes != staging_bytes) {
    munmap(base_, bytes_);
    throw std::invalid_argument("the shared memory was made for another group or by another version");
  }
}

Region::~Region() { munmap(base_, bytes_); }

int Region::member(int64_t place) const {
  if (place >= 0 && place < int64_t{ranks_}) return static_cast<int>(place);
  throw std::invalid_argument("place " + std::to_string(place) + " is none of the " + std::to_string(ranks_) +
                              " in this shared memory");
}

bool Region::back_channel(int sender, int receiver) {
  if (fd_ < 0) return true;
  const size_t start = static_cast<size_t>(channel_bytes(sender, receiver) - base_);
  return back(fd_, start, kChannelBytes) == 0;
}

}  // namespace unisono
