// A run of the programs of all ranks on a network, event by event.
//
// An actor runs one program: a rank, or one of several streams of a rank. It sends, takes what others sent,
// reduces, copies and computes, in the order of its program. Its clock runs ahead of the events: only the
// beginnings and ends of flows are events, because only they depend on what others do at the same time.
//
// Under a symmetry of the network one rank of each orbit is simulated (`Digits`).
//
// Where a host has fewer cores than actors, work is a flow, too: all that work at the same time share the
// cores max-min fairly, and nobody has more than one. Clocks do not run ahead there.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "simulator/codes.hpp"
#include "simulator/flows.hpp"
#include "simulator/queue.hpp"

namespace unisono::simulator {

// What messages cost a rank, in seconds (LogGOPS). `rendezvous_bytes` 0: never. Those within a host may have
// other costs: it writes the bytes once for all its receivers there, and a reduction reads them where they
// are. Bytes that it sends in place it does not write: receivers copy them from its memory, at a rate of
// their own, and once it waits for that only it copies, too.
struct MessageCosts {
  double o_send = 0, o_recv = 0, o_per_byte = 0, gap = 0, rendezvous_bytes = 0, reduce_per_byte = 0,
         copy_per_byte = 0;
  double slowdown = 1, delay = 0;  // factor of all above and of computing; when the rank begins
  double inside_send = 0, inside_recv = 0, inside_per_byte = 0;
  double inside_write_per_byte = 0;     // of the sender; inside_per_byte is the receiver's
  double inside_in_place_per_byte = 0;  // of the receiver of bytes that are sent in place
  double wake = 0;                      // of a rank that had to wait for a message
};

// One digit of a rank's number; `moved`: one rank stands for all that differ in this digit only.
struct Digit {
  uint32_t size;
  bool moved;
};

// Where programs and routes come from.
class ProgramSource {
 public:
  virtual ~ProgramSource() = default;
  // The next codes of an actor, into `codes`, and how often they run; 0: it has no more.
  virtual uint32_t next(uint32_t actor, std::vector<int32_t>& codes) = 0;
  // The links between two ranks, how many flows of the orbit cross each, and the latency of all.
  virtual double route(uint32_t source, uint32_t target, std::vector<RouteLink>& links) = 0;
  // Called now and then; throws to end the run.
  virtual void poll() = 0;
};

struct Setup {
  uint32_t ranks = 0, streams = 1;
  uint32_t extra = 0;         // endpoints beyond the ranks that run programs, too: switches that add
  std::vector<Digit> digits;  // of a rank's number, the most significant first; none: no symmetry
  std::vector<double> rates;  // of the links
  std::vector<MessageCosts> costs;
  std::vector<uint32_t> costs_index;  // by rank and extra endpoint; empty: all have the first
  std::vector<uint32_t> hosts;    // of each rank, where costs within a host are others; empty: they are not
  std::vector<double> latencies;  // of the links, where switches store and forward; empty: they do not
  std::vector<double> bursts;     // of the links: what they pass at once after a pause; empty: nothing
  std::vector<RouteLink> cores;   // the cores of each rank's host, one of `rates`; kNoLink: it has enough
  uint32_t window = 16;           // messages that an edge holds
  uint64_t most_spans = 0;        // of the timeline; 0: none is kept
};

// How the seconds of the longest chain divide.
struct Chain {
  double latency = 0, transfer = 0, overhead = 0, compute = 0;
};

// What an actor did, for a timeline.
struct ActorSpan {
  uint32_t actor;
  int32_t code;
  uint64_t step;
  double start, end;
};

// An actor that waits for ever.
struct Stuck {
  uint32_t actor, peer;  // peer: whom it waits for
  bool sends;            // it waits until the peer takes a message
  uint64_t step;
  int64_t event;  // that it waits for, or -1
  LinkId link;    // that its message waits for, or kNoLink
};

struct SimulationOutcome {
  double seconds = 0;
  uint64_t messages = 0, events = 0;
  uint32_t last = 0;  // the actor that ended last
  Chain chain;
  std::vector<uint32_t> actors;    // their numbers: stream * (ranks + extra) + rank
  std::vector<double> ends, busy;  // of each: when it ended, and for how long it worked itself
  std::vector<Usage> links;
  std::vector<ActorSpan> spans;
  std::vector<Stuck> stuck;
};

class Simulation {
 public:
  Simulation(Setup setup, ProgramSource& programs);
  SimulationOutcome run();

 private:
  using EdgeId = uint32_t;
  using MessageId = uint32_t;
  static constexpr uint32_t kNone = UINT32_MAX;

  struct SimulationEvent {
    double time;
    uint32_t id;       // of an edge whose message begins, or of a bundle of flows
    uint32_t version;  // of the bundle's next end, or kBegin, kBeginWork, kBeginHop
    bool before(const SimulationEvent& other) const { return time < other.time; }
  };
  static constexpr uint32_t kBegin = UINT32_MAX;
  static constexpr uint32_t kBeginWork = UINT32_MAX - 1;  // id: an actor
  static constexpr uint32_t kBeginHop = UINT32_MAX - 2;   // id: a hop
  static constexpr uint32_t kWorkFlow = 1U << 31;         // in the number of a flow: that of an actor
  static constexpr uint32_t kHopFlow = 1U << 30;          // that of a hop
  static constexpr BundleId kEnoughCores = UINT32_MAX;

