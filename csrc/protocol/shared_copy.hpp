// Copies into memory that another core reads and that is written again and again: a ring.
//
// A store to a line that another core has in its cache takes that line from it first. Between cores that
// share a cache that is fast where the line has left the reader's own one. Between other cores it is ten
// times as slow as a non-temporal store, after which the reader fetches the line from memory. Which is the
// case depends on the cores, and on virtual machines it changes while a program runs. So both ways are timed
// now and then, and the better one is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace unisono {

class SharedCopy {
 public:
  // Everything that is written is visible before a later store of this thread.
  void copy(void* to, const void* from, size_t nbytes) {
    if (nbytes < kLeastBytes)
      std::memcpy(to, from, nbytes);
    else
      copy_large(to, from, nbytes);
  }

 private:
  static constexpr size_t kLeastBytes = 4096;  // a smaller copy is not worth a thought
  void copy_large(void* to, const void* from, size_t nbytes);
  enum Way { kCached, kNontemporal, kWays };
  void timed(Way way, void* to, const void* from, size_t nbytes);

  uint32_t copies_ = 0;
  Way way_ = kCached;
  double cost_[kWays] = {};  // ns for each byte of the fastest copies of late; 0: unknown
};

}  // namespace unisono
