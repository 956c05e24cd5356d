// A queue in memory that processes of one host map: one of them, the owner, writes messages, and readers take
// them in place. A message is written once. Its bytes stay as they are while a reader has it or may still ask
// for it; a sleeping reader or owner is woken by a futex in that memory.
//
//   QueueCell | QueueReader by place | QueueRecord by number, each with one byte per place | messages
//
// docs/protocol.md says who writes and reads each field, in which memory order. It starts as zeros.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "protocol/waiter.hpp"
#include "windows/window_links.hpp"

namespace unisono {

constexpr uint32_t kQueueRecords = 1024;  // messages that some reader has, or may still ask for
constexpr size_t kQueueAlignment = 64;

enum class Presence : uint32_t { kAbsent, kJoining, kReading, kLost };
// What a reader's byte of a record says. kOwed: the reader has not taken the message yet.
enum QueueHeld : uint8_t { kNotHeld, kOwed, kTaken };
// kCut: the owner passes on the messages of a writer on another host, and has lost it.
enum class QueueState : uint32_t { kOpen, kClosed, kCut };

struct alignas(64) QueueReader {
  std::atomic<uint32_t> presence;  // a Presence; kReading of one that joins, and kLost, written by the owner
  std::atomic<uint64_t> first;     // the message with which it begins; written by the owner
  std::atomic<int64_t> moved_ns;   // when it last asked for a message, or gave one back
  std::atomic<int32_t> thread;     // that asked
};

struct QueueRecord {
  std::atomic<uint64_t> number;  // of its message, counted from 1; 0: it can no longer be taken
  uint64_t offset, nbytes;
  std::atomic<int64_t> put_ns;
  std::atomic<uint8_t> held[];  // by place
};

struct alignas(kLineBytes) QueueCell {
  alignas(kLineBytes) std::atomic<uint64_t> newest;  // the number of the newest message; written by the owner
  std::atomic<uint32_t> state;                       // a QueueState
  EventCount put, returned;                          // notified for readers, for the owner
  unsigned char rest[];
};

// The reader that still needs the oldest message, and since when it has neither asked for one nor given one
// back.
struct SlowReader {
  int place = -1;  // -1: there is none
  uint64_t number = 0;
  Nanoseconds since = 0;
  bool taken = false;
};

class SharedQueue {
 public:
  struct QueueMessage {
    uint64_t number, offset, nbytes;
  };
  // memory, nbytes: mapped and shared. ranks: of its places. owner: the rank that writes. latest: readers
  // take the newest message only, and nobody waits for them. spin: how long a call polls before it sleeps.
  SharedQueue(const WaitContext& context, unsigned char* memory, size_t nbytes, std::vector<int> ranks,
              int owner, bool latest, Nanoseconds spin);
  // What lies before the messages.
  static size_t bytes_before(size_t places);
  size_t capacity() const { return capacity_; }

  // The calls throw a Fault: kAborted, if the group has failed, by more than the loss of a rank; kTimeout,
  // kInterrupted and kPeerLost, which leave the group as it is.

  // ---- the owner, one thread at a time
  // Room for the next message: its offset. kPeerLost: a reader has died, and is not waited for any more.
  uint64_t reserve(size_t nbytes, const WindowLimits& limits);
  // The bytes of the last `reserve` are the next message.
  void publish();
  void end(QueueState state);
  // Throws if a reader has died since. Looks at most every 10 ms, unless `now`.
  void look_for_dead(bool now);

  // ---- the owner, any thread
  SlowReader find_slowest();
  // At which line of its program a reader is; "": unknown. Waits at most 0.2 s.
  std::string line_of(int place);

  // ---- a reader, one thread of each place at a time
  // The next message, or with `latest` the newest one, if it is newer than the last one taken. Number 0:
  // nothing will follow, or `stop` was called.
  QueueMessage take(int place, const WindowLimits& limits);
  void join(int place);
  void leave(int place);

  // ---- any thread
  // Ends the calls of `take` for a place, until it joins again; below 0: those of `reserve`, with kPeerLeft.
  void stop(int place);
  // Does nothing in a forked child.
  void give_back(int place, uint64_t number) noexcept;
  QueueState state() const { return static_cast<QueueState>(cell_.state.load()); }
  bool reads(int place) {
    return presence(place) == Presence::kReading || presence(place) == Presence::kJoining;
  }

 private:
  struct Stored {
    uint64_t nbytes, number;
  };
  QueueReader& reader(int place) { return readers_[place]; }
  QueueRecord& record(uint64_t number) {
    return *reinterpret_cast<QueueRecord*>(records_ + number % kQueueRecords * stride_);
  }
  Presence presence(int place) { return static_cast<Presence>(reader(place).presence.load()); }
  void set_presence(int place, Presence presence) {
    reader(place).presence.store(static_cast<uint32_t>(presence));
  }
  bool needed_by(int place, uint64_t number);
  bool needed(uint64_t number);
  void reclaim();
  bool find_room(size_t nbytes);
  bool replace_newest(size_t nbytes);
  bool fits(uint64_t at, size_t nbytes) const;
  bool take_now(int place, QueueMessage& message);
  int rank_of(int place) const { return ranks_[static_cast<size_t>(place)]; }
  int places() const { return static_cast<int>(ranks_.size()); }
  Fault lost(int rank) const;
  void check_group() const;
  // ready: may take a message, so that it holds once. check: the fault, if a rank has died.
  template <class Ready, class Check>
  void wait(EventCount& event, const WindowLimits& limits, Ready ready, Check check);

  const WaitContext context_;
  const std::vector<int> ranks_;
  const int owner_;
  const bool latest_;
  const Nanoseconds spin_;
  const size_t stride_;  // of records
  const size_t capacity_;
  QueueCell& cell_;
  QueueReader* const readers_;
  unsigned char* const records_;
  const pid_t process_;
  std::vector<uint64_t> next_;                    // of each place: the message that it takes next
  std::unique_ptr<std::atomic<bool>[]> stopped_;  // by place; the last one: the owner
  // ---- the owner
  std::mutex stored_lock_;  // of the map: `find_slowest` may run while another thread waits in `reserve`
  std::map<uint64_t, Stored> stored_;                            // messages that may be needed, by offset
  uint64_t number_ = 1;                                          // of the next message
  uint64_t place_ = 0, reserved_ = 0;                            // where it is, and its bytes
  uint64_t tail_ = 0;                                            // where the last message ends
  std::vector<bool> in_use_ = std::vector<bool>(kQueueRecords);  // records, by number
  Nanoseconds looked_at_ = 0;
};

}  // namespace unisono
