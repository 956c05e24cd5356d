// What the executor asks of whatever carries an edge. Shared memory and sockets do it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace unisono {

struct Message {
  const void* data;
  size_t nbytes;
  uint64_t fingerprint;
  bool lent = false;  // it still is where the sender has it, and `data` is nullptr: fetch it
  bool open = false;  // `data` is the sender's memory: a sender that has given up may have changed it
};

// The edges from one rank to some of its peers and back. Messages of an edge arrive in order. Nothing
// here waits: the executor does, and knows for whom.
class Transport {
 public:
  virtual ~Transport() = default;

  // Room for one message to all of `peers`, or nullptr while there is none; then `blocking_peer()` is
  // whose slowness is in the way. At most one message is reserved at a time.
  virtual void* reserve(std::span<const int> peers, size_t nbytes) = 0;
  virtual int blocking_peer() const = 0;
  // Sends what lies at `from`: the reserved room or, to other hosts, anywhere in the caller's memory, which
  // stays as it is until `keep` is told of it.
  virtual void commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) = 0;
  // These bytes are going to change: what has not been sent of them is to be copied first.
  virtual void keep(const void* /*data*/, size_t /*nbytes*/) {}

  // The next message of `peer`, if it has come; it should have `nbytes`. It stays valid until released,
  // and may lie at `into` already, where its receiver wants it (nullptr: anywhere).
  virtual bool peek(int peer, size_t nbytes, void* into, Message& message) = 0;
  virtual void release(int peer) = 0;
  // Only bytes [first, first + count) of it, in order, each of them once; `message.data` is where they lie.
  virtual bool peek_part(int peer, size_t nbytes, size_t first, size_t /*count*/, Message& message) {
    if (!peek(peer, nbytes, nullptr, message)) return false;
    message.data = static_cast<const unsigned char*>(message.data) + first;
    return true;
  }

  // Messages that are not copied on their way: the sender's memory is lent until the receivers have released
  // them. `lends`: to these peers it can be done; `opens`: they can read this very memory where it is. `lend`
  // is false while there is no room; `assist` moves what this rank has lent; `returned` tells whether all of
  // that is free again.
  virtual bool lends(std::span<const int> /*peers*/) const { return false; }
  virtual bool opens(const void* /*from*/, size_t /*nbytes*/) const { return false; }
  virtual bool lend(std::span<const int> /*peers*/, size_t /*nbytes*/, uint64_t /*fingerprint*/,
                    const void* /*from*/, bool /*open*/) {
    return false;
  }
  virtual void assist() {}
  virtual bool returned() { return true; }
  // Brings the message of `peer` that `peek` found to `into`, where it is when this is true; if that never
  // comes to pass, `abandon` tells whether `into` is its owner's again.
  virtual bool fetch(int /*peer*/, const Message& /*message*/, void* /*into*/) { return false; }
  virtual bool abandon(int /*peer*/) { return true; }
};

}  // namespace unisono
