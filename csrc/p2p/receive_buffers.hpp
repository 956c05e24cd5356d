// The memory that receives write to. A message that shares memory with it has no meaning: what it sends, or
// what a second receive leaves there, depends on which of the two is faster. It is refused before a byte
// moves, also when the receive has ended already and its caller cannot know that. Raw receives, see Request,
// may share memory, as programs for MPI do that measure bandwidth: what the memory then has is undefined.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "p2p/request.hpp"

namespace unisono {

class ReceiveBuffers {
 public:
  static constexpr size_t kMostEnded = 64;  // of a program that never waits for them

  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  // Whether this memory is that of a receive under way, or of one whose end the caller has not seen.
  bool overlap(const unsigned char* data, uint64_t nbytes) {
    if (empty() || nbytes == 0) return false;
    const std::lock_guard lock(mutex_);
    return find(data, nbytes);
  }
  // Adds the memory of a receive. False: `overlap`, and nothing has changed.
  bool claim(const std::shared_ptr<Request>& request) {
    if (request->sending || request->nbytes == 0) return !overlap(request->data, request->nbytes);
    const std::lock_guard lock(mutex_);
    if (find(request->data, request->nbytes)) return request->raw;
    if (receives_.size() >= 2 * open_ + kMostEnded) drop_seen();
    receives_[request->data] = {request, request->nbytes};
    set_count();
    return true;
  }
  // The caller has seen the end of this receive.
  void release(const Request& request, const unsigned char* data) {
    const std::lock_guard lock(mutex_);
    const auto found = receives_.find(data);
    if (found == receives_.end() || found->second.request.lock().get() != &request) return;
    receives_.erase(found);
    set_count();
  }

  // The same for receives that had ended when they were called, until `see_ended`. The caller keeps the last
  // kMostEnded of these buffers: nothing else may get their addresses.
  void add_ended(const unsigned char* data, uint64_t nbytes) {
    if (nbytes == 0) return;
    const std::lock_guard lock(mutex_);
    if (ended_.size() == kMostEnded) ended_.erase(ended_.begin());
    ended_.push_back({data, nbytes});
    set_count();
  }
  void see_ended() {
    if (empty()) return;
    const std::lock_guard lock(mutex_);
    ended_.clear();
    set_count();
  }

 private:
  struct Receive {
    std::weak_ptr<Request> request;
    uint64_t nbytes;
    bool seen() const {
      const std::shared_ptr<Request> posted = request.lock();
      return !posted || posted->seen.load(std::memory_order_relaxed);
    }
  };
  struct Memory {
    const unsigned char* data;
    uint64_t nbytes;
  };
  // The ranges of `receives_` are disjoint: only the last one that begins before an end can reach into it,
  // unless its end was seen.
  bool find(const unsigned char* data, uint64_t nbytes) {
    auto one = receives_.lower_bound(data + nbytes);
    while (one != receives_.begin()) {
      --one;
      if (one->first + one->second.nbytes <= data) break;
      if (!one->second.seen()) return true;
      one = receives_.erase(one);
    }
    set_count();
    return std::ranges::any_of(ended_, [&](const Memory& memory) {
      return unisono::overlap(memory.data, memory.nbytes, data, nbytes);
    });
  }
  void drop_seen() {
    std::erase_if(receives_, [](const auto& one) { return one.second.seen(); });
    open_ = receives_.size();
  }
  void set_count() { count_.store(receives_.size() + ended_.size(), std::memory_order_relaxed); }

  std::mutex mutex_;
  std::map<const unsigned char*, Receive> receives_;  // by address
  size_t open_ = 0;                                   // of them, when last counted
  std::vector<Memory> ended_;
  std::atomic<size_t> count_{0};
};

}  // namespace unisono
