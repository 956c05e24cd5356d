#include "simulator/loggops.hpp"

#include <algorithm>
#include <stdexcept>

namespace unisono::simulator {

namespace {

// What all bytes but the first add. Of a message without bytes it is less than nothing, and the sums still
// come out right: they wrap around.
uint64_t further(uint64_t size, uint64_t per_byte) { return (size - 1) * per_byte; }

}  // namespace

Goal::Goal(std::vector<std::vector<GoalOperation>> ranks, LogGops model)
    : ranks_(ranks.size()), model_(model) {
  uint32_t cpus = 1, nics = 1;
  for (size_t number = 0; number < ranks.size(); ++number) {
    ranks_[number].operations = std::move(ranks[number]);
    for (const GoalOperation& operation : ranks_[number].operations) {
      if (operation.kind == GoalOperation::kSend && operation.peer >= ranks.size())
        throw std::invalid_argument("an operation names a rank that is not there");
      if (operation.cpu > 255 || operation.nic > 255)
        throw std::invalid_argument("an operation names a processor or a network peer info above 255");
      cpus = std::max(cpus, operation.cpu + 1);
      nics = std::max(nics, operation.nic + 1);
    }
    link_operations(ranks_[number]);
  }
  for (GoalRank& rank : ranks_) {
    rank.processor.assign(cpus, 0);
    rank.sends.assign(nics, 0);
    rank.receives.assign(nics, 0);
  }
}

void Goal::link_operations(GoalRank& rank) {
  const size_t count = rank.operations.size();
  rank.missing.resize(count);
  rank.after_done.resize(count);
  rank.after_started.resize(count);
  rank.done.resize(count);
  for (uint32_t number = 0; number < count; ++number) {
    const GoalOperation& operation = rank.operations[number];
    for (const auto& [needed, after] : {std::pair(&operation.requires_done, &rank.after_done),
                                        std::pair(&operation.requires_started, &rank.after_started)})
      for (const uint32_t before : *needed) {
        if (before >= count) throw std::invalid_argument("an operation requires one that is not there");
        (*after)[before].push_back(number);
        ++rank.missing[number];
      }
    if (rank.missing[number] == 0) rank.free.push_back(number);
  }
}

// Puts the operations of a rank that may begin into the queue.
void Goal::issue(uint32_t number, uint64_t time, bool at_start) {
  GoalRank& rank = ranks_[number];
  std::vector<uint32_t> free;
  free.swap(rank.free);
  // Not a stable sort: the order of that simulator, which this one has to reproduce, is that of std::sort.
  std::sort(free.begin(), free.end(), [&rank](uint32_t one, uint32_t other) {
    return rank.operations[one].kind < rank.operations[other].kind;
  });
  for (const uint32_t each : free) {
    const GoalOperation& operation = rank.operations[each];
    if (!at_start) {
      time = rank.processor[operation.cpu];
      if (operation.kind == GoalOperation::kSend) time = std::max(time, rank.sends[operation.nic]);
    }
    queue_.push({time, order_++, operation.size, operation.kind, number, operation.peer, each, operation.tag,
                 operation.cpu, operation.nic});
  }
}

void Goal::release(GoalRank& rank, const std::vector<uint32_t>& operations) {
  for (const uint32_t each : operations)
    if (--rank.missing[each] == 0) rank.free.push_back(each);
}

void Goal::started(uint32_t number, uint32_t operation) {
  release(ranks_[number], ranks_[number].after_started[operation]);
  touched_.push_back(number);
}

void Goal::finished(uint32_t number, uint32_t operation) {
  GoalRank& rank = ranks_[number];
  rank.done[operation] = true;
  release(rank, rank.after_done[operation]);
  touched_.push_back(number);
}

bool Goal::match(std::list<PendingMatch>& queue, uint32_t peer, uint32_t tag, PendingMatch& found) {
  for (auto each = queue.begin(); each != queue.end(); ++each) {
    if (peer != kAny && each->peer != kAny && each->peer != peer) continue;
    if (tag != kAny && each->tag != kAny && each->tag != tag) continue;
    found = *each;
    queue.erase(each);
    return true;
  }
  return false;
}

// Each of these runs an event; false: what it needs is busy, and `event.time` says until when.

bool Goal::calculate(LogGopsEvent& event) {
  uint64_t& processor = ranks_[event.rank].processor[event.cpu];
  if (processor > event.time) {
    event.time = processor;
    return false;
  }
  processor = event.time + event.size;
  started(event.rank, event.operation);
  finished(event.rank, event.operation);
  return true;
}

bool Goal::send(LogGopsEvent& event) {
  GoalRank& rank = ranks_[event.rank];
  uint64_t &processor = rank.processor[event.cpu], &sends = rank.sends[event.nic];
  if (const uint64_t busy = std::max(processor, sends); busy > event.time) {
    event.time = busy;
    return false;
  }
  started(event.rank, event.operation);
  processor = event.time + model_.o + further(event.size, model_.O);
  sends = event.time + model_.g + further(event.size, model_.G);
  LogGopsEvent message = event;
  message.kind = kMessage;
  message.rank = event.peer;
  message.peer = event.rank;
  message.time = event.time + model_.o + model_.L;
  message.order = order_++;
  queue_.push(message);
  ++messages_;
  if (event.size <= model_.S) finished(event.rank, event.operation);
  return true;
}

// The sender of a large message may go on, as its receiver has asked for it.
void Goal::confirm(uint32_t sender, const LogGopsEvent& event, uint32_t operation) {
  GoalRank& rank = ranks_[sender];
  finished(sender, operation);
  rank.processor[event.cpu] = std::max(rank.processor[event.cpu], event.time);
  rank.sends[event.nic] = std::max(rank.sends[event.nic], event.time);
}

bool Goal::receive(LogGopsEvent& event) {
  GoalRank& rank = ranks_[event.rank];
  started(event.rank, event.operation);
  PendingMatch found{};
  if (!match(rank.unexpected, event.peer, event.tag, found)) {
    rank.posted.push_back({event.peer, event.tag, event.operation});
    return true;
  }
  if (event.size > model_.S) confirm(found.peer, event, found.operation);
  finished(event.rank, event.operation);
  return true;
}

bool Goal::arrive(LogGopsEvent& event) {
  GoalRank& rank = ranks_[event.rank];
  uint64_t &processor = rank.processor[event.cpu], &receives = rank.receives[event.nic];
  if (const uint64_t busy = std::max(processor, receives); busy > event.time) {
    event.time = busy;
    return false;
  }
  processor = event.time + model_.o + std::max(further(event.size, model_.O), further(event.size, model_.G));
  receives = event.time + model_.g + further(event.size, model_.G);
  PendingMatch found{};
  if (!match(rank.posted, event.peer, event.tag, found)) {
    rank.unexpected.push_back({event.peer, event.tag, event.operation});
    return true;
  }
  if (event.size > model_.S) confirm(event.peer, event, event.operation);
  finished(event.rank, found.operation);
  return true;
}

GoalOutcome Goal::run() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) issue(rank, 0, true);
  while (!queue_.empty()) {
    LogGopsEvent event = queue_.pop();
    touched_.clear();
    const bool ran = event.kind == kMessage               ? arrive(event)
                     : event.kind == GoalOperation::kSend ? send(event)
                     : event.kind == GoalOperation::kRecv ? receive(event)
                                                          : calculate(event);
    if (!ran) queue_.push(event);
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    const std::vector<uint32_t> touched = touched_;
    for (const uint32_t rank : touched) issue(rank, 0, false);
  }
  GoalOutcome outcome;
  outcome.messages = messages_;
  for (uint32_t number = 0; number < ranks_.size(); ++number) {
    const GoalRank& rank = ranks_[number];
    outcome.ends.push_back(*std::max_element(rank.processor.begin(), rank.processor.end()));
    for (uint32_t each = 0; each < rank.done.size(); ++each)
      if (!rank.done[each]) outcome.stuck.push_back({number, each});
  }
  return outcome;
}

}  // namespace unisono::simulator
