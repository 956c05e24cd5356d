#include "simulator/simulation.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace unisono::simulator {

namespace {

uint64_t pair_of(uint32_t one, uint32_t other) { return static_cast<uint64_t>(one) << 32 | other; }

}  // namespace

Simulation::Simulation(Setup setup, ProgramSource& programs)
    : setup_(std::move(setup)),
      programs_(programs),
      flows_(setup_.rates, setup_.bursts),
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
    if (rank >= setup_.cores.size() || setup_.cores[rank].link == kNoLink) continue;
    actors_.back().cores = flows_.add({setup_.cores[rank]}, 1.0);
    versions_.resize(std::max<size_t>(versions_.size(), actors_.back().cores + 1));
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
  edge.inside =
      from < setup_.hosts.size() && to < setup_.hosts.size() && setup_.hosts[from] == setup_.hosts[to];
  if (setup_.latencies.empty() || route_.size() < 2)
    edge.bundle = bundle_of(route_);
  else
    add_hops(edge, static_cast<EdgeId>(edges_.size()));
  edges_.push_back(edge);
  if (edges_.size() > kHopFlow || hops_.size() > kHopFlow) throw std::length_error("too many pairs of ranks");
  return static_cast<EdgeId>(edges_.size() - 1);
}

BundleId Simulation::bundle_of(const std::vector<RouteLink>& route) {
  const BundleId bundle = flows_.add(route);
  if (bundle >= versions_.size()) versions_.resize(bundle + 1);
  return bundle;
}

// An edge whose messages are stored before each link but the first.
void Simulation::add_hops(Edge& edge, EdgeId number) {
  edge.bundle = bundle_of({route_[0]});
  edge.latency = setup_.latencies[route_[0].link];
  edge.hop = static_cast<uint32_t>(hops_.size());
  for (size_t at = 1; at < route_.size(); ++at) {
    const uint32_t next = at + 1 < route_.size() ? static_cast<uint32_t>(hops_.size() + 1) : kNone;
    hops_.push_back({number, bundle_of({route_[at]}), setup_.latencies[route_[at].link], next, {}});
  }
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
  if (actor.working) return false;
  const int32_t* codes = actor.codes.data() + actor.at;
  const auto code = static_cast<Code>(codes[0]);
  const double start = actor.now;
  switch (code) {
    case Code::kSend:
    case Code::kSendInPlace:
      if (!send(actor, codes[1], codes + 3, codes[2], code == Code::kSendInPlace)) return false;
      break;
    case Code::kRecv:
      if (!take(actor, codes[1], 0, codes + 2, 1)) return false;
      break;
    case Code::kReduce:
      if (!take(actor, codes[1], codes[2], codes + 4, codes[3])) return false;
      break;
    case Code::kCopy:
      if (!work(actor, 0, costs(actor).copy_per_byte * actor.chunk * codes[1])) return false;
      actor.step += static_cast<uint64_t>(codes[1]);
      break;
    case Code::kChunk:
      actor.chunk = as_double(codes + 1);
      break;
    case Code::kCompute:
      if (!work(actor, 0, as_double(codes + 1))) return false;
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
    case Code::kUntil:
      actor.now = std::max(actor.now, as_double(codes + 1));
      break;
    case Code::kRelease:
      if (!release_all(actor)) return false;
      break;
  }
  actor.at += length_of(codes);
  if (spans_.size() < setup_.most_spans) note(actor, code, start);
  return true;
}

// The rank is busy for so long, or longer where it shares its core. False: it waits for the end, and is then
// called again, with `worked` set.
bool Simulation::work(Actor& actor, double overhead_s, double compute_s) {
  if (std::exchange(actor.worked, false)) return true;
  const double slowdown = costs(actor).slowdown;
  const double seconds = (overhead_s + compute_s) * slowdown;
  if (actor.cores == kEnoughCores || seconds <= 0) {
    actor.now += seconds;
    actor.busy += seconds;
    actor.chain.overhead += overhead_s * slowdown;
    actor.chain.compute += compute_s * slowdown;
    return true;
  }
  actor.working = true;
  actor.work_s = seconds;
  actor.work_overhead_s = overhead_s * slowdown;
  actor.work_since = actor.now;
  queue_.push({actor.now, places_[actor.number], kBeginWork});
  return false;
}

void Simulation::end_work(uint32_t place) {
  Actor& actor = actors_[place];
  actor.now = now_;
  actor.busy += actor.work_s;
  actor.chain.overhead += actor.work_overhead_s;
  actor.chain.compute += now_ - actor.work_since - actor.work_overhead_s;
  actor.working = false;
  actor.worked = true;
  wake(place);
}

