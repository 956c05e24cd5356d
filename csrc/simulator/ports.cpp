#include "simulator/ports.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "simulator/codes.hpp"

namespace unisono::simulator {

bool Ports::PortEvent::before(const PortEvent& other) const {
  return std::tie(time, kind, distance, sender, receiver, count) <
         std::tie(other.time, other.kind, other.distance, other.sender, other.receiver, other.count);
}

bool Ports::PortRequest::before(const PortRequest& other) const {
  return std::tie(time, distance, rank) < std::tie(other.time, other.distance, other.rank);
}

Ports::Ports(PortsSetup setup) : setup_(std::move(setup)), ranks_(setup_.programs.size()) {
  const auto ranks = static_cast<int32_t>(ranks_.size());
  if (!setup_.hosts.empty() && setup_.hosts.size() != ranks_.size())
    throw std::invalid_argument("hosts are not those of all ranks");
  for (std::vector<int32_t>& program : setup_.programs)
    check_codes(program, [ranks](int32_t& peer, bool) {
      if (peer < 0 || peer >= ranks) throw std::invalid_argument("a program names a rank that is not there");
    });
  outcome_.done.resize(ranks_.size());
}

PortsOutcome Ports::run(const std::function<void()>& poll) {
  uint64_t events = 0;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) advance(rank);
  while (!queue_.empty()) {
    if (++events % kPollEvents == 0) poll();
    const PortEvent event = queue_.pop();
    if (event.kind == kAsks)
      ask(event.sender, event.receiver, event.time);
    else
      arrive(event.sender, event.receiver, event.count, event.time);
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    outcome_.seconds = std::max(outcome_.seconds, ranks_[rank].now);
    if (ranks_[rank].at == setup_.programs[rank].size() || outcome_.stuck_rank >= 0) continue;
    outcome_.stuck_rank = rank;
    outcome_.stuck_step = ranks_[rank].step;
  }
  return std::move(outcome_);
}

std::deque<double>& Ports::edge(uint32_t sender, uint32_t receiver) {
  return arrived_[static_cast<uint64_t>(sender) << 32 | receiver];
}

uint32_t Ports::distance(uint32_t sender, uint32_t receiver) const {
  const auto ranks = static_cast<uint32_t>(ranks_.size());
  return (receiver + ranks - sender) % ranks;
}

// Runs the steps of a rank that can run now.
void Ports::advance(uint32_t number) {
  PortRank& rank = ranks_[number];
  const std::vector<int32_t>& program = setup_.programs[number];
  while (rank.at < program.size()) {
    const int32_t* codes = program.data() + rank.at;
    const auto code = static_cast<Code>(codes[0]);
    if (code == Code::kSend) {
      for (int32_t peer = 0; peer < codes[2]; ++peer)
        send(number, static_cast<uint32_t>(codes[3 + peer]), static_cast<uint32_t>(codes[1]));
      mark_done(number, static_cast<uint64_t>(codes[1]));
    } else if (code == Code::kCopy) {
      mark_done(number, static_cast<uint64_t>(codes[1]));
    } else if (code == Code::kRecv || code == Code::kReduce) {
      const bool reduces = code == Code::kReduce;
      for (; rank.repeats < codes[1]; ++rank.repeats) {
        if (!take(number, codes + (reduces ? 4 : 2), reduces ? codes[3] : 1, reduces ? codes[2] : 0)) return;
        mark_done(number, 1);
      }
      rank.repeats = 0;
    }
    rank.at += length_of(codes);
  }
}

void Ports::mark_done(uint32_t number, uint64_t steps) {
  ranks_[number].step += steps;
  if (setup_.traced) outcome_.done[number].insert(outcome_.done[number].end(), steps, ranks_[number].now);
}

// Takes what a step waits for, if all of it is here.
bool Ports::take(uint32_t number, const int32_t* sources, int32_t count, int32_t additions) {
  for (int32_t source = 0; source < count; ++source)
    if (edge(static_cast<uint32_t>(sources[source]), number).empty()) return false;
  PortRank& rank = ranks_[number];
  for (int32_t source = 0; source < count; ++source) {
    std::deque<double>& arrived = edge(static_cast<uint32_t>(sources[source]), number);
    if (arrived.empty()) throw std::invalid_argument("a step names a rank twice");
    rank.now = std::max(rank.now, arrived.front());
    arrived.pop_front();
  }
  rank.now += setup_.reduce_s * additions;
  return true;
}

void Ports::send(uint32_t sender, uint32_t receiver, uint32_t count) {
  PortRank& rank = ranks_[sender];
  if (!setup_.one_at_a_time) {
    start(sender, receiver, count, rank.now);
    return;
  }
  rank.outbox.push_back({receiver, count, rank.now, rank.step});
  if (rank.outbox.size() == 1) push(rank.now, kAsks, sender, receiver, 0);
}

// The first message of a sender wants to leave.
void Ports::ask(uint32_t sender, uint32_t receiver, double time) {
  PortRank& target = ranks_[receiver];
  if (target.taking) {
    target.waiting.push({time, distance(sender, receiver), sender});
    return;
  }
  target.taking = true;
  start_first(sender, time);
}

void Ports::start_first(uint32_t sender, double time) {
  const Outgoing first = ranks_[sender].outbox.front();
  const double arrival = start(sender, first.receiver, first.count, time);
  if (setup_.traced) outcome_.messages.push_back({sender, first.receiver, first.step, first.count, arrival});
}

// A message leaves; when it will have arrived.
double Ports::start(uint32_t sender, uint32_t receiver, uint32_t count, double time) {
  const bool apart =
      setup_.has_between && !setup_.hosts.empty() && setup_.hosts[sender] != setup_.hosts[receiver];
  const PortEdge& edge = apart ? setup_.between : setup_.inside;
  const double passing = edge.per_chunk * count;
  if (apart) {
    double& out = free_out_[setup_.hosts[sender]];
    double& in = free_in_[setup_.hosts[receiver]];
    time = std::max({time, out, in});
    out = in = time + passing;
  }
  const double arrival = time + edge.latency + passing;
  push(arrival, kArrives, sender, receiver, count);
  return arrival;
}

void Ports::arrive(uint32_t sender, uint32_t receiver, uint32_t count, double time) {
  std::deque<double>& arrived = edge(sender, receiver);
  arrived.insert(arrived.end(), count, time);
  if (setup_.one_at_a_time) release(sender, receiver, time);
  advance(receiver);
}

// A message has arrived: both its ends begin the next one.
void Ports::release(uint32_t sender, uint32_t receiver, double time) {
  std::deque<Outgoing>& outbox = ranks_[sender].outbox;
  outbox.pop_front();
  if (!outbox.empty()) push(std::max(time, outbox.front().ready), kAsks, sender, outbox.front().receiver, 0);
  PortRank& target = ranks_[receiver];
  target.taking = !target.waiting.empty();
  if (target.taking) start_first(target.waiting.pop().rank, time);
}

void Ports::push(double time, PortEventKind kind, uint32_t sender, uint32_t receiver, uint32_t count) {
  queue_.push({time, kind, distance(sender, receiver), sender, receiver, count});
}

}  // namespace unisono::simulator
