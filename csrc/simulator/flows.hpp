// Flows over links that share their rates max-min fairly.
//
// Every flow is given the same rate on a shared link, but no more than its other links let through; what it
// leaves is shared by the others (progressive filling). Rates change when a flow begins or ends. Only the
// flows that are connected with it by links that may be full are computed again.
//
// A flow may stand for many (`Crossing::weight`): it is one of an orbit of flows that all do the same.
#pragma once

#include <cstdint>
#include <vector>

namespace unisono::simulator {

using FlowId = uint32_t;
using LinkId = uint32_t;

inline constexpr LinkId kNoLink = UINT32_MAX;
inline constexpr double kForEver = 1e300;
// Links that are faster than this, in bytes per second, never limit anything.
inline constexpr double kUnlimited = 1e15;

// One link of a route, and how many flows of the orbit cross it.
struct Crossing {
  LinkId link;
  uint32_t weight;
};

// What a link has done.
struct Usage {
  double busy_s = 0;      // it carried something
  double limiting_s = 0;  // it was the slowest link of a flow
  double bytes = 0;
};

// A flow whose end is now known to be at another time.
struct Rescheduled {
  FlowId flow;
  double end;
};

class Flows {
 public:
  // Rates in bytes per second; 0: the link is lost, and what crosses it never arrives.
  explicit Flows(std::vector<double> rates);

  // A flow with this route; it carries one message at a time.
  FlowId add(const std::vector<Crossing>& route);
  // Carries `bytes`, at least one, from `now` on. False: over a lost link, for ever.
  bool begin(FlowId flow, double bytes, double now);
  void end(FlowId flow, double now);
  // Computes the rates after beginnings and ends at `now`; calls `changed(flow, end)`.
  template <class Changed>
  void settle(double now, Changed changed) {
    if (began_.empty() && dirty_.empty()) return;
    solve(now);
    for (const auto& [flow, end] : rescheduled_) changed(flow, end);
    rescheduled_.clear();
  }
  bool settled() const { return began_.empty() && dirty_.empty(); }

  // The lost link that a flow waits for, or kNoLink.
  LinkId lost_link(FlowId flow) const;
  // The rate of a flow that is alone.
  double alone(FlowId flow) const { return flows_[flow].bound; }
  std::vector<Usage> usage(double now) const;

 private:
  __extension__ using Whole = __int128;
  struct Link {
    double rate = 0;
    Whole whole_rate = 0;  // rounded down
    Whole demand = 0;      // what its flows could ask for; exact, so that it does not depend on their order
    int64_t weight = 0;      // of all its flows
    std::vector<std::pair<FlowId, uint32_t>> flows;  // and which crossing of the flow this is
    bool dirty = false;
    uint32_t limits = 0;     // flows of which it is the slowest link
    double busy_since = 0, limits_since = 0;
    Usage usage;
    // while rates are computed
    uint32_t seen = 0;
    double left = 0;
    int64_t open = 0, closing = 0;

    // It can be full: what its flows could ask for is more than it carries.
    bool tight() const { return demand > whole_rate && rate < kUnlimited; }
  };
  struct Place {
    Crossing crossing;
    uint32_t position = 0;  // in Link::flows
  };
  struct Flow {
    uint32_t first = 0, count = 0;  // of its places
    LinkId narrowest = kNoLink, limit = kNoLink;
    double bound = kForEver;  // the rate of its narrowest link
    int64_t whole_bound = 0;  // rounded up
    double left = 0, rate = 0, since = 0, bytes = 0;
    uint32_t seen = 0;
    bool lost = false, fixed = false, active = false;
  };
  struct Share {
    double level;
    LinkId link;
    bool before(const Share& other) const { return level < other.level; }
  };

  void solve(double now);
  void visit(FlowId flow);
  void soil(LinkId link);
  void collect();
  void fill(double now);
  void fix(FlowId flow, double rate, LinkId limit, double now);
  void close_links(double level);
  void limited_by(Flow& flow, LinkId link, double now);
  void detach(Flow& flow, double now);

  std::vector<Link> links_;
  std::vector<Flow> flows_;
  std::vector<Place> places_;
  std::vector<FlowId> began_;
  std::vector<LinkId> dirty_;  // whose flows may run faster now, or are coupled no more
  std::vector<Rescheduled> rescheduled_;
  // while rates are computed
  uint32_t round_ = 0;
  std::vector<FlowId> component_, fixed_;
  std::vector<LinkId> shared_, touched_;
  std::vector<Share> shares_;
};

}  // namespace unisono::simulator
