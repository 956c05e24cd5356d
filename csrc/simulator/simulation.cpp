#include "simulator/simulation.hpp"

#include <algorithm>
#include <stdexcept>

namespace unisono::simulator {

namespace {

constexpr uint64_t kPollEvents = 1 << 16;

uint64_t pair_of(uint32_t one, uint32_t other) { return static_cast<uint64_t>(one) << 32 | other; }

}  // namespace

Simulation::Simulation(Setup setup, ProgramSource& programs)
    : setup_(std::move(setup)),
      programs_(programs),
      flows_(setup_.rates),
      endpoints_(setup_.ranks + setup_.extra) {
  place_actors();
}

void Simulation::place_actors() {
  places_.assign(static_cast<size_t>(endpoints_) * setup_.streams, kNone);
  for (uint32_t number = 0; number < places_.size(); ++number) {
    const uint32_t rank = number % endpoints_;
    if (rank < setup_.ranks && !stands_for_all(rank)) continue;
    places_[number] = static_cast<uint32_t>(actors_.size());
    Actor actor;
    actor.number = number;
    actor.rank = rank;
    actors_.push_back(std::move(actor));
    actors_.back().now = costs(actors_.back()).delay;
    actors_.back().chain.compute = actors_.back().busy = actors_.back().now;
  }
}

// ---- symmetry -----------------------------------------------------------------------------------------

bool Simulation::stands_for_all(uint32_t rank) const {
  for (size_t digit = setup_.digits.size(); digit-- > 0; rank /= setup_.digits[digit].size)
    if (setup_.digits[digit].moved && rank % setup_.digits[digit].size != 0) return false;
  return true;
}

// Where `rank` lies after the shift that maps `origin` to the rank that stands for it.
uint32_t Simulation::image(uint32_t rank, uint32_t origin) const {
  if (rank >= setup_.ranks) return rank;
  uint32_t found = 0, unit = 1;
  for (size_t number = setup_.digits.size(); number-- > 0;) {
    const auto [size, moved] = setup_.digits[number];
    const uint32_t digit = rank % size;
    found += unit * (moved ? (digit + size - origin % size) % size : digit);
    unit *= size;
    rank /= size;
    origin /= size;
  }
  return found;
}

Simulation::EdgeId Simulation::edge_between(uint32_t sender, uint32_t receiver) {
  if (!setup_.digits.empty()) {
    const uint32_t from = sender % endpoints_, to = receiver % endpoints_;
    const uint32_t moved_sender = to < setup_.ranks ? image(from, to) : from;
    const uint32_t moved_receiver = to < setup_.ranks ? image(to, to) : to;
    sender = sender - from + moved_sender;
    receiver = receiver - to + moved_receiver;
  }
  const auto [found, added] =
      known_.try_emplace(pair_of(sender, receiver), static_cast<EdgeId>(edges_.size()));
  return added ? add_edge(sender, receiver) : found->second;
}

Simulation::EdgeId Simulation::add_edge(uint32_t sender, uint32_t receiver) {
  const uint32_t from = sender % endpoints_, to = receiver % endpoints_;
  Edge edge;
  edge.sender = places_[sender - from + (setup_.digits.empty() ? from : image(from, from))];
  edge.receiver = places_[receiver];
  edge.source = sender;
  route_.clear();
  edge.latency = programs_.route(from, to, route_);
  for (const RouteLink& crossing : route_)
    if (crossing.link >= setup_.rates.size())
      throw std::invalid_argument("a route names a link that is not there");
  edge.direct = route_.empty();
  edge.bundle = flows_.add(route_);
  if (edge.bundle >= versions_.size()) versions_.resize(edge.bundle + 1);
  edges_.push_back(edge);
  return static_cast<EdgeId>(edges_.size() - 1);
}

// ---- programs -----------------------------------------------------------------------------------------

bool Simulation::load(uint32_t place) {
  programs_.poll();
  Actor& actor = actors_[place];
  actor.codes.clear();
  actor.at = 0;
  actor.runs = programs_.next(actor.number, actor.codes);
  if (actor.runs == 0) {
    actor.codes.shrink_to_fit();
    return false;
  }
  connect(actor);
  return true;
}

// Replaces the ranks in an actor's codes by edges, and checks the codes.
void Simulation::connect(Actor& actor) {
  check_codes(actor.codes, [&](int32_t& peer, bool sends) {
    if (peer < 0 || static_cast<uint32_t>(peer) >= places_.size() ||
        static_cast<uint32_t>(peer) == actor.number)
      throw std::invalid_argument("a program names a rank that is not there");
    const auto other = static_cast<uint32_t>(peer);
    peer =
        static_cast<int32_t>(sends ? edge_between(actor.number, other) : edge_between(other, actor.number));
  });
}

void Simulation::wake(uint32_t place) {
  if (actors_[place].ready || actors_[place].done) return;
  actors_[place].ready = true;
  ready_.push_back(place);
}

void Simulation::run_ready() {
  while (!ready_.empty()) {
    const uint32_t place = ready_.back();
    ready_.pop_back();
    actors_[place].ready = false;
    advance(place);
  }
}

// Runs an actor until it has to wait.
void Simulation::advance(uint32_t place) {
  Actor& actor = actors_[place];
  for (;;) {
    if (actor.at == actor.codes.size()) {
      if (actor.runs > 1) {
        --actor.runs;
        actor.at = 0;
        actor.step = 0;
      } else if (!load(place)) {
        actor.done = true;
        end_ = std::max(end_, actor.now);
        return;
      }
      continue;
    }
    if (++steps_ % kPollEvents == 0) programs_.poll();
    if (!step(actor)) return;
  }
}

// Runs one step; false: it has to wait.
bool Simulation::step(Actor& actor) {
  const int32_t* codes = actor.codes.data() + actor.at;
  const auto code = static_cast<Code>(codes[0]);
  const double start = actor.now;
  switch (code) {
    case Code::kSend:
      if (!send(actor, codes[1], codes + 3, codes[2])) return false;
      break;
    case Code::kRecv:
      if (!take(actor, codes[1], 0, codes + 2, 1)) return false;
      break;
    case Code::kReduce:
      if (!take(actor, codes[1], codes[2], codes + 4, codes[3])) return false;
      break;
    case Code::kCopy:
      work(actor, costs(actor).copy_per_byte * actor.chunk * codes[1], actor.chain.compute);
      actor.step += static_cast<uint64_t>(codes[1]);
      break;
    case Code::kChunk:
      actor.chunk = as_double(codes + 1);
      break;
    case Code::kCompute:
      work(actor, as_double(codes + 1), actor.chain.compute);
      ++actor.step;
      break;
    case Code::kSignal:
      signal(actor, codes[1]);
      break;
    case Code::kAwait:
      if (!await(actor, codes[1])) return false;
      break;
    case Code::kSegment:
      actor.step = 0;
      break;
  }
  actor.at += length_of(codes);
  if (spans_.size() < setup_.most_spans) note(actor, code, start);
  return true;
}

void Simulation::work(Actor& actor, double seconds, double& into) {
  seconds *= costs(actor).slowdown;
  actor.now += seconds;
  actor.busy += seconds;
  into += seconds;
}

bool Simulation::send(Actor& actor, int32_t chunks, const int32_t* edges, int32_t count) {
  const MessageCosts& cost = costs(actor);
  const double bytes = actor.chunk * chunks;
  for (; actor.peers_done < static_cast<uint32_t>(count); ++actor.peers_done) {
    const auto edge = static_cast<EdgeId>(edges[actor.peers_done]);
    if (edges_[edge].outstanding >= setup_.window) {
      edges_[edge].sender_waits = true;
      return false;
    }
    if (actor.sends_again > actor.now) {
      actor.chain.overhead += actor.sends_again - actor.now;
      actor.now = actor.sends_again;
    }
    actor.sends_again = actor.now + cost.gap * cost.slowdown;
    work(actor, cost.o_send + cost.o_per_byte * bytes, actor.chain.overhead);
    post(edge, actor, bytes, static_cast<uint32_t>(chunks));
  }
  actor.peers_done = 0;
  actor.step += static_cast<uint64_t>(chunks);
  return true;
}

// Takes `chunks` from each edge, one after the other, and adds them.
bool Simulation::take(Actor& actor, int32_t chunks, int32_t additions, const int32_t* edges, int32_t count) {
  for (; actor.repeats < static_cast<uint32_t>(chunks); ++actor.repeats, ++actor.step) {
    if (++steps_ % kPollEvents == 0) programs_.poll();
    if (!take_once(actor, additions, edges, count)) return false;
  }
  actor.repeats = 0;
  return true;
}

bool Simulation::has_arrived(EdgeId edge) const {
  const MessageId first = edges_[edge].first;
  return first != kNone && pool_[first].arrives >= 0;
}

// Whether every edge holds an arrived message; asks for those that do not. The last one of them that arrives
// wakes the actor, so the edges are looked through twice at most.
bool Simulation::all_here(Actor& actor, const int32_t* edges, int32_t count) {
  for (int32_t number = 0; number < count; ++number) {
    const auto edge = static_cast<EdgeId>(edges[number]);
    if (has_arrived(edge) || edges_[edge].receiver_waits) continue;
    ++actor.missing;
    ask(edge, actor.now);  // a message that crosses no link arrives at once
  }
  return actor.missing == 0;
}

bool Simulation::take_once(Actor& actor, int32_t additions, const int32_t* edges, int32_t count) {
  if (!all_here(actor, edges, count)) return false;
  const MessageCosts& cost = costs(actor);
  uint32_t fresh = 0, fresh_chunks = 0;  // whole numbers: the sum does not depend on the order
  for (int32_t number = 0; number < count; ++number) {
    const Edge& edge = edges_[static_cast<EdgeId>(edges[number])];
    const Message& message = pool_[edge.first];
    if (message.arrives > actor.now) {
      actor.now = message.arrives;
      actor.chain = message.chain;
    }
    if (edge.chunks_taken > 0) continue;
    ++fresh;
    fresh_chunks += message.chunks;
  }
  work(actor, cost.o_recv * fresh + cost.o_per_byte * actor.chunk * fresh_chunks, actor.chain.overhead);
  work(actor, cost.reduce_per_byte * actor.chunk * additions, actor.chain.compute);
  for (int32_t number = 0; number < count; ++number) {
    const auto edge = static_cast<EdgeId>(edges[number]);
    if (!has_arrived(edge)) throw std::invalid_argument("a step names a rank twice");
    if (++edges_[edge].chunks_taken >= pool_[edges_[edge].first].chunks) release(edge, actor);
  }
  return true;
}

void Simulation::signal(Actor& actor, int32_t event) {
  Happened& happened = happened_[pair_of(actor.rank, static_cast<uint32_t>(event))];
  happened.time = actor.now;
  happened.chain = actor.chain;
  for (const uint32_t waiting : happened.waiting) wake(waiting);
  happened.waiting.clear();
}

bool Simulation::await(Actor& actor, int32_t event) {
  Happened& happened = happened_[pair_of(actor.rank, static_cast<uint32_t>(event))];
  if (happened.time < 0) {
    happened.waiting.push_back(places_[actor.number]);
    actor.awaits = event;
    return false;
  }
  actor.awaits = -1;
  if (happened.time > actor.now) {
    actor.now = happened.time;
    actor.chain = happened.chain;
  }
  return true;
}

void Simulation::note(const Actor& actor, Code code, double start) {
  if (code == Code::kChunk || code == Code::kSegment || actor.now == start) return;
  spans_.push_back({actor.number, static_cast<int32_t>(code), actor.step, start, actor.now});
}

// ---- messages -----------------------------------------------------------------------------------------

Simulation::MessageId Simulation::new_message() {
  if (free_ == kNone) {
    pool_.emplace_back();
    return static_cast<MessageId>(pool_.size() - 1);
  }
  const MessageId found = free_;
  free_ = pool_[found].next;
  pool_[found] = Message{};
  return found;
}

void Simulation::post(EdgeId number, Actor& actor, double bytes, uint32_t chunks) {
  const double least = costs(actor).rendezvous_bytes;
  const MessageId id = new_message();
  Message& message = pool_[id];
  message.departs = actor.now;
  message.bytes = bytes;
  message.chunks = chunks;
  message.chain = actor.chain;
  message.rendezvous = least > 0 && bytes >= least;
  Edge& edge = edges_[number];
  if (edge.first == kNone) edge.first = id;
  if (edge.last != kNone) pool_[edge.last].next = id;
  edge.last = id;
  ++edge.outstanding;
  ++messages_;
  if (edge.flying != kNone) return;
  edge.flying = id;
  launch(number, actor.now);
}

// The next message of an edge leaves, at `earliest` or later.
void Simulation::launch(EdgeId number, double earliest) {
  Edge& edge = edges_[number];
  const Message& message = pool_[edge.flying];
  double time = std::max(message.departs, earliest);
  if (message.rendezvous) {  // a request goes there, the receiver's answer comes back
    if (!edge.receiver_waits || edge.first != edge.flying) return;
    time = std::max(time + edge.latency, edge.asked) + edge.latency;
  }
  if (edge.direct || message.bytes <= 0) {
    arrive(number, time);
    return;
  }
  edge.scheduled = true;
  queue_.push({time, number, kBegin});
}

// The receiver waits for this edge, from `time` on.
void Simulation::ask(EdgeId number, double time) {
  Edge& edge = edges_[number];
  edge.receiver_waits = true;
  edge.asked = time;
  if (edge.flying != kNone && !edge.scheduled && pool_[edge.flying].rendezvous)
    launch(number, pool_[edge.flying].departs);
}

// The last byte of the flying message has left.
void Simulation::arrive(EdgeId number, double left) {
  Edge& edge = edges_[number];
  Message& message = pool_[edge.flying];
  message.arrives = left + edge.latency;
  message.chain.transfer += left - message.departs;
  message.chain.latency += edge.latency;
  edge.scheduled = false;
  edge.flying = message.next;
  if (edge.receiver_waits) {
    edge.receiver_waits = false;
    if (--actors_[edge.receiver].missing == 0) wake(edge.receiver);
  }
  if (edge.flying != kNone) launch(number, left);
}

// The receiver has taken all of the first message.
void Simulation::release(EdgeId number, const Actor& actor) {
  Edge& edge = edges_[number];
  const MessageId id = edge.first;
  edge.first = pool_[id].next;
  if (edge.last == id) edge.last = kNone;
  edge.chunks_taken = 0;
  --edge.outstanding;
  pool_[id].next = free_;
  free_ = id;
  if (!edge.sender_waits) return;
  edge.sender_waits = false;
  Actor& sender = actors_[edge.sender];
  if (sender.now < actor.now) {
    sender.now = actor.now;
    sender.chain = actor.chain;
  }
  wake(edge.sender);
}

// ---- the run ------------------------------------------------------------------------------------------

void Simulation::handle(const SimulationEvent& event) {
  if (event.version == kBegin) {
    const Edge& edge = edges_[event.id];
    flows_.begin(edge.bundle, event.id, pool_[edge.flying].bytes, now_);
  } else if (event.version == versions_[event.id]) {
    ++versions_[event.id];
    ended_.clear();
    flows_.end(event.id, now_, ended_);
    for (const EdgeId edge : ended_) arrive(edge, now_);
  }
}

SimulationOutcome Simulation::run() {
  for (size_t place = actors_.size(); place-- > 0;) wake(static_cast<uint32_t>(place));
  run_ready();
  for (;;) {
    if (!flows_.completed() && (queue_.empty() || queue_.top().time > now_))
      flows_.settle(now_, [this](BundleId bundle, double end) {
        if (++versions_[bundle] == kBegin) versions_[bundle] = 0;
        queue_.push({end, bundle, versions_[bundle]});
      });
    if (queue_.empty()) break;
    const SimulationEvent event = queue_.pop();
    now_ = event.time;
    handle(event);
    run_ready();
    if (++events_ % kPollEvents == 0) programs_.poll();
  }
  return finish();
}

SimulationOutcome Simulation::finish() {
  SimulationOutcome outcome;
  outcome.seconds = end_;
  outcome.messages = messages_;
  outcome.events = events_;
  double latest = -1;
  for (const Actor& actor : actors_) {
    outcome.actors.push_back(actor.number);
    outcome.ends.push_back(actor.now);
    outcome.busy.push_back(actor.busy);
    if (actor.now > latest) {
      latest = actor.now;
      outcome.last = actor.number;
      outcome.chain = actor.chain;
    }
  }
  outcome.links = flows_.usage(now_);
  outcome.spans = std::move(spans_);
  find_stuck(outcome);
  return outcome;
}

// Every actor that is not done: whom it waits for, and the lost link that its message waits for.
void Simulation::find_stuck(SimulationOutcome& outcome) const {
  std::vector<uint32_t> slots(actors_.size(), kNone);
  for (uint32_t place = 0; place < actors_.size(); ++place) {
    const Actor& actor = actors_[place];
    if (actor.done) continue;
    slots[place] = static_cast<uint32_t>(outcome.stuck.size());
    outcome.stuck.push_back({actor.number, actor.number, false, actor.step, actor.awaits, kNoLink});
  }
  for (EdgeId number = 0; number < edges_.size() && !outcome.stuck.empty(); ++number) {
    const Edge& edge = edges_[number];
    for (const bool sends : {false, true}) {
      const uint32_t waits = sends ? edge.sender : edge.receiver;
      if (!(sends ? edge.sender_waits : edge.receiver_waits) || slots[waits] == kNone) continue;
      Stuck& stuck = outcome.stuck[slots[waits]];
      const LinkId lost = edge.flying == kNone ? kNoLink : flows_.lost_link(edge.bundle);
      if (stuck.link != kNoLink || (stuck.peer != stuck.actor && lost == kNoLink)) continue;
      stuck.peer = sends ? actors_[edge.receiver].number : edge.source;
      stuck.sends = sends;
      stuck.link = lost;
    }
  }
}

}  // namespace unisono::simulator
