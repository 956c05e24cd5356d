// The interface between the executor and a transport. Shared memory and sockets implement it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace unisono {

struct MessageView {
  const void* data;
  size_t nbytes;
  uint64_t fingerprint;
  bool zero_copy = false;  // the bytes are still in the sender's memory, and `data` is nullptr: fetch them
  bool mapped = false;     // `data` is the sender's memory: a sender that has aborted may have changed it
};

// The edges from one rank to some of its peers and back. Messages of an edge arrive in order. No function
// here waits: the executor does, because it has the awaited rank.
class Transport {
 public:
  virtual ~Transport() = default;

  // Room for one message to all of `peers`. nullptr: there is none yet, because `blocking_peer()` has not
  // received enough. At most one message is reserved at a time.
  virtual void* reserve(std::span<const int> peers, size_t nbytes) = 0;
  virtual int blocking_peer() const = 0;
  // Sends the bytes at `from`: the reserved room or, to other hosts, any of the caller's memory. That memory
  // must not change before `copy_unsent` is called for it.
  virtual void commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) = 0;
  // Call before these bytes change: copies those that are not sent yet.
  virtual void copy_unsent(const void* /*data*/, size_t /*nbytes*/) {}

  // The next message of `peer`, if it has arrived; it should have `nbytes`. It is valid until it is released.
  // The transport may store it at `into` at once (nullptr: it chooses a place).
  virtual bool peek(int peer, size_t nbytes, void* into, MessageView& message) = 0;
  virtual void release(int peer) = 0;
  // The same for bytes [first, first + count), at `message.data`. Parts are read in order, each once.
  virtual bool peek_part(int peer, size_t nbytes, size_t first, size_t /*count*/, MessageView& message) {
    if (!peek(peer, nbytes, nullptr, message)) return false;
    message.data = static_cast<const unsigned char*>(message.data) + first;
    return true;
  }

  // Zero-copy messages: the receivers use the sender's memory until they have released the message.
  // `can_zero_copy`: this is possible to these peers. `can_map`: they can read this memory in place.
  // `send_zero_copy` is false while there is no room. `progress_zero_copy` copies pieces of what this rank
  // has published for zero copy. `zero_copy_complete`: all of it is released.
  virtual bool can_zero_copy(std::span<const int> /*peers*/) const { return false; }
  virtual bool can_map(const void* /*from*/, size_t /*nbytes*/) const { return false; }
  virtual bool send_zero_copy(std::span<const int> /*peers*/, size_t /*nbytes*/, uint64_t /*fingerprint*/,
                              const void* /*from*/, bool /*mapped*/) {
    return false;
  }
  virtual void progress_zero_copy() {}
  virtual bool zero_copy_complete() { return true; }
  // Copies the zero-copy message that `peek` found to `into`; true when all of it is there. A receiver that
  // stops before that calls `cancel_zero_copy`, which returns whether `into` can be used or freed again.
  virtual bool copy_zero_copy(int /*peer*/, const MessageView& /*message*/, void* /*into*/) { return false; }
  virtual bool cancel_zero_copy(int /*peer*/) { return true; }
};

}  // namespace unisono
