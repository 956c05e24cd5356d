#include "simulator/flows.hpp"

#include <algorithm>
#include <cmath>

namespace unisono::simulator {

Flows::Flows(std::vector<double> rates) : links_(rates.size()) {
  for (size_t number = 0; number < rates.size(); ++number) {
    links_[number].rate = rates[number];
    links_[number].whole_rate = static_cast<int64_t>(std::floor(std::min(rates[number], kUnlimited)));
  }
}

FlowId Flows::add(const std::vector<Crossing>& route) {
  Flow flow;
  flow.first = static_cast<uint32_t>(places_.size());
  flow.count = static_cast<uint32_t>(route.size());
  for (const Crossing& crossing : route) {
    const Link& link = links_[crossing.link];
    if (link.rate < flow.bound) {
      flow.bound = link.rate;
      flow.narrowest = crossing.link;
    }
    flow.lost = flow.lost || link.rate <= 0;
    places_.push_back({crossing});
  }
  flow.whole_bound = static_cast<int64_t>(std::ceil(std::min(flow.bound, kUnlimited)));
  flows_.push_back(flow);
  return static_cast<FlowId>(flows_.size() - 1);
}

bool Flows::begin(FlowId number, double bytes, double now) {
  Flow& flow = flows_[number];
  if (flow.lost) return false;
  flow.left = flow.bytes = bytes;
  flow.rate = 0;
  flow.since = now;
  flow.active = true;
  for (uint32_t index = flow.first; index < flow.first + flow.count; ++index) {
    Place& place = places_[index];
    Link& link = links_[place.crossing.link];
    if (link.flows.empty()) link.busy_since = now;
    place.position = static_cast<uint32_t>(link.flows.size());
    link.flows.emplace_back(number, index);
    link.weight += place.crossing.weight;
    const bool tight = link.tight();
    link.demand += flow.whole_bound * place.crossing.weight;
    if (!tight && link.tight()) soil(place.crossing.link);
  }
  began_.push_back(number);
  return true;
}

void Flows::end(FlowId number, double now) {
  Flow& flow = flows_[number];
  limited_by(flow, kNoLink, now);
  detach(flow, now);
  flow.active = false;
}

void Flows::detach(Flow& flow, double now) {
  for (uint32_t index = flow.first; index < flow.first + flow.count; ++index) {
    const Place& place = places_[index];
    Link& link = links_[place.crossing.link];
    if (link.tight()) soil(place.crossing.link);
    link.demand -= flow.whole_bound * place.crossing.weight;
    link.weight -= place.crossing.weight;
    link.usage.bytes += flow.bytes * place.crossing.weight;
    const auto last = link.flows.back();
    link.flows[place.position] = last;
    places_[last.second].position = place.position;
    link.flows.pop_back();
    if (link.flows.empty()) link.usage.busy_s += now - link.busy_since;
  }
}

void Flows::soil(LinkId number) {
  if (links_[number].dirty) return;
  links_[number].dirty = true;
  dirty_.push_back(number);
}

void Flows::visit(FlowId number) {
  Flow& flow = flows_[number];
  if (flow.seen == round_ || !flow.active) return;
  flow.seen = round_;
  flow.fixed = false;
  component_.push_back(number);
}

// The flows whose rates may change, and the links by which they are connected.
void Flows::collect() {
  ++round_;
  component_.clear();
  shared_.clear();
  for (const FlowId flow : began_) visit(flow);
  for (const LinkId number : dirty_) {
    links_[number].dirty = false;
    for (const auto& [flow, place] : links_[number].flows) visit(flow);
  }
  for (size_t next = 0; next < component_.size(); ++next) {
    const Flow& flow = flows_[component_[next]];
    for (uint32_t index = flow.first; index < flow.first + flow.count; ++index) {
      const LinkId number = places_[index].crossing.link;
      Link& link = links_[number];
      if (link.seen == round_ || !link.tight()) continue;
      link.seen = round_;
      link.left = link.rate;
      link.open = link.weight;
      link.closing = 0;
      shared_.push_back(number);
      for (const auto& [other, place] : link.flows) visit(other);
    }
  }
  began_.clear();
  dirty_.clear();
}

void Flows::solve(double now) {
  collect();
  if (shared_.empty()) {
    for (const FlowId flow : component_) fix(flow, flows_[flow].bound, flows_[flow].narrowest, now);
    return;
  }
  fill(now);
}

// Progressive filling: all rates rise together; at each level, flows stop that their own links or a full link
// hold back.
void Flows::fill(double now) {
  const auto slower = [this](FlowId one, FlowId other) { return flows_[one].bound < flows_[other].bound; };
  if (!std::is_sorted(component_.begin(), component_.end(), slower))
    std::stable_sort(component_.begin(), component_.end(), slower);
  const auto later = [](const Share& one, const Share& other) { return other.before(one); };
  shares_.clear();
  for (const LinkId link : shared_)
    shares_.push_back({links_[link].left / static_cast<double>(links_[link].open), link});
  std::make_heap(shares_.begin(), shares_.end(), later);
  size_t next = 0;
  for (;;) {
    while (!shares_.empty()) {  // a share that has grown meanwhile goes back into the heap
      Share& first = shares_.front();
      const Link& link = links_[first.link];
      const double share = link.open > 0 ? link.left / static_cast<double>(link.open) : kForEver;
      if (link.open > 0 && share == first.level) break;
      std::pop_heap(shares_.begin(), shares_.end(), later);
      if (link.open > 0) {
        shares_.back().level = share;
        std::push_heap(shares_.begin(), shares_.end(), later);
      } else {
        shares_.pop_back();
      }
    }
    while (next < component_.size() && flows_[component_[next]].fixed) ++next;
    if (next == component_.size()) return;
    const double level = std::min(shares_.empty() ? kForEver : shares_.front().level, flows_[component_[next]].bound);
    fixed_.clear();
    for (size_t each = next; each < component_.size() && flows_[component_[each]].bound <= level; ++each)
      if (!flows_[component_[each]].fixed) fix(component_[each], level, flows_[component_[each]].narrowest, now);
    while (!shares_.empty() && shares_.front().level <= level) {
      const LinkId full = shares_.front().link;
      std::pop_heap(shares_.begin(), shares_.end(), later);
      shares_.pop_back();
      const Link& link = links_[full];
      if (link.open > 0 && link.left / static_cast<double>(link.open) > level) {
        shares_.push_back({link.left / static_cast<double>(link.open), full});
        std::push_heap(shares_.begin(), shares_.end(), later);
        continue;
      }
      for (const auto& [flow, place] : link.flows)
        if (!flows_[flow].fixed) fix(flow, level, full, now);
    }
    close_links(level);
  }
}

// Takes the rates of the flows that were fixed at this level from their links.
void Flows::close_links(double level) {
  touched_.clear();
  for (const FlowId number : fixed_) {
    const Flow& flow = flows_[number];
    for (uint32_t index = flow.first; index < flow.first + flow.count; ++index) {
      const Crossing& crossing = places_[index].crossing;
      Link& link = links_[crossing.link];
      if (link.seen != round_) continue;
      if (link.closing == 0) touched_.push_back(crossing.link);
      link.closing += crossing.weight;
    }
  }
  for (const LinkId number : touched_) {
    Link& link = links_[number];
    link.left = std::max(0.0, link.left - level * static_cast<double>(link.closing));
    link.open -= link.closing;
    link.closing = 0;
  }
}

void Flows::fix(FlowId number, double rate, LinkId limit, double now) {
  Flow& flow = flows_[number];
  flow.fixed = true;
  fixed_.push_back(number);
  limited_by(flow, limit, now);
  if (rate == flow.rate) return;
  flow.left -= flow.rate * (now - flow.since);
  flow.since = now;
  flow.rate = rate;
  rescheduled_.push_back({number, now + std::max(0.0, flow.left) / rate});
}

void Flows::limited_by(Flow& flow, LinkId link, double now) {
  if (flow.limit == link) return;
  if (flow.limit != kNoLink) {
    Link& before = links_[flow.limit];
    if (--before.limits == 0) before.usage.limiting_s += now - before.limits_since;
  }
  flow.limit = link;
  if (link != kNoLink && links_[link].limits++ == 0) links_[link].limits_since = now;
}

LinkId Flows::lost_link(FlowId number) const {
  const Flow& flow = flows_[number];
  for (uint32_t index = flow.first; flow.lost && index < flow.first + flow.count; ++index)
    if (links_[places_[index].crossing.link].rate <= 0) return places_[index].crossing.link;
  return kNoLink;
}

std::vector<Usage> Flows::usage(double now) const {
  std::vector<Usage> found;
  found.reserve(links_.size());
  for (const Link& link : links_) {
    found.push_back(link.usage);
    if (!link.flows.empty()) found.back().busy_s += now - link.busy_since;
    if (link.limits > 0) found.back().limiting_s += now - link.limits_since;
  }
  return found;
}

}  // namespace unisono::simulator
