// Flows over links that share their rates max-min fairly.
//
// Every flow is given the same rate on a shared link, but no more than its other links let through; what it
// leaves is shared by the others (progressive filling). Rates change when a flow begins or ends. Only the
// flows that are connected with it by links that may be full are computed again.
//
// Flows with the same route have the same rate: they are one bundle, and one event. A flow may also stand for
// many (`RouteLink::weight`): it is one of an orbit of flows that all do the same.
//
// A link may be a token bucket: while it is idle it saves what it could have carried, up to its burst. Flows
// that begin take from it, those of one moment equal parts, and that part leaves at once.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace unisono::simulator {

using BundleId = uint32_t;
using LinkId = uint32_t;

inline constexpr LinkId kNoLink = UINT32_MAX;
inline constexpr double kForEver = 1e300;
// Links that are faster than this, in bytes per second, never limit anything.
inline constexpr double kUnlimited = 1e15;

// One link of a route, and how many flows of the orbit cross it.
struct RouteLink {
  LinkId link;
  uint32_t weight;
};

// What a link has done.
struct Usage {
  double busy_s = 0;      // it carried something
  double limiting_s = 0;  // it was the slowest link of a flow
  double bytes = 0;
};

class Flows {
 public:
  // Rates in bytes per second; 0: the link is lost, and what crosses it never arrives. bursts: in bytes, of
  // each link; empty: no link has one.
  Flows(const std::vector<double>& rates, const std::vector<double>& bursts);

  // The bundle of flows with this route. Each flow has at most this rate of its own.
  BundleId add(const std::vector<RouteLink>& route, double most = kForEver);
  // A flow of a bundle carries `bytes` from `now` on, more than none. False: over a lost link, for ever.
  bool begin(BundleId bundle, uint32_t flow, double bytes, double now);
  // Ends the flows of a bundle whose last byte has left by `now`, into `ended`.
  void end(BundleId bundle, double now, std::vector<uint32_t>& ended);
  // Computes the rates after beginnings and ends at `now`; calls `next(bundle, time)` with the time of the
  // next end of a bundle, where it may be another one now.
  template <class Next>
  void settle(double now, Next next) {
    if (!began_.empty() || !dirty_.empty()) solve(now);
    for (const BundleId number : changed_) {
      Bundle& bundle = bundles_[number];
      bundle.changed = false;
      const double end = next_end(bundle);
      if (end == bundle.next_end || bundle.members.empty()) continue;
      bundle.next_end = end;
      next(number, end);
    }
    changed_.clear();
  }
  bool completed() const { return began_.empty() && dirty_.empty() && changed_.empty(); }

  // The lost link that a bundle waits for, or kNoLink.
  LinkId lost_link(BundleId bundle) const;
  std::vector<Usage> usage(double now) const;

 private:
  __extension__ using Whole = __int128;
  struct FlowLink {
    double rate = 0;
    Whole whole_rate = 0;  // rounded down
    Whole demand = 0;      // what its flows could ask for; exact, so that it does not depend on their order
    int64_t weight = 0;    // of all its flows
    std::vector<std::pair<BundleId, uint32_t>> bundles;  // and which crossing of the bundle this is
    double burst = 0, saved = 0, idle_since = 0;         // of a token bucket; it begins full
    int64_t beginning = 0;                               // flows of this moment, which share what is saved
    double taken = 0;                                    // the most that one of them takes
    uint32_t limits = 0;  // bundles of which it is the slowest link, and one if it is full
    bool dirty = false, full = false;
    double busy_since = 0, limits_since = 0;
    Usage usage;
    // while rates are computed
    uint32_t seen = 0;
    double left = 0;
    int64_t open = 0, closing = 0;
    bool filled = false;

    // It can be full: what its flows could ask for is more than it carries.
    bool tight() const { return demand > whole_rate && rate < kUnlimited; }
  };
  struct BundleLink {
    RouteLink crossing;
    uint32_t position = 0;  // in FlowLink::bundles
  };
  struct Member {
    uint32_t flow;
    double left, since, end;
  };
  struct Bundle {
    uint32_t first = 0, count = 0;  // of its places
    LinkId narrowest = kNoLink, limit = kNoLink;
    double bound = kForEver;  // the rate of its narrowest link
    int64_t whole_bound = 0;  // rounded up
    double rate = 0;          // of each flow
    double next_end = kForEver;
    std::vector<Member> members;
    uint32_t seen = 0;
    bool lost = false, fixed = false, changed = false;
  };
  struct LinkShare {
    double level;
    LinkId link;
  };

  void solve(double now);
  void spend_bursts();
  void visit(BundleId bundle);
  void soil(LinkId link);
  void mark(BundleId bundle);
  void collect(double now);
  void fill(double now);
  void refresh_shares();
  void close_links(double level);
  void fix(BundleId bundle, double rate, LinkId limit, double now);
  void limited_by(Bundle& bundle, LinkId link, double now);
  void count_limit(FlowLink& link, int sign, double now);
  void set_full(FlowLink& link, bool full, double now);
  void attach(BundleId bundle, double now);
  void detach(Bundle& bundle, double now);
  void count_flow(Bundle& bundle, int sign);
  static double next_end(const Bundle& bundle);

  std::vector<FlowLink> links_;
  std::vector<Bundle> bundles_;
  std::vector<BundleLink> places_;
  std::map<std::vector<std::pair<LinkId, uint32_t>>, BundleId> known_;
  std::vector<BundleId> began_;
  std::vector<std::pair<BundleId, uint32_t>> sharing_;  // flows of this moment, where links have bursts
  bool bursts_ = false;
  std::vector<LinkId> dirty_;  // whose flows may run faster now, or are coupled no more
  std::vector<BundleId> changed_;
  // while rates are computed
  uint32_t round_ = 0;
  std::vector<BundleId> component_, fixed_;
  std::vector<LinkId> shared_, touched_;
  std::vector<LinkShare> shares_;
};

}  // namespace unisono::simulator