// Waits until the last message in place is copied.
bool Simulation::release_all(Actor& actor) {
  actor.worked = false;  // it has helped to copy
  actor.releases = actor.in_place > 0;
  if (actor.releases) return false;
  if (actor.copied > actor.now) {
    actor.now = actor.copied;
    actor.chain = actor.copied_chain;
  }
  return true;
}

// For how long the receiver of a message in place copies. A sender that waits for nothing else copies half of
// what is left when it begins to wait.
double Simulation::copy_in_place(const Actor& actor, const Edge& edge, double bytes) {
  const double alone = costs(actor).inside_in_place_per_byte * bytes;
  Actor& sender = actors_[edge.sender];
  const double joins = std::max({actor.now, sender.now, sender.helps_until}), end = actor.now + alone;
  if (!sender.releases || sender.working || joins >= end) return alone;
  const double half = (end - joins) / 2;
  if (sender.cores == kEnoughCores) {
    sender.busy += half;
    sender.helps_until = end - half;
  } else {
    sender.now = joins;
    work(sender, half, 0);
  }
  return alone - half;
}

// Of the message to the next receiver of a step. Bytes for ranks of this host are written once.
double Simulation::send_overhead(const Actor& actor, const int32_t* edges, double bytes,
                                 bool in_place) const {
  const MessageCosts& cost = costs(actor);
  if (!edges_[static_cast<EdgeId>(edges[actor.peers_done])].inside)
    return cost.o_send + cost.o_per_byte * bytes;
  bool written = in_place;
  for (uint32_t before = 0; before < actor.peers_done && !written; ++before)
    written = edges_[static_cast<EdgeId>(edges[before])].inside;
  return cost.inside_send + (written ? 0 : cost.inside_write_per_byte * bytes);
}

