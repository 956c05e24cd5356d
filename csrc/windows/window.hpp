// One-sided communication: a rank reads, writes and updates memory that other ranks expose, without their
// help. Ranks of a host do so directly: in a mapped arena, or by process_vm_readv and process_vm_writev. All
// others ask a thread of the target (see WindowLinks), which sleeps until they do; Python takes no part in
// it.
//
// An update holds the target's WindowCell, so updates are atomic, whichever way they come.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "protocol/waiter.hpp"
#include "windows/window_cell.hpp"
#include "windows/window_links.hpp"

namespace unisono {

// The part of a window that a rank exposes, as it tells the others.
struct WindowPart {
  uint64_t cell, base, nbytes;  // addresses in its process; the memory that it had at the beginning
  int unit;                     // of its elements, for callers: a dtype, or -1
};

class Window {
 public:
  // members: the ranks that share it.  parts: by rank. direct: whose memory this process reaches. asking,
  // serving: the connections to all others, by rank; it takes them over. dynamic: ranks attach and detach
  // memory, so that only the target knows what it exposes.
  Window(const WaitContext& context, std::vector<int> members, std::vector<WindowPart> parts,
         const std::vector<bool>& direct, FileDescriptors asking, FileDescriptors serving, bool dynamic);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Checks a rank of the window and returns it; throws std::invalid_argument.
  int member(int64_t rank) const;
  const WindowPart& part(int member) const { return parts_[static_cast<size_t>(member)]; }
  // Whether this process reaches the memory of a rank, before there is a window.
  static bool reaches(const WaitContext& context, int rank, uint64_t cell, size_t nbytes);

  // Addresses are those of the target's process. The calls throw a Fault, and std::out_of_range before a
  // byte moves. Between hosts `put`, and `update` without `former`, end with `flush`.
  void put(int rank, uint64_t address, const void* from, size_t nbytes, const WindowLimits& limits);
  void get(int rank, uint64_t address, void* into, size_t nbytes, const WindowLimits& limits);
  // target[i] = target[i] op operand[i], element by element; former: the values before, or nullptr.
  void update(int rank, uint64_t address, DType dtype, uint32_t op, const void* operand, void* former,
              size_t numel, const WindowLimits& limits);
  // If the element at `address` has the bytes `expected`, it becomes `desired`. former: what it was.
  void swap(int rank, uint64_t address, const void* expected, const void* desired, void* former,
            size_t nbytes, const WindowLimits& limits);
  // Waits until all calls to `rank` have their effect there.
  void flush(int rank, const WindowLimits& limits);
  void flush_all(const WindowLimits& limits);

  void lock(int rank, bool shared, const WindowLimits& limits);
  void unlock(int rank, const WindowLimits& limits);
  // Excludes all updates at a rank, and changes of its locks, until `release`.
  void hold(int rank, const WindowLimits& limits);
  void release(int rank, const WindowLimits& limits);

  // Waits until all ranks have called it, and all their calls have their effect. last: it looks into no other
  // rank's cell.
  void fence(const WindowLimits& limits, bool last = false);
  // The last fence: the window may end after it.
  void finish(const WindowLimits& limits);
  void post(std::span<const int> ranks, const WindowLimits& limits);
  void start(std::span<const int> ranks, const WindowLimits& limits);
  void complete(std::span<const int> ranks, const WindowLimits& limits);
  // Whether all of these ranks have called `complete` for this rank's last post. wait: until they have.
  bool completed(std::span<const int> ranks, bool wait, const WindowLimits& limits);

  bool attach(uint64_t address, uint64_t nbytes, const WindowLimits& limits);
  bool detach(uint64_t address, const WindowLimits& limits);
  // The memory of a rank of this host in this process; nullptr: it is not mapped here.
  void* mapped(int rank, uint64_t address, size_t nbytes);
  // Ends the threads, and the calls under way. Idempotent.
  void end();
  void close_copies() { links_.close_copies(); }

 private:
  friend class HeldCell;
  WindowCell& own() { return *cells_[static_cast<size_t>(context_.rank)]; }
  WindowCell* direct(int rank) { return cells_[static_cast<size_t>(rank)]; }
  template <class Ready>
  void wait(int& awaited, WindowWait what, const WindowLimits& limits, Ready ready);
  void begin(int rank, uint64_t address, size_t nbytes, const WindowLimits& limits);
  void hold_directly(int rank, const WindowLimits& limits);
  void refuse_access(int rank, FaultKind kind);
  void look_after(int rank);
  void update_piece(int rank, uint64_t address, DType dtype, uint32_t op, const void* operand, void* former,
                    size_t numel);
  void signal(int rank, uint32_t what, const WindowLimits& limits);
  int absent(uint64_t fences, int otherwise);

  // ---- for other ranks, in the threads of WindowLinks
  friend class WindowLinks;
  bool serve(int peer, const WindowRequest& request);
  WindowReply serve_lock(int peer, const WindowRequest& request);
  bool serve_access(int peer, const WindowRequest& request);
  void note_signal(int peer, uint32_t what);
  template <class Ready>
  bool await_here(int64_t timeout_ns, Ready ready);

  const WaitContext context_;
  const std::vector<int> members_;
  const std::vector<WindowPart> parts_;
  const bool dynamic_;
  std::vector<WindowCell*> cells_;  // of ranks whose memory this process reaches; otherwise nullptr
  std::vector<uint64_t> posts_, completions_;  // of each rank that `start` and `completed` have used up
  std::unique_ptr<std::atomic<Nanoseconds>[]> looked_at_;  // when this rank last looked whether one is alive
  uint64_t fences_ = 0;
  std::atomic<bool> ended_{false};
  WindowLinks links_;
};

}  // namespace unisono
