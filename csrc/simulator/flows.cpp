#include "simulator/flows.hpp"

#include <algorithm>
#include <cmath>

namespace unisono::simulator {

Flows::Flows(const std::vector<double>& rates, const std::vector<double>& bursts)
    : links_(rates.size()), bursts_(!bursts.empty()) {
  for (size_t number = 0; number < rates.size(); ++number) {
    links_[number].rate = rates[number];
    if (bursts_) links_[number].burst = links_[number].saved = bursts[number];
    links_[number].whole_rate = static_cast<int64_t>(std::floor(std::min(rates[number], kUnlimited)));
  }
}

BundleId Flows::add(const std::vector<RouteLink>& route, double most) {
  std::vector<std::pair<LinkId, uint32_t>> key;
  key.reserve(route.size() + 1);
  if (most < kForEver) key.emplace_back(kNoLink, 0);  // all such flows have the same
  for (const RouteLink& crossing : route) key.emplace_back(crossing.link, crossing.weight);
  std::sort(key.begin(), key.end());
  const auto [found, added] = known_.try_emplace(std::move(key), static_cast<BundleId>(bundles_.size()));
  if (!added) return found->second;
  Bundle bundle;
  bundle.bound = most;
  bundle.first = static_cast<uint32_t>(places_.size());
  bundle.count = static_cast<uint32_t>(route.size());
  for (const RouteLink& crossing : route) {
    const FlowLink& link = links_[crossing.link];
    if (link.rate < bundle.bound) {
      bundle.bound = link.rate;
      bundle.narrowest = crossing.link;
    }
    bundle.lost = bundle.lost || link.rate <= 0;
    places_.push_back({crossing});
  }
  bundle.whole_bound = static_cast<int64_t>(std::ceil(std::min(bundle.bound, kUnlimited)));
  bundles_.push_back(std::move(bundle));
  return static_cast<BundleId>(bundles_.size() - 1);
}

bool Flows::begin(BundleId number, uint32_t flow, double bytes, double now) {
  Bundle& bundle = bundles_[number];
  if (bundle.lost) return false;
  if (bundle.members.empty()) attach(number, now);
  bundle.members.push_back({flow, bytes, now, kForEver});
  count_flow(bundle, 1);
  for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
    const RouteLink& crossing = places_[index].crossing;
    links_[crossing.link].usage.bytes += bytes * crossing.weight;
    if (bursts_) links_[crossing.link].beginning += crossing.weight;
  }
  if (bursts_) sharing_.emplace_back(number, flow);
  began_.push_back(number);
  return true;
}

void Flows::end(BundleId number, double now, std::vector<uint32_t>& ended) {
  Bundle& bundle = bundles_[number];
  for (size_t index = 0; index < bundle.members.size();) {
    if (bundle.members[index].end > now) {
      ++index;
      continue;
    }
    ended.push_back(bundle.members[index].flow);
    bundle.members[index] = bundle.members.back();
    bundle.members.pop_back();
    count_flow(bundle, -1);
  }
  bundle.next_end = kForEver;
  mark(number);
  if (bundle.members.empty()) detach(bundle, now);
}

// Counts a flow of a bundle in its links.
void Flows::count_flow(Bundle& bundle, int sign) {
  for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
    const RouteLink& crossing = places_[index].crossing;
    FlowLink& link = links_[crossing.link];
    const bool tight = link.tight();
    link.weight += sign * static_cast<int64_t>(crossing.weight);
    link.demand += sign * static_cast<Whole>(bundle.whole_bound) * crossing.weight;
    if (sign > 0 ? !tight && link.tight() : tight) soil(crossing.link);
  }
}

void Flows::attach(BundleId number, double now) {
  Bundle& bundle = bundles_[number];
  for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
    BundleLink& place = places_[index];
    FlowLink& link = links_[place.crossing.link];
    if (link.bundles.empty()) {
      link.busy_since = now;
      link.saved = std::min(link.burst, link.saved + link.rate * (now - link.idle_since));
    }
    place.position = static_cast<uint32_t>(link.bundles.size());
    link.bundles.emplace_back(number, index);
  }
}

void Flows::detach(Bundle& bundle, double now) {
  limited_by(bundle, kNoLink, now);
  bundle.rate = 0;
  for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
    const BundleLink& place = places_[index];
    FlowLink& link = links_[place.crossing.link];
    const auto last = link.bundles.back();
    link.bundles[place.position] = last;
    places_[last.second].position = place.position;
    link.bundles.pop_back();
    if (link.bundles.empty()) {
      link.usage.busy_s += now - link.busy_since;
      link.idle_since = now;
    }
  }
}

