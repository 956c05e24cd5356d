// Byte streams between this rank and every other rank: a ring in shared memory on one host, a connection
// between hosts. No function here waits, except sleep. Guarded by the lock of the channels, except wake,
// sleep, busy and epoch.
#pragma once

#include <atomic>
#include <optional>
#include <span>
#include <vector>

#include "protocol/shared_copy.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

class SocketStreams final : public SocketPoller {
 public:
  // sockets[rank]: connected, or -1; empty when all ranks are on one host. Takes them over.
  SocketStreams(GroupState& group, int rank, FileDescriptors sockets, ControlPlane* control);

  // Allocates the ring to `peer`; false when there is no memory.
  bool open(int peer);
  // The number of bytes written or read, possibly 0. `more`: further bytes of the message follow.
  size_t write(int peer, const void* data, size_t nbytes, bool more);
  size_t read(int peer, void* data, size_t nbytes);
  // To a rank of this host. Writes both pieces, or nothing; false: there is no room.
  bool write_whole(int peer, std::span<const unsigned char> first, std::span<const unsigned char> second);
  // Whether bytes have arrived; may be called without the lock.
  bool has_arrived(int peer);
  // Reads two pieces when both have arrived; otherwise nothing. `buffer_of`, called when `first` is filled:
  // where the second piece goes; nullopt: read nothing.
  template <class PlaceOf>
  bool read_whole(int peer, std::span<unsigned char> first, PlaceOf buffer_of) {
    const uint64_t available = peek(peer, first, 0);
    if (available < first.size()) return false;
    const std::optional<std::span<unsigned char>> wanted = buffer_of();
    if (!wanted || available < first.size() + wanted->size()) return false;
    const std::span<unsigned char> second = *wanted;
    peek(peer, second, first.size());
    consume(peer, first.size() + second.size());
    return true;
  }
  // Asks the kernel which connections can be read or written.
  void poll_sockets();
  // Wakes other threads of this rank that sleep here.
  void wake();
  // Ends the connection to a peer that does not keep to the protocol.
  void disconnect(int peer);
  // Ends the writing side of all connections.
  void finish();
  // Whether the peer has ended its side in order.
  bool finished(int peer) const { return has_finished(remote_streams_[static_cast<size_t>(peer)].fd); }
  // Gives up the connections; every peer then counts as ended.
  FileDescriptors take();
  void close_copies();  // see ControlPlane

  void flush() override {}  // a waiting thread moves all bytes itself
  bool busy() const override { return true; }
  uint32_t epoch() const override { return epoch_.load(std::memory_order_seq_cst); }
  void sleep(int awaited, Nanoseconds slice, uint32_t epoch) override;
  bool ended(int peer) const override { return remote_streams_[static_cast<size_t>(peer)].ended; }

 private:
  // A connection. `readable` and `writable` are hints, and may be wrong.
  struct RemoteStream {
    FileDescriptor fd;
    bool readable = true, writable = true;
    bool watches_output = false;  // epoll waits for room to write
    std::atomic<bool> ended{false};
  };
  uint64_t peek(int peer, std::span<unsigned char> into, uint64_t after);
  void consume(int peer, uint64_t nbytes);
  size_t write_slice(int peer, const unsigned char* data, size_t nbytes);
  size_t read_slice(int peer, unsigned char* data, size_t nbytes);
  size_t write_socket(RemoteStream& stream, int peer, const void* data, size_t nbytes, bool more);
  size_t read_socket(RemoteStream& stream, int peer, void* data, size_t nbytes);
  void watch(int peer, bool for_room);
  void set_events(int peer);
  void broke(RemoteStream& stream, int peer);

  GroupState& group_;
  const int rank_;
  ControlPlane* const control_;
  std::vector<bool> backed_;
  std::vector<uint64_t> known_consumed_;      // by receiver: a lower bound of `consumed`
  std::vector<SharedCopy> shared_copies_;     // by receiver
  std::vector<RemoteStream> remote_streams_;  // empty when all ranks are on one host
  FileDescriptor poll_, wake_;
  std::atomic<uint32_t> epoch_{0};  // raised by every wake
  std::atomic<int> sleepers_{0};
};

}  // namespace unisono
