// Edges to other hosts: one connection to each rank there. A message goes from where its sender has it
// into the kernel; what the kernel does not take at once goes later, so that a sender may go on as far as
// the plans need it, whatever the sizes of the kernel's buffers. It is copied only when its place is needed
// for something else before. It comes straight to where its receiver wants it, or part by part into a buffer
// from which it is reduced.
#pragma once

#include <deque>
#include <vector>

#include "protocol/control.hpp"
#include "protocol/frames.hpp"
#include "protocol/waiting.hpp"
#include "transport/transport.hpp"

namespace unisono {

class TcpTransport final : public Transport, public Sockets {
 public:
  // sockets[rank]: connected, or -1 for a rank of this host. Takes them over.
  TcpTransport(World& world, Control& control, int rank, std::vector<int> sockets);
  ~TcpTransport() override;

  // Messages from now on are of operation `seq`.
  void begin(uint64_t seq, uint64_t fingerprint);
  // Some rank whose messages the kernel has not all taken yet, or -1.
  int unsent() const;
  // Forgets what has not been sent: the operation has failed, its memory is the caller's again.
  void drop();
  // Nothing more will be sent.
  void finish();
  void close_copies();  // see Control

  void* reserve(std::span<const int> peers, size_t nbytes) override;
  int blocking_peer() const override { return blocking_peer_; }
  void commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) override;
  void keep(const void* data, size_t nbytes) override;
  bool peek(int peer, size_t nbytes, void* into, Message& message) override;
  bool peek_part(int peer, size_t nbytes, size_t first, size_t count, Message& message) override;
  void release(int peer) override;
  // What one sender's messages to one peer may take together.
  static constexpr size_t kCapacity = 4 << 20;

  void flush() override;
  bool busy() const override { return unsent_bytes_ > 0; }
  void sleep(int awaited, Nanoseconds slice, uint32_t epoch) override;
  bool ended(int peer) const override {
    const Edge& from = edges_[static_cast<size_t>(peer)];
    return from.ended || from.broken;
  }

 private:
  static constexpr size_t kMostUnsent = 2 * kCapacity;

  using Header = DataHeader;
  struct Outgoing {
    Header header;
    const unsigned char* payload;
    size_t sent;                      // of both
    std::vector<unsigned char> copy;  // of the payload, if it had to be kept
    size_t left() const { return sizeof header + header.nbytes - sent; }
  };
  struct Edge {
    int fd = -1;
    bool ended = false;   // nothing more will come
    bool broken = false;  // nothing more can be sent
    // What is arriving: `have` bytes of header and payload.
    Header header{};
    size_t have = 0;
    std::vector<unsigned char> in;
    uint64_t noted = 0;        // the newest operation it is known to have begun
    std::deque<Outgoing> out;  // what the kernel has not taken
    size_t unsent = 0;         // bytes of it
  };
  Edge& edge(int peer) { return edges_[static_cast<size_t>(peer)]; }
  void send(int peer, const Header& header, const void* from);
  void flush(int peer);
  void took(Edge& to, size_t nbytes);
  void forget(Edge& to);
  bool fill(int peer, size_t nbytes, size_t first, size_t count, unsigned char* target);
  void note(int peer);
  void broke(int peer);

  World& world_;
  Control& control_;
  const int rank_;
  std::vector<Edge> edges_;
  std::vector<unsigned char> staging_;
  size_t unsent_bytes_ = 0;
  int blocking_peer_ = -1;
  int wanted_ = -1;  // the rank of which a message is waited for
  uint64_t seq_ = 0, fingerprint_ = 0;
};

}  // namespace unisono