void Flows::soil(LinkId number) {
  if (links_[number].dirty) return;
  links_[number].dirty = true;
  dirty_.push_back(number);
}

void Flows::mark(BundleId number) {
  if (bundles_[number].changed) return;
  bundles_[number].changed = true;
  changed_.push_back(number);
}

void Flows::visit(BundleId number) {
  Bundle& bundle = bundles_[number];
  if (bundle.seen == round_ || bundle.members.empty()) return;
  bundle.seen = round_;
  bundle.fixed = false;
  component_.push_back(number);
}

// The bundles whose rates may change, and the links by which they are connected.
void Flows::collect(double now) {
  ++round_;
  component_.clear();
  shared_.clear();
  for (const BundleId bundle : began_) visit(bundle);
  for (const LinkId number : dirty_) {
    links_[number].dirty = false;
    if (!links_[number].tight()) set_full(links_[number], false, now);
    for (const auto& [bundle, place] : links_[number].bundles) visit(bundle);
  }
  for (size_t next = 0; next < component_.size(); ++next) {
    const Bundle& bundle = bundles_[component_[next]];
    for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
      const LinkId number = places_[index].crossing.link;
      FlowLink& link = links_[number];
      if (link.seen == round_ || !link.tight()) continue;
      link.seen = round_;
      link.left = link.rate;
      link.open = link.weight;
      link.closing = 0;
      link.filled = false;
      shared_.push_back(number);
      for (const auto& [other, place] : link.bundles) visit(other);
    }
  }
  began_.clear();
  dirty_.clear();
}

// The flows that begin now leave with what all links of their routes have saved for each of them. A sum of
// equal parts would depend on how many flows one stands for, so a link counts the largest part for all.
void Flows::spend_bursts() {
  for (const auto& [number, flow] : sharing_) {
    Bundle& bundle = bundles_[number];
    double most = kForEver;
    for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
      const FlowLink& link = links_[places_[index].crossing.link];
      if (link.rate < kUnlimited) most = std::min(most, link.saved / static_cast<double>(link.beginning));
    }
    for (Member& member : bundle.members) {
      if (member.flow != flow) continue;
      most = std::min(most, member.left);
      member.left -= most;
    }
    for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
      FlowLink& link = links_[places_[index].crossing.link];
      link.taken = std::max(link.taken, most);
    }
  }
  for (const auto& [number, flow] : sharing_)
    for (uint32_t index = bundles_[number].first; index < bundles_[number].first + bundles_[number].count;
         ++index) {
      FlowLink& link = links_[places_[index].crossing.link];
      link.saved = std::max(0.0, link.saved - link.taken * static_cast<double>(link.beginning));
      link.beginning = 0;
      link.taken = 0;
    }
  sharing_.clear();
}

void Flows::solve(double now) {
  if (!sharing_.empty()) spend_bursts();
  collect(now);
  if (!shared_.empty()) {
    fill(now);
    for (const LinkId number : shared_) set_full(links_[number], links_[number].filled, now);
    return;
  }
  for (const BundleId bundle : component_)
    fix(bundle, bundles_[bundle].bound, bundles_[bundle].narrowest, now);
}

namespace {

double share(double left, int64_t open) { return left / static_cast<double>(open); }

}  // namespace

// Brings the link with the smallest share to the front of the heap: shares grow while flows are fixed.
void Flows::refresh_shares() {
  const auto later = [](const LinkShare& one, const LinkShare& other) { return one.level > other.level; };
  while (!shares_.empty()) {
    const FlowLink& link = links_[shares_.front().link];
    if (link.open > 0 && share(link.left, link.open) == shares_.front().level) return;
    std::pop_heap(shares_.begin(), shares_.end(), later);
    if (link.open > 0) {
      shares_.back().level = share(link.left, link.open);
      std::push_heap(shares_.begin(), shares_.end(), later);
    } else {
      shares_.pop_back();
    }
  }
}

