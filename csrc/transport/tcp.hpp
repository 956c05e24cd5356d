// Edges to other hosts: one connection to each rank there. A message goes from the sender's memory into the
// kernel. Bytes that the kernel does not accept at once are sent later: a sender can continue as far as the
// plan needs, whatever the sizes of the kernel's buffers. They are copied only when their memory is about to
// change. The receiver reads a message straight into its destination, or in parts into a buffer from which it
// is reduced.
#pragma once

#include <deque>
#include <vector>

#include "protocol/control.hpp"
#include "protocol/frames.hpp"
#include "protocol/waiter.hpp"
#include "transport/transport.hpp"

namespace unisono {

class TcpTransport final : public Transport, public SocketPoller {
 public:
  // sockets[rank]: connected, or -1 for a rank of this host. Takes them over.
  TcpTransport(GroupState& group, ControlPlane& control, int rank, FileDescriptors sockets);

  // Messages from now on belong to operation `seq`.
  void begin(uint64_t seq, uint64_t fingerprint);
  // A rank with bytes that the kernel has not accepted yet, or -1.
  int unsent() const;
  // Drops all unsent bytes: the operation has failed, and its memory belongs to the caller again.
  void discard_unsent();
  // Ends the sending side of all connections.
  void finish();
  // Whether the peer has ended its side in order.
  bool finished(int peer) const { return has_finished(edges_[static_cast<size_t>(peer)].fd); }
  // Gives up the connections.
  FileDescriptors take();
  void close_copies();  // see ControlPlane

  void* reserve(std::span<const int> peers, size_t nbytes) override;
  int blocking_peer() const override { return blocking_peer_; }
  void commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) override;
  void copy_unsent(const void* data, size_t nbytes) override;
  bool peek(int peer, size_t nbytes, void* into, MessageView& message) override;
  bool peek_part(int peer, size_t nbytes, size_t first, size_t count, MessageView& message) override;
  void release(int peer) override;
  // The limit of one sender's messages to one peer together.
  static constexpr size_t kCapacity = 4 << 20;

  void flush() override;
  bool busy() const override { return unsent_bytes_ > 0; }
  void sleep(int awaited, Nanoseconds slice, uint32_t epoch) override;
  bool ended(int peer) const override {
    const TcpEndpoint& from = edges_[static_cast<size_t>(peer)];
    return from.ended || from.broken;
  }

 private:
  static constexpr size_t kMostUnsent = 2 * kCapacity;

  using Header = DataHeader;
  struct OutgoingFrame {
    Header header;
    const unsigned char* payload;
    size_t sent;                      // bytes of header and payload
    std::vector<unsigned char> copy;  // of the payload, if it had to be kept
    size_t remaining() const { return sizeof header + header.nbytes - sent; }
  };
  struct TcpEndpoint {
    FileDescriptor fd;
    bool ended = false;   // nothing more will come
    bool broken = false;  // nothing more can be sent
    // The arriving message: `received_bytes` bytes of header and payload.
    Header header{};
    size_t received_bytes = 0;
    std::vector<unsigned char> in;
    uint64_t newest_seq = 0;        // the newest operation that the peer is known to have begun
    std::deque<OutgoingFrame> out;  // messages that the kernel has not accepted in full
    size_t unsent = 0;              // bytes of it
  };
  TcpEndpoint& edge(int peer) { return edges_[static_cast<size_t>(peer)]; }
  void send(int peer, const Header& header, const void* from);
  void flush(int peer);
  void mark_sent(TcpEndpoint& to, size_t nbytes);
  void clear_unsent(TcpEndpoint& to);
  bool fill(int peer, size_t nbytes, size_t first, size_t count, unsigned char* target);
  void record_peer_progress(int peer);
  void mark_broken(int peer);

  GroupState& group_;
  ControlPlane& control_;
  const int rank_;
  std::vector<TcpEndpoint> edges_;
  std::vector<unsigned char> staging_;
  size_t unsent_bytes_ = 0;
  int blocking_peer_ = -1;
  int awaited_peer_ = -1;  // the rank whose message is awaited
  uint64_t seq_ = 0, fingerprint_ = 0;
};

}  // namespace unisono
