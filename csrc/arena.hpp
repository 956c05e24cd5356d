// Memory of this process that others of its host may map, so that they read a message where it lies: what
// `empty` hands out. One nameless file per process, as long as the machine has memory and for the most part
// empty; whoever may read this process's memory (see loan.hpp) may map it, by way of /proc.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "loan.hpp"

namespace unisono {

// Where the arena of a process is, told to the others. No bytes: it has none.
struct ArenaPlace {
  int32_t fd = -1;
  uint64_t base = 0;  // in its owner
  uint64_t bytes = 0;
};

class Arena {
 public:
  // This process's, made when it is first asked for. Throws std::system_error where that cannot be done.
  static std::shared_ptr<Arena> own();
  // ... if it has been made, and this is not a fork of who made it: otherwise nullptr.
  static Arena* made();

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Pages that read as zeros. Throws std::bad_alloc when there is no memory: touching them cannot fail.
  void* take(size_t nbytes);
  // No effect in a fork's child, whose parent has them.
  void give_back(void* pages, size_t nbytes);
  bool holds(const void* data, size_t nbytes) const {
    const auto at = reinterpret_cast<uint64_t>(data);
    return at >= place_.base && at - place_.base < place_.bytes &&
           nbytes <= place_.bytes - (at - place_.base);
  }
  const ArenaPlace& place() const { return place_; }

 private:
  Arena();
  using Free = std::map<uint64_t, uint64_t>;  // offset and bytes of what is free
  void release(uint64_t offset, uint64_t nbytes);
  void punch(uint64_t offset, uint64_t nbytes);

  const pid_t owner_;
  ArenaPlace place_;
  std::mutex mutex_;
  Free free_;
};

// Another process's arena, as far as this one can see it.
class ArenaView {
 public:
  ArenaView(const Identity& owner, const ArenaPlace& place);
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;
  // What its owner has at `address`; nullptr: not to be seen from here.
  void* at(uint64_t address, size_t nbytes) const;

 private:
  const ArenaPlace place_;
  void* mapped_ = nullptr;
  unsigned char* base_ = nullptr;  // nullptr: it cannot be seen
};

}  // namespace unisono
