// The memory of `un.empty` arrays, which other processes of the host may map to read a message in place. Each
// process has one unnamed file, as long as the machine's memory and mostly empty. A process that may read
// this process's memory (see zero_copy.hpp) may map the file through /proc. Only the part in use is
// accessible in each mapping: a core dump, or mlockall, must not fill the rest.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "protocol/zero_copy.hpp"

namespace unisono {

// How other processes find the arena of a process. Zero bytes: it has none.
struct ArenaLocation {
  int32_t fd = -1;
  uint64_t base = 0;  // in its owner
  uint64_t bytes = 0;
};

class Arena {
 public:
  // This process's arena, made at the first call. Throws std::system_error where the system refuses it.
  static std::shared_ptr<Arena> own();
  // The arena if this process has made one; nullptr otherwise. A forked child has not: its parent's does not
  // count.
  static Arena* made();

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Throws std::bad_alloc when there is not enough memory.
  void* take(size_t nbytes);
  // Does nothing in a forked child: its pages end with the process.
  void give_back(void* taken) noexcept;
  bool holds(const void* data, size_t nbytes) const {
    const auto at = reinterpret_cast<uint64_t>(data);
    return at >= location_.base && at - location_.base < location_.bytes &&
           nbytes <= location_.bytes - (at - location_.base);
  }
  const ArenaLocation& location() const { return location_; }

  // Called around a fork. The child's arrays keep their contents, and become private: see arena.cpp.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  void become_private();

 private:
  Arena();
  using Pieces = std::map<uint64_t, uint64_t>;  // offset and bytes
  bool populate(uint64_t offset, uint64_t nbytes);
  void empty(uint64_t offset, uint64_t nbytes) noexcept;
  bool has_file() const;
  void release(Pieces::node_type piece) noexcept;
  void* at(uint64_t offset) const { return reinterpret_cast<void*>(location_.base + offset); }

  const pid_t owner_;
  ArenaLocation location_;
  uint64_t device_ = 0, inode_ = 0;
  std::mutex mutex_;
  Pieces free_, taken_;
};

// This process's mapping of another process's arena. Several groups share one.
class ArenaView {
 public:
  // The view of the arena of this owner. Where it cannot be mapped, `at` always returns nullptr.
  static std::shared_ptr<const ArenaView> of(const ProcessIdentity& owner, const ArenaLocation& location);
  ~ArenaView();
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;
  // The owner's memory at `address`; nullptr: it cannot be read from here.
  void* at(uint64_t address, size_t nbytes) const {
    const uint64_t offset = address - location_.base;
    if (base_ == nullptr || offset >= location_.bytes || nbytes > location_.bytes - offset) return nullptr;
    const bool open = offset >= low_.load(std::memory_order_acquire) &&
                      offset + nbytes <= high_.load(std::memory_order_acquire);
    return open || widen(offset, offset + nbytes) ? base_ + offset : nullptr;
  }

 private:
  ArenaView(const ProcessIdentity& owner, const ArenaLocation& location);
  bool widen(uint64_t first, uint64_t last) const;
  bool shows(const ProcessIdentity& owner) const;

  const ArenaLocation location_;
  const pid_t process_;
  unsigned char* base_ = nullptr;  // nullptr: not mapped
  mutable std::mutex widening_;
  mutable std::atomic<uint64_t> low_{0}, high_{0};  // the accessible offsets
};

}  // namespace unisono
