// A run of a plan in the usual cost model: a rank sends one message at a time and takes one at a time, a
// message of l bytes takes a + b l, and the messages of a host pass its one link one after the other.
// `costs/plan_cost.py` counts formulas with it; contention as on a real network is in flows.hpp.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "simulator/queue.hpp"

namespace unisono::simulator {

// The cost of a message: seconds, and seconds per chunk.
struct PortEdge {
  double latency = 0, per_chunk = 0;
};

struct PortsSetup {
  std::vector<std::vector<int32_t>> programs;  // of each rank: the codes kSend, kRecv, kReduce, kCopy
  std::vector<int64_t> hosts;                  // of each rank; empty: one host
  PortEdge inside, between;
  bool has_between = false;
  double reduce_s = 0;        // of one more contribution to a chunk
  bool one_at_a_time = true;  // false: a rank sends to all others at once
  bool traced = false;
};

struct PortMessage {
  uint32_t sender, receiver;
  uint64_t step;
  uint32_t sends;
  double end;
};

struct PortsOutcome {
  double seconds = 0;
  std::vector<PortMessage> messages;      // in the order in which they leave
  std::vector<std::vector<double>> done;  // done[rank][step]
  int64_t stuck_rank = -1;
  uint64_t stuck_step = 0;
};

class Ports {
 public:
  explicit Ports(PortsSetup setup);
  // poll: called now and then; it throws to end the run.
  PortsOutcome run(const std::function<void()>& poll);

 private:
  enum PortEventKind : uint32_t {
    kArrives,
    kAsks
  };  // at equal times, a port is freed before it is requested
  struct PortEvent {
    double time;
    PortEventKind kind;
    uint32_t distance, sender, receiver, count;
    bool before(const PortEvent& other) const;
  };
  struct PortRequest {
    double time;
    uint32_t distance, rank;
    bool before(const PortRequest& other) const;
  };
  struct Outgoing {
    uint32_t receiver, count;
    double ready;
    uint64_t step;
  };
  struct PortRank {
    size_t at = 0;
    int32_t repeats = 0;  // of the current code
    uint64_t step = 0;
    double now = 0;
    bool taking = false;
    std::deque<Outgoing> outbox;
    Queue<PortRequest> waiting;
  };

  void advance(uint32_t rank);
  bool take(uint32_t number, const int32_t* sources, int32_t count, int32_t additions);
  void send(uint32_t sender, uint32_t receiver, uint32_t count);
  void ask(uint32_t sender, uint32_t receiver, double time);
  void start_first(uint32_t sender, double time);
  double start(uint32_t sender, uint32_t receiver, uint32_t count, double time);
  void arrive(uint32_t sender, uint32_t receiver, uint32_t count, double time);
  void release(uint32_t sender, uint32_t receiver, double time);
  void push(double time, PortEventKind kind, uint32_t sender, uint32_t receiver, uint32_t count);
  void mark_done(uint32_t rank, uint64_t steps);
  uint32_t distance(uint32_t sender, uint32_t receiver) const;
  std::deque<double>& edge(uint32_t sender, uint32_t receiver);

  PortsSetup setup_;
  std::vector<PortRank> ranks_;
  std::map<uint64_t, std::deque<double>> arrived_;
  std::map<int64_t, double> free_out_, free_in_;  // when a host's link is free again
  Queue<PortEvent> queue_;
  PortsOutcome outcome_;
};

}  // namespace unisono::simulator
