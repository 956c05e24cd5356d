// The control connections to ranks on other hosts: a thread that sleeps on them, for messages that must
// arrive whatever this rank does and however full its other connections are. It forwards why the group was
// aborted, notices which rank has left or died, and reports where this rank stands when another one asks.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "protocol/frames.hpp"
#include "protocol/waiting.hpp"

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
  // Whether nothing more will come from a rank of another host.
  bool ended(int peer);
  // Says goodbye and ends the thread. `forked`: this is a fork's copy, whose thread is the parent's.
  void leave(bool forked);
  // In a fork's child: closes its copies, which would hide this rank's death from the others.
  void close_copies();

 private:
  using Kind = ControlFrame::Kind;
  struct Link {
    int fd = -1;
    bool ended = false;       // nothing more will come
    bool silent = false;      // ... because no answer came for too long
    bool asked = false;       // an answer is due
    Nanoseconds lost_at = 0;  // when the loss of its rank is to be reported; 0: it lives
    size_t have = 0;          // bytes of `in`
    ControlBytes in;
    std::vector<unsigned char> out;  // what the kernel did not take
    bool open() const { return fd >= 0 && !ended; }
  };

  void serve();
  void serve_to_the_end();
  void drain_goodbyes(std::unique_lock<std::mutex>& lock);
  void wait(std::unique_lock<std::mutex>& lock);
  std::vector<int> find_deaths();
  void send_due_frames();
  void read_from(int peer);
  void handle(int peer, const ControlFrame& frame);
  void refuse(int peer, const BadFrame& bad);
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
  bool leaving_ = false, abort_sent_ = false;
  bool ask_ = false, announce_ = false;
  size_t due_ = 0;                   // answers that have not come
  std::vector<bool> reported_dead_;  // ranks of this host whose death was seen
  std::thread thread_;
};

}  // namespace unisono
