// The control connections to ranks on other hosts, and the thread that sleeps on them. They carry what must
// arrive whatever this rank does and however full its other connections are. The thread forwards the fault
// that aborted the group, detects which rank has left or died, and sends this rank's status to ranks that
// ask.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "protocol/frames.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

class ControlPlane {
 public:
  // sockets[rank]: connected, or -1. Takes them over.
  ControlPlane(GroupState& group, const PeerProcesses& peers, int rank, FileDescriptors sockets);
  ~ControlPlane();
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  // Asks all remote ranks for their status; the answers go into their cells.
  void ask();
  // The same, and waits for the answers, at most for `limit`; not for those of ranks that the fault shows
  // to be silent.
  void refresh(Nanoseconds limit);
  // Sends this rank's status to all remote ranks.
  void announce();
  // Sends this rank's proposal to all remote ranks.
  void propose();
  // How the connection to a rank of another host is, and when its newest frame came; 0: none did.
  enum class State { kOpen, kEnded, kReset, kSilent, kNext };
  struct Contact {
    State state;
    Nanoseconds newest_frame_at;
  };
  Contact contact(int peer);
  // Ends the thread, and returns all connections. next_members: the ranks of the next membership. If
  // `contact` says kNext, the connection to such a rank has no more bytes of this membership. A rank that was
  // too late for `deadline` does not get there.
  FileDescriptors hand_over(const std::vector<bool>& next_members, Nanoseconds deadline);
  // Call when another connection to `peer` broke: the control connection may not show it yet.
  void suspect(int peer);
  // A rank of another host that has left a question unanswered for so long, or -1.
  int find_silent(Nanoseconds limit);
  // Whether nothing more will come from a rank of another host.
  bool ended(int peer);
  // Sends the close message and ends the thread. `forked`: a forked child's copy; the thread is the parent's.
  void leave(bool forked);
  // In a forked child: closes its copies. Open copies would hide this rank's death from the other ranks.
  void close_copies();

 private:
  using ControlKind = ControlFrame::ControlKind;
  struct ControlConnection {
    FileDescriptor fd;
    bool ended = false;               // nothing more will come
    bool silent = false;              // it ended because the peer's host did not answer
    bool reset = false;               // it ended, but not by the end of the peer's bytes
    bool next_received = false;       // what follows belongs to the next membership: it is not read here
    bool next_sent = false;           // nothing more is sent here
    Nanoseconds newest_frame_at = 0;  // when the newest frame came
    Nanoseconds asked_at = 0,
                answered_ask_at = 0;  // when it was asked, and when it was for an answer that came
    bool answer_due = false;          // an answer is due
    bool ask_due = false;             // its question is not sent yet
    Nanoseconds report_loss_at =
        0;                      // when to report its rank as lost; 0: alive; INT64_MAX: reported, or has left
    size_t received_bytes = 0;  // bytes of `in`
    ControlBytes in;
    std::vector<unsigned char> out;  // bytes that the kernel did not accept
    bool open() const { return fd >= 0 && !ended && !next_received; }
    bool writable() const { return fd >= 0 && !ended; }
  };

  size_t unanswerable(const Fault& fault) const;
  void serve();
  void serve_to_the_end();
  void drain_goodbyes(std::unique_lock<std::mutex>& lock);
  void wait(std::unique_lock<std::mutex>& lock);
  std::vector<int> find_deaths();
  void send_due_frames();
  void read_from(int peer);
  void handle(int peer, const ControlFrame& frame);
  void refuse(int peer, const FrameError& bad);
  void send_to(int peer, ControlKind kind);
  void flush(ControlConnection& connection);
  bool handed_over() const;
  void report_loss_after(int peer, Nanoseconds grace);
  static bool may_be_a_cut(const ControlConnection& connection);
  void report(int peer, Fault fault);
  bool no_reporter_left(int peer) const;
  void answered(ControlConnection& connection);
  Nanoseconds time_to_next_loss() const;

  GroupState& group_;
  const PeerProcesses& peers_;
  const int rank_;
  std::mutex mutex_;
  std::condition_variable answer_arrived_;
  std::vector<ControlConnection> connections_;  // guarded by mutex_
  bool leaving_ = false, abort_sent_ = false, located_ = false;
  bool announce_ = false, propose_ = false;
  std::vector<bool> next_members_;  // by the next membership; empty: there is none yet
  Nanoseconds hand_over_until_ = 0;
  size_t answers_due_ = 0;           // answers that have not arrived
  std::vector<bool> reported_dead_;  // ranks of this host whose death was seen
  std::thread thread_;
};

}  // namespace unisono