bool Simulation::send(Actor& actor, int32_t chunks, const int32_t* edges, int32_t count, bool in_place) {
  const MessageCosts& cost = costs(actor);
  const double bytes = actor.chunk * chunks;
  for (; actor.peers_done < static_cast<uint32_t>(count); ++actor.peers_done) {
    const auto edge = static_cast<EdgeId>(edges[actor.peers_done]);
    if (!actor.worked) {
      if (edges_[edge].outstanding >= setup_.window) {
        edges_[edge].sender_waits = true;
        return false;
      }
      if (actor.sends_again > actor.now) {
        actor.chain.overhead += actor.sends_again - actor.now;
        actor.now = actor.sends_again;
      }
      actor.sends_again = actor.now + cost.gap * cost.slowdown;
    }
    if (!work(actor, send_overhead(actor, edges, bytes, in_place), 0)) return false;
    post(edge, actor, bytes, static_cast<uint32_t>(chunks), in_place && edges_[edge].inside);
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
  if (!std::exchange(actor.worked, false)) {
    if (!all_here(actor, edges, count)) return false;
    if (!begin_taking(actor, additions, edges, count)) return false;
  }
  for (int32_t number = 0; number < count; ++number) {
    const auto edge = static_cast<EdgeId>(edges[number]);
    if (!has_arrived(edge)) throw std::invalid_argument("a step names a rank twice");
    if (++edges_[edge].chunks_taken >= pool_[edges_[edge].first].chunks) release(edge, actor);
  }
  return true;
}

// The work of taking a chunk from each edge. False: it has to wait for a core.
bool Simulation::begin_taking(Actor& actor, int32_t additions, const int32_t* edges, int32_t count) {
  const MessageCosts& cost = costs(actor);
  uint32_t fresh = 0, fresh_chunks = 0;  // whole numbers: the sum does not depend on the order
  uint32_t inside = 0, inside_chunks = 0;
  double in_place_s = 0, wake_s = 0;
  const bool copies = count == 1 && additions == 0;  // a reduction of one contribution does, too
  for (int32_t number = 0; number < count; ++number) {
    const Edge& edge = edges_[static_cast<EdgeId>(edges[number])];
    const Message& message = pool_[edge.first];
    if (message.arrives > actor.now) {
      actor.now = message.arrives;
      actor.chain = message.chain;
      wake_s = cost.wake;
    }
    if (edge.chunks_taken > 0) continue;
    (edge.inside ? inside : fresh) += 1;
    if (!edge.inside)
      fresh_chunks += message.chunks;
    else if (copies && !message.in_place)
      inside_chunks += message.chunks;
  }
  for (int32_t number = 0; number < count; ++number)
    if (const Edge& edge = edges_[static_cast<EdgeId>(edges[number])];
        edge.chunks_taken == 0 && pool_[edge.first].in_place)
      in_place_s += copy_in_place(actor, edge, actor.chunk * pool_[edge.first].chunks);
  double overhead_s = wake_s + cost.o_recv * fresh + cost.o_per_byte * actor.chunk * fresh_chunks;
  overhead_s += cost.inside_recv * inside + cost.inside_per_byte * actor.chunk * inside_chunks + in_place_s;
  return work(actor, overhead_s, cost.reduce_per_byte * actor.chunk * additions);
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

void Simulation::post(EdgeId number, Actor& actor, double bytes, uint32_t chunks, bool in_place) {
  const double least = costs(actor).rendezvous_bytes;
  const MessageId id = new_message();
  Message& message = pool_[id];
  message.departs = actor.now;
  message.bytes = bytes;
  message.chunks = chunks;
  message.chain = actor.chain;
  message.rendezvous = least > 0 && bytes >= least;
  message.in_place = in_place;
  actor.in_place += in_place ? 1 : 0;
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
  const MessageId id = edge.flying;
  Message& message = pool_[id];
  message.chain.transfer += left - message.departs;
  message.chain.latency += edge.latency;
  edge.scheduled = false;
  edge.flying = message.next;
  if (edge.hop == kNone)
    deliver(number, id, left + edge.latency);
  else
    forward(edge.hop, id, left + edge.latency);
  if (edge.flying != kNone) launch(number, left);
}

void Simulation::deliver(EdgeId number, MessageId id, double time) {
  Edge& edge = edges_[number];
  pool_[id].arrives = time;
  if (!edge.receiver_waits || edge.first != id) return;
  edge.receiver_waits = false;
  if (--actors_[edge.receiver].missing == 0) wake(edge.receiver);
}

// A switch has a message, for its next link. Each of an edge's messages follows the one before.
void Simulation::forward(uint32_t number, MessageId id, double time) {
  Hop& hop = hops_[number];
  hop.stored.push_back({id, time});
  if (hop.stored.size() == 1) queue_.push({time, number, kBeginHop});
}

// The last byte of a hop's first message has left.
void Simulation::end_hop(uint32_t number) {
  Hop& hop = hops_[number];
  const auto [id, arrived] = hop.stored.front();
  hop.stored.pop_front();
  pool_[id].chain.transfer += now_ - arrived;
  pool_[id].chain.latency += hop.latency;
  if (!hop.stored.empty()) queue_.push({std::max(now_, hop.stored.front().arrived), number, kBeginHop});
  if (hop.next == kNone)
    deliver(hop.edge, id, now_ + hop.latency);
  else
    forward(hop.next, id, now_ + hop.latency);
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
  Actor& sender = actors_[edge.sender];
  if (pool_[id].in_place) {
    if (actor.now > sender.copied) {
      sender.copied = actor.now;
      sender.copied_chain = actor.chain;
    }
    if (--sender.in_place == 0 && sender.releases) wake(edge.sender);
  }
  if (!edge.sender_waits) return;
  edge.sender_waits = false;
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
  } else if (event.version == kBeginWork) {
    flows_.begin(actors_[event.id].cores, kWorkFlow | event.id, actors_[event.id].work_s, now_);
  } else if (event.version == kBeginHop) {
    const Hop& hop = hops_[event.id];
    const double bytes = pool_[hop.stored.front().id].bytes;
    if (bytes > 0)
      flows_.begin(hop.bundle, kHopFlow | event.id, bytes, now_);
    else
      end_hop(event.id);
  } else if (event.version == versions_[event.id]) {
    ++versions_[event.id];
    ended_.clear();
    flows_.end(event.id, now_, ended_);
    for (const uint32_t flow : ended_) end_flow(flow);
  }
}

void Simulation::end_flow(uint32_t flow) {
  if ((flow & kWorkFlow) != 0)
    end_work(flow & ~kWorkFlow);
  else if ((flow & kHopFlow) != 0)
    end_hop(flow & ~kHopFlow);
  else
    arrive(flow, now_);
}

SimulationOutcome Simulation::run() {
  for (size_t place = actors_.size(); place-- > 0;) wake(static_cast<uint32_t>(place));
  run_ready();
  for (;;) {
    if (!flows_.completed() && (queue_.empty() || queue_.top().time > now_))
      flows_.settle(now_, [this](BundleId bundle, double end) {
        if (++versions_[bundle] >= kBeginHop) versions_[bundle] = 0;
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

// The lost link that a message of an edge waits for, or kNoLink.
LinkId Simulation::lost_link(const Edge& edge) const {
  for (uint32_t hop = edge.hop; hop != kNone; hop = hops_[hop].next)
    if (const LinkId lost = flows_.lost_link(hops_[hop].bundle);
        lost != kNoLink && !hops_[hop].stored.empty())
      return lost;
  return edge.flying == kNone ? kNoLink : flows_.lost_link(edge.bundle);
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
      const LinkId lost = lost_link(edge);
      if (stuck.link != kNoLink || (stuck.peer != stuck.actor && lost == kNoLink)) continue;
      stuck.peer = sends ? actors_[edge.receiver].number : edge.source;
      stuck.sends = sends;
      stuck.link = lost;
    }
  }
}

}  // namespace unisono::simulator