  struct Message {
    double departs = 0, bytes = 0, arrives = -1;  // -1: it has not arrived
    double asked = -1;                            // by its receiver; for a rendezvous
    uint32_t chunks = 0;
    MessageId next = kNone;
    bool rendezvous = false, in_place = false;
    Chain chain;
  };
  struct Edge {
    uint32_t sender = 0, receiver = 0;  // actors by place
    uint32_t source = 0;                // the number of the sender, where another actor stands for it
    double latency = 0;
    bool direct = false;                                    // no link is crossed
    bool inside = false;                                    // a host, which has costs of its own
    uint32_t hop = kNone;                                   // after the first link, where switches store
    MessageId first = kNone, flying = kNone, last = kNone;  // to be taken; not arrived; the newest
    uint32_t outstanding = 0;
    BundleId bundle = 0;
    uint32_t chunks_taken = 0;              // of the first message
    bool begun = false, scheduled = false;  // the flying message: its flow runs; its beginning is an event
    bool receiver_waits = false, sender_waits = false;
    double asked = -1;  // since when its receiver waits
  };
  // A further link of an edge, whose messages a switch stores before it.
  struct HopMessage {
    MessageId id;
    double arrived;
  };
  struct Hop {
    EdgeId edge;
    BundleId bundle;
    double latency;
    uint32_t next = kNone;
    std::deque<HopMessage> stored;  // the first one flies
  };
  struct Actor {
    uint32_t number = 0, rank = 0;
    double now = 0, sends_again = 0, busy = 0;
    double chunk = 0;
    std::vector<int32_t> codes;
    size_t at = 0;
    uint32_t runs = 0;                     // of these codes, this one included
    uint32_t repeats = 0, peers_done = 0;  // of the current code
    uint32_t missing = 0;                  // messages that the current code waits for
    uint64_t step = 0;
    bool ready = false, done = false;
    BundleId cores = kEnoughCores;
    bool working = false, worked = false;  // on shared cores: a flow runs; it has ended
    double work_s = 0, work_overhead_s = 0, work_since = 0;
    int64_t awaits = -1;
    uint32_t in_place = 0;  // messages that are not copied yet
    bool releases = false;  // it waits until none is left
    double helps_until = 0, copied = 0;
    Chain copied_chain;
    Chain chain;
  };
  struct Happened {
    double time = -1;
    Chain chain;
    std::vector<uint32_t> waiting;
  };

  // programs
  void advance(uint32_t actor);
  bool load(uint32_t actor);
  void connect(Actor& actor);
  bool step(Actor& actor);
  bool send(Actor& actor, int32_t chunks, const int32_t* edges, int32_t count, bool in_place);
  bool take(Actor& actor, int32_t chunks, int32_t additions, const int32_t* edges, int32_t count);
  bool take_once(Actor& actor, int32_t additions, const int32_t* edges, int32_t count);
  bool begin_taking(Actor& actor, int32_t additions, const int32_t* edges, int32_t count);
  bool all_here(Actor& actor, const int32_t* edges, int32_t count);
  bool work(Actor& actor, double overhead_s, double compute_s);
  void end_work(uint32_t actor);
  void end_flow(uint32_t flow);
  double send_overhead(const Actor& actor, const int32_t* edges, double bytes, bool in_place) const;
  double copy_in_place(const Actor& actor, const Edge& edge, double bytes);
  bool release_all(Actor& actor);
  bool await(Actor& actor, int32_t event);
  void signal(Actor& actor, int32_t event);
  void wake(uint32_t actor);
  void note(const Actor& actor, Code code, double start);
  // messages
  EdgeId edge_between(uint32_t sender, uint32_t receiver);
  EdgeId add_edge(uint32_t sender, uint32_t receiver);
  void post(EdgeId edge, Actor& actor, double bytes, uint32_t chunks, bool in_place);
  void launch(EdgeId edge, double earliest);
  void begin(EdgeId edge);
  void arrive(EdgeId edge, double left);
  void forward(uint32_t hop, MessageId id, double time);
  void end_hop(uint32_t hop);
  void deliver(EdgeId edge, MessageId id, double time);
  void add_hops(Edge& edge, EdgeId number);
  BundleId bundle_of(const std::vector<RouteLink>& route);
  void release(EdgeId edge, const Actor& actor);
  void ask(EdgeId edge, double time);
  bool has_arrived(EdgeId edge) const;
  MessageId new_message();
  // symmetry
  void place_actors();
  uint32_t image(uint32_t rank, uint32_t origin) const;
  bool stands_for_all(uint32_t rank) const;

  void handle(const SimulationEvent& event);
  void run_ready();
  SimulationOutcome finish();
  LinkId lost_link(const Edge& edge) const;
  void find_stuck(SimulationOutcome& outcome) const;
  const MessageCosts& costs(const Actor& actor) const {
    return setup_.costs_index.empty() ? setup_.costs[0] : setup_.costs[setup_.costs_index[actor.rank]];
  }

  Setup setup_;
  ProgramSource& programs_;
  Flows flows_;
  std::vector<uint32_t> versions_;  // of the next end of each bundle
  std::vector<uint32_t> ended_;     // flows
  Queue<SimulationEvent> queue_;
  double now_ = 0, end_ = 0;
  uint64_t messages_ = 0, events_ = 0, steps_ = 0;
  uint32_t endpoints_ = 0;
  std::vector<Actor> actors_;
  std::vector<uint32_t> places_;  // of an actor's number; kNone where another rank stands for it
  std::vector<Edge> edges_;
  std::vector<Hop> hops_;
  std::vector<Message> pool_;
  std::vector<RouteLink> route_;
  MessageId free_ = kNone;
  std::unordered_map<uint64_t, EdgeId> known_;
  std::unordered_map<uint64_t, Happened> happened_;
  std::vector<uint32_t> ready_;
  std::vector<ActorSpan> spans_;
};

}  // namespace unisono::simulator
