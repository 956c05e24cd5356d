// The control connections to ranks on other hosts: a thread that sleeps on them, for what has to be heard
// whatever this rank is doing and however full its other connections are. It passes on why the group was
// aborted, sees who has left or died, and tells where this rank stands when another one asks.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace unisono {

class Control {
 public:
  // sockets[rank]: connected, or -1. Takes them over.
  Control(World& world, const Peers& peers, int rank, std::vector<int> sockets);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  // Asks all others where they stand; their answers go into their cells.
  void ask();
  // ... and waits for the answers, but not longer than `patience`.
  void refresh(Nanoseconds patience);
  // Tells all others where this rank stands, without being asked.
  void announce();
  // A connection to `peer` broke, while this one may not have noticed yet.
  void doubt(int peer);
  // Says goodbye and ends the thread. `forked`: this is a fork's copy, whose thread is the parent's.
  void leave(bool forked);
  // In a fork's child: closes its copies, which would hide this rank's death from the others.
  void close_copies();

 private:
  enum class Kind : uint32_t { kAsk = 1, kAnswer, kAbort, kLeft };
  // Every frame has one size and tells where its sender stands, whatever else it is for.
  struct Frame {
    Kind kind;
    uint32_t unused;
    Fault fault;
    Standing standing;
  };
  struct Link {
    int fd = -1;
    bool ended = false;       // nothing more will come
    bool asked = false;       // an answer is due
    Nanoseconds lost_at = 0;  // when the loss of its rank is to be reported; 0: it lives
    size_t have = 0;          // bytes of `in`
    Frame in;
    std::vector<unsigned char> out;  // what the kernel did not take
    bool open() const { return fd >= 0 && !ended; }
  };

  void serve();
  void serve_to_the_end();
  void see_off(std::unique_lock<std::mutex>& lock);
  void wait(std::unique_lock<std::mutex>& lock);
  std::vector<int> find_deaths();
  void speak();
  void read_from(int peer);
  void handle(int peer, const Frame& frame);
  void send_to(int peer, Kind kind);
  void flush(Link& link);
  void lost(int peer, Nanoseconds grace);
  void report(int peer, Fault fault);
  bool nobody_tells(int peer) const;
  void answered(Link& link);
  Nanoseconds patience() const;

  World& world_;
  const Peers& peers_;
  const int rank_;
  std::mutex mutex_;
  std::condition_variable answers_came_;
  std::vector<Link> links_;  // guarded by mutex_
  bool leaving_ = false, told_ = false;
  bool ask_ = false, announce_ = false;
  size_t due_ = 0;            // answers that have not come
  std::vector<bool> buried_;  // ranks of this host whose death was seen
  std::thread thread_;
};

}  // namespace unisono
