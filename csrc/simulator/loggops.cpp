#include "simulator/loggops.hpp"

#include <algorithm>
#include <stdexcept>

namespace unisono::simulator {

namespace {

// What all bytes but the first add. Of a message without bytes it is less than nothing, and the sums still
// come out right: they wrap around.
uint64_t further(uint64_t size, uint64_t per_byte) { return (size - 1) * per_byte; }

// When a processor or a network interface is free again; the list grows with the numbers that are used.
uint64_t& busy_until(std::vector<uint64_t>& times, uint32_t number) {
  if (number >= times.size()) times.resize(number + 1);
  return times[number];
}

}  // namespace

Goal::Goal(std::vector<std::vector<GoalOperation>> ranks, LogGops model)
    : ranks_(ranks.size()), model_(model) {
  for (size_t number = 0; number < ranks.size(); ++number) {
    ranks_[number].operations = std::move(ranks[number]);
    for (const GoalOperation& operation : ranks_[number].operations) {
      if (operation.kind == GoalOperation::kSend && operation.peer >= ranks.size())
        throw std::invalid_argument("an operation names a rank that is not there");
      if (operation.cpu > 255 || operation.nic > 255)
        throw std::invalid_argument("an operation names a processor or a network interface above 255");
    }
    link_operations(ranks_[number]);
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
      time = busy_until(rank.processor, operation.cpu);
      if (operation.kind == GoalOperation::kSend)
        time = std::max(time, busy_until(rank.sends, operation.nic));
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

void Goal::MatchQueue::push(uint32_t peer, uint32_t tag, uint32_t operation) {
  if (peer == kAny || tag == kAny)
    any_.push_back({order_++, peer, tag, operation});
  else
    named_.emplace(MatchKey{peer, tag, order_++}, operation);
}

// The oldest that matches, which is removed.
bool Goal::MatchQueue::take(uint32_t peer, uint32_t tag, PendingMatch& found) {
  auto named = named_.lower_bound(MatchKey{peer, tag, 0});
  if (peer == kAny || tag == kAny) {
    named = named_.end();
    for (auto each = named_.begin(); each != named_.end(); ++each) {
      const auto& [its_peer, its_tag, order] = each->first;
      if ((peer != kAny && its_peer != peer) || (tag != kAny && its_tag != tag)) continue;
      if (named == named_.end() || order < std::get<2>(named->first)) named = each;
    }
  } else if (named != named_.end() &&
             (std::get<0>(named->first) != peer || std::get<1>(named->first) != tag)) {
    named = named_.end();
  }
  const auto any = std::find_if(any_.begin(), any_.end(), [&](const PendingMatch& each) {
    return (peer == kAny || each.peer == kAny || each.peer == peer) &&
           (tag == kAny || each.tag == kAny || each.tag == tag);
  });
  if (any != any_.end() && (named == named_.end() || any->order < std::get<2>(named->first))) {
    found = *any;
    any_.erase(any);
    return true;
  }
  if (named == named_.end()) return false;
  const auto& [its_peer, its_tag, order] = named->first;
  found = {order, its_peer, its_tag, named->second};
  named_.erase(named);
  return true;
}

// Each of these runs an event; false: what it needs is busy, and `event.time` says until when.

bool Goal::calculate(LogGopsEvent& event) {
  uint64_t& processor = busy_until(ranks_[event.rank].processor, event.cpu);
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
  uint64_t &processor = busy_until(rank.processor, event.cpu), &sends = busy_until(rank.sends, event.nic);
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
  uint64_t &processor = busy_until(rank.processor, event.cpu), &sends = busy_until(rank.sends, event.nic);
  processor = std::max(processor, event.time);
  sends = std::max(sends, event.time);
}

bool Goal::receive(LogGopsEvent& event) {
  GoalRank& rank = ranks_[event.rank];
  started(event.rank, event.operation);
  PendingMatch found{};
  if (!rank.unexpected.take(event.peer, event.tag, found)) {
    rank.posted.push(event.peer, event.tag, event.operation);
    return true;
  }
  if (event.size > model_.S) confirm(found.peer, event, found.operation);
  finished(event.rank, event.operation);
  return true;
}

bool Goal::arrive(LogGopsEvent& event) {
  GoalRank& rank = ranks_[event.rank];
  uint64_t& processor = busy_until(rank.processor, event.cpu);
  uint64_t& receives = busy_until(rank.receives, event.nic);
  if (const uint64_t busy = std::max(processor, receives); busy > event.time) {
    event.time = busy;
    return false;
  }
  processor = event.time + model_.o + std::max(further(event.size, model_.O), further(event.size, model_.G));
  receives = event.time + model_.g + further(event.size, model_.G);
  PendingMatch found{};
  if (!rank.posted.take(event.peer, event.tag, found)) {
    rank.unexpected.push(event.peer, event.tag, event.operation);
    return true;
  }
  if (event.size > model_.S) confirm(event.peer, event, event.operation);
  finished(event.rank, found.operation);
  return true;
}

GoalOutcome Goal::run(const std::function<void()>& poll) {
  uint64_t events = 0;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) issue(rank, 0, true);
  while (!queue_.empty()) {
    if (++events % kPollEvents == 0) poll();
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
    uint64_t end = 0;
    for (const uint64_t free : rank.processor) end = std::max(end, free);
    outcome.ends.push_back(end);
    for (uint32_t each = 0; each < rank.done.size(); ++each)
      if (!rank.done[each]) outcome.stuck.push_back({number, each});
  }
  return outcome;
}

}  // namespace unisono::simulator
