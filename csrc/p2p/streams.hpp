// Byte streams between this rank and every other: a ring in shared memory on one host, a connection
// between hosts. Nothing here waits. Guarded by the lock of the channels, but for wake, sleep and busy.
#pragma once

#include <atomic>
#include <optional>
#include <span>
#include <vector>

#include "protocol/waiting.hpp"

namespace unisono {

class Streams final : public Sockets {
 public:
  // sockets[rank]: connected, or -1; empty when all ranks are on one host. Takes them over.
  Streams(World& world, int rank, std::vector<int> sockets, Control* control);
  ~Streams() override;

  // Makes sure that writing to `peer` will not lack memory; false when it does.
  bool open(int peer);
  // How much of `nbytes` was taken or came, possibly nothing. `more`: what follows belongs to it.
  size_t write(int peer, const void* data, size_t nbytes, bool more);
  size_t read(int peer, void* data, size_t nbytes);
  // Of a rank of this host. Writes two pieces together, or nothing; false: there is no room.
  bool write_whole(int peer, std::span<const unsigned char> first, std::span<const unsigned char> second);
  // Whether something has come; may be asked without the lock.
  bool has_come(int peer);
  // Reads two pieces when both have come; otherwise nothing. `place_of`: where the second one goes, once the
  // first has come, if it is wanted.
  template <class PlaceOf>
  bool read_whole(int peer, std::span<unsigned char> first, PlaceOf place_of) {
    const uint64_t there = peek(peer, first, 0);
    if (there < first.size()) return false;
    const std::optional<std::span<unsigned char>> wanted = place_of();
    if (!wanted || there < first.size() + wanted->size()) return false;
    const std::span<unsigned char> second = *wanted;
    peek(peer, second, first.size());
    consume(peer, first.size() + second.size());
    return true;
  }
  // Asks the kernel which connections have something to read or room.
  void look();
  // Wakes other threads of this rank that sleep here.
  void wake();
  // Whether what comes from `peer` is to wake those that sleep here: not while there is no place for it.
  void listen(int peer, bool wanted);
  // Ends the connection to a peer that does not keep to the protocol.
  void hang_up(int peer);
  // Nothing more will be written.
  void finish();
  void close_copies();  // see Control

  void flush() override {}  // a waiting thread moves all bytes itself
  bool busy() const override { return true; }
  uint32_t epoch() const override { return epoch_.load(std::memory_order_seq_cst); }
  void sleep(int awaited, Nanoseconds slice, uint32_t epoch) override;
  bool ended(int peer) const override { return far_[static_cast<size_t>(peer)].ended; }

 private:
  // A connection. What `readable` and `writable` promise may turn out to be false.
  struct Far {
    int fd = -1;
    bool readable = true, writable = true;
    bool watches_output = false;  // epoll waits for room to write
    bool watches_input = true;    // epoll waits for something to read
    std::atomic<bool> ended{false};
  };
  uint64_t peek(int peer, std::span<unsigned char> into, uint64_t after);
  void consume(int peer, uint64_t nbytes);
  size_t write_slice(int peer, const unsigned char* data, size_t nbytes);
  size_t read_slice(int peer, unsigned char* data, size_t nbytes);
  size_t write_far(Far& far, int peer, const void* data, size_t nbytes, bool more);
  size_t read_far(Far& far, int peer, void* data, size_t nbytes);
  void watch(int peer, bool for_room);
  void set_events(int peer);
  void broke(Far& far, int peer);

  World& world_;
  const int rank_;
  Control* const control_;
  std::vector<bool> backed_;
  std::vector<uint64_t> known_consumed_;  // by each receiver: at least so much
  std::vector<Far> far_;                  // empty when all ranks are on one host
  int poll_ = -1, wake_ = -1;
  std::atomic<uint32_t> epoch_{0};  // raised by every wake
  std::atomic<int> sleepers_{0};
};

}  // namespace unisono
