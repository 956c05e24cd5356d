// Edges through shared memory. A message is written once into the sender's staging ring, for any number of
// receivers, and announced in the FIFO to each of them. A small message travels in the FIFO itself.
#pragma once

#include <deque>
#include <vector>

#include "protocol/waiter.hpp"
#include "transport/transport.hpp"

namespace unisono {

class ShmTransport final : public Transport {
 public:
  // Edges to the ranks of this host.
  ShmTransport(GroupState& group, const PeerProcesses& peers, int rank);

  void* reserve(std::span<const int> peers, size_t nbytes) override;
  int blocking_peer() const override { return blocking_peer_; }
  void commit(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from) override;
  bool peek(int peer, size_t nbytes, void* into, MessageView& message) override;
  void release(int peer) override;
  bool can_zero_copy(std::span<const int> peers) const override;
  bool can_map(const void* from, size_t nbytes) const override;
  bool send_zero_copy(std::span<const int> peers, size_t nbytes, uint64_t fingerprint, const void* from,
                      bool mapped) override;
  void progress_zero_copy() override;
  bool zero_copy_complete() override;
  bool copy_zero_copy(int peer, const MessageView& message, void* into) override;
  bool cancel_zero_copy(int peer) override;
  // The limit of one sender's messages together: half the ring, because a message must not wrap around.
  static size_t capacity(const Region& region) { return region.staging_bytes() / 2; }

 private:
  // The two FIFOs between this rank and a peer, and their positions.
  struct ShmEndpoint {
    Fifo* out;
    Fifo* in;
    EventCount* event;
    const unsigned char* staging;  // the peer's
    uint32_t sent;                 // messages sent to it
    uint32_t known_acked;
    uint32_t received;  // its messages that were released
  };
  // A message in the staging ring that a receiver may still read.
  struct StagedMessage {
    int peer;
    uint32_t number;
    uint64_t free_to;  // the ring is free up to here once this message and all before it are released
  };

  // A zero-copy message that its receiver has not released.
  struct ZeroCopyMessage {
    int peer;
    uint32_t number;
    size_t nbytes;
    PayloadLocation location;
  };

  FifoSlot& slot_of(Fifo& fifo, uint32_t number) { return fifo.slots[(number - 1) % kFifoSlots]; }
  ShmEndpoint& edge(int peer) { return edges_[static_cast<size_t>(peer)]; }
  bool fifos_have_room(std::span<const int> peers);
  bool acked(int peer, uint32_t number);
  unsigned char* ring_room(size_t nbytes);
  bool reclaim();
  void restart_ring();
  const void* read_in_place(int peer, const FifoSlot& slot);
  bool sends_zero_copy_to(int peer);
  void forget_complete();
  bool repeat_zero_copy(int peer, ZeroCopyTransfer& transfer, void* into, size_t nbytes);

  GroupState& group_;
  const PeerProcesses& peers_;
  const int rank_;
  unsigned char* const ring_;
  const size_t ring_bytes_;
  const uint64_t warm_bytes_;  // see `restart_ring`
  std::vector<ShmEndpoint> edges_;

  std::vector<StagedMessage> staged_;  // a circular queue
  uint64_t first_staged_ = 0, last_staged_ = 0;
  uint64_t ring_head_ = 0, ring_tail_ = 0;  // positions only grow; modulo ring_bytes_ they are offsets
  uint64_t reserved_ = 0;
  int blocking_peer_ = -1;
  std::deque<ZeroCopyMessage> zero_copy_sends_;
  alignas(64) unsigned char small_[kInlineBytes] = {};
};

}  // namespace unisono