// Progressive filling: all rates rise together; at each level those bundles stop that their own links or a
// full link hold back.
void Flows::fill(double now) {
  const auto slower = [this](BundleId one, BundleId other) {
    return bundles_[one].bound < bundles_[other].bound;
  };
  if (!std::is_sorted(component_.begin(), component_.end(), slower))
    std::stable_sort(component_.begin(), component_.end(), slower);
  const auto later = [](const LinkShare& one, const LinkShare& other) { return one.level > other.level; };
  shares_.clear();
  for (const LinkId link : shared_) shares_.push_back({share(links_[link].left, links_[link].open), link});
  std::make_heap(shares_.begin(), shares_.end(), later);
  for (size_t next = 0;;) {
    refresh_shares();
    while (next < component_.size() && bundles_[component_[next]].fixed) ++next;
    if (next == component_.size()) return;
    const double bound = bundles_[component_[next]].bound;
    const double level = shares_.empty() ? bound : std::min(bound, shares_.front().level);
    fixed_.clear();
    for (size_t each = next; each < component_.size() && bundles_[component_[each]].bound <= level; ++each)
      fix(component_[each], level, bundles_[component_[each]].narrowest, now);
    for (; !shares_.empty() && shares_.front().level <= level; refresh_shares()) {
      const LinkId full = shares_.front().link;
      std::pop_heap(shares_.begin(), shares_.end(), later);
      shares_.pop_back();
      links_[full].filled = true;
      for (const auto& [bundle, place] : links_[full].bundles) fix(bundle, level, kNoLink, now);
    }
    close_links(level);
  }
}

// Takes the rates of the flows that were fixed at this level from their links.
void Flows::close_links(double level) {
  touched_.clear();
  for (const BundleId number : fixed_) {
    const Bundle& bundle = bundles_[number];
    for (uint32_t index = bundle.first; index < bundle.first + bundle.count; ++index) {
      const RouteLink& crossing = places_[index].crossing;
      FlowLink& link = links_[crossing.link];
      if (link.seen != round_) continue;
      if (link.closing == 0) touched_.push_back(crossing.link);
      link.closing += static_cast<int64_t>(crossing.weight * bundle.members.size());
    }
  }
  for (const LinkId number : touched_) {
    FlowLink& link = links_[number];
    link.left = std::max(0.0, link.left - level * static_cast<double>(link.closing));
    link.open -= link.closing;
    link.closing = 0;
  }
}

void Flows::fix(BundleId number, double rate, LinkId limit, double now) {
  Bundle& bundle = bundles_[number];
  if (bundle.fixed) return;
  bundle.fixed = true;
  fixed_.push_back(number);
  limited_by(bundle, limit, now);
  const bool same = rate == bundle.rate;
  for (Member& member : bundle.members) {
    if (same && member.end < kForEver) continue;
    if (member.end < kForEver) member.left -= bundle.rate * (now - member.since);
    member.since = now;
    member.end = now + std::max(0.0, member.left) / rate;
  }
  bundle.rate = rate;
  mark(number);
}

double Flows::next_end(const Bundle& bundle) {
  double first = kForEver;
  for (const Member& member : bundle.members) first = std::min(first, member.end);
  return first;
}

// The slowest link of a bundle; kNoLink: one that is full, which counts itself.
void Flows::limited_by(Bundle& bundle, LinkId link, double now) {
  if (bundle.limit == link) return;
  if (bundle.limit != kNoLink) count_limit(links_[bundle.limit], -1, now);
  bundle.limit = link;
  if (link != kNoLink) count_limit(links_[link], 1, now);
}

void Flows::set_full(FlowLink& link, bool full, double now) {
  if (link.full == full) return;
  link.full = full;
  count_limit(link, full ? 1 : -1, now);
}

void Flows::count_limit(FlowLink& link, int sign, double now) {
  if (sign > 0 && link.limits == 0) link.limits_since = now;
  link.limits += static_cast<uint32_t>(sign);
  if (sign < 0 && link.limits == 0) link.usage.limiting_s += now - link.limits_since;
}

LinkId Flows::lost_link(BundleId number) const {
  const Bundle& bundle = bundles_[number];
  for (uint32_t index = bundle.first; bundle.lost && index < bundle.first + bundle.count; ++index)
    if (links_[places_[index].crossing.link].rate <= 0) return places_[index].crossing.link;
  return kNoLink;
}

std::vector<Usage> Flows::usage(double now) const {
  std::vector<Usage> found;
  found.reserve(links_.size());
  for (const FlowLink& link : links_) {
    found.push_back(link.usage);
    if (!link.bundles.empty()) found.back().busy_s += now - link.busy_since;
    if (link.limits > 0) found.back().limiting_s += now - link.limits_since;
  }
  return found;
}

}  // namespace unisono::simulator
