// LogGOPSim's model (Hoefler, Schneider, Lumsdaine, HPDC 2010): one flat network, whole nanoseconds. A
// message of s bytes occupies its sender's processor for o + (s-1) O and its network interface for g + (s-1)
// G; its first byte arrives after o + L, and the receiver is then occupied for o + (s-1) max(O, G). The same
// program gives the same integers as that simulator, in the same order of events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "simulator/queue.hpp"

namespace unisono::simulator {

struct LogGops {
  uint64_t L = 0, o = 0, g = 0, G = 0, O = 0, S = 0;  // S: larger messages wait until they are asked for
};

struct GoalOperation {
  enum GoalKind : uint32_t { kSend = 1, kRecv = 2, kCalc = 3 };
  GoalKind kind = kCalc;
  uint64_t size = 0;  // bytes; of a calculation nanoseconds
  uint32_t peer = 0, tag = 0, cpu = 0, nic = 0;
  std::vector<uint32_t> requires_done, requires_started;  // operations of the same rank, by number
};

struct GoalStuck {
  uint32_t rank, operation;
};

struct GoalOutcome {
  std::vector<uint64_t> ends;  // of each rank
  uint64_t messages = 0;
  std::vector<GoalStuck> stuck;  // operations that never end
};

class Goal {
 public:
  static constexpr uint32_t kAny = UINT32_MAX;  // a peer or a tag that matches all

  Goal(std::vector<std::vector<GoalOperation>> ranks, LogGops model);
  // poll: called now and then; it throws to end the run.
  GoalOutcome run(const std::function<void()>& poll);

 private:
  enum GoalEventKind : uint32_t { kMessage = 4 };
  struct LogGopsEvent {
    uint64_t time, order, size;
    uint32_t kind, rank, peer, operation, tag, cpu, nic;
    bool before(const LogGopsEvent& other) const {
      return time != other.time ? time < other.time : order < other.order;
    }
  };
  struct PendingMatch {
    uint64_t order;
    uint32_t peer, tag, operation;
  };
  // What waits for its counterpart, the oldest first. What names its peer and its tag is found at once.
  class MatchQueue {
   public:
    void push(uint32_t peer, uint32_t tag, uint32_t operation);
    bool take(uint32_t peer, uint32_t tag, PendingMatch& found);

   private:
    using MatchKey = std::tuple<uint32_t, uint32_t, uint64_t>;  // peer, tag, order

    uint64_t order_ = 0;
    std::map<MatchKey, uint32_t> named_;
    std::deque<PendingMatch> any_;  // whose peer or tag is kAny
  };
  struct GoalRank {
    std::vector<GoalOperation> operations;
    std::vector<uint32_t> missing;  // how many operations each one still waits for
    std::vector<std::vector<uint32_t>> after_done, after_started;
    std::vector<bool> done;
    std::vector<uint32_t> free;                        // operations that may begin now
    std::vector<uint64_t> processor, sends, receives;  // when they are free again
    MatchQueue posted, unexpected;
  };

  void link_operations(GoalRank& rank);
  void issue(uint32_t rank, uint64_t time, bool at_start);
  void started(uint32_t rank, uint32_t operation);
  void finished(uint32_t rank, uint32_t operation);
  void release(GoalRank& rank, const std::vector<uint32_t>& operations);
  bool calculate(LogGopsEvent& event);
  bool send(LogGopsEvent& event);
  bool receive(LogGopsEvent& event);
  bool arrive(LogGopsEvent& event);
  void confirm(uint32_t sender, const LogGopsEvent& event, uint32_t operation);

  std::vector<GoalRank> ranks_;
  LogGops model_;
  Queue<LogGopsEvent> queue_;
  uint64_t order_ = 0, messages_ = 0;
  std::vector<uint32_t> touched_;  // ranks that started or finished something
};

}  // namespace unisono::simulator
