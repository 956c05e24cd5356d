// Binds the simulator. Programs and routes come from Python functions, one call per block and per edge.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>

#include "python/bindings.hpp"
#include "simulator/loggops.hpp"
#include "simulator/ports.hpp"
#include "simulator/simulation.hpp"

namespace nb = nanobind;
namespace simulator = unisono::simulator;  // not `using`: its names are also the engine's

namespace {

constexpr uint32_t kMostWindow = 1 << 12;  // messages without bytes arrive within each other's call

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

std::vector<int32_t> read_codes(const nb::bytes& block) {
  std::vector<int32_t> codes(block.size() / sizeof(int32_t));
  std::memcpy(codes.data(), block.c_str(), codes.size() * sizeof(int32_t));
  return codes;
}

class PythonProgramSource final : public simulator::ProgramSource {
 public:
  PythonProgramSource(nb::callable next, nb::callable route)
      : next_(std::move(next)), route_(std::move(route)) {}

  uint32_t next(uint32_t actor, std::vector<int32_t>& codes) override {
    const nb::object found = next_(actor);
    if (found.is_none()) return 0;
    const auto [block, runs] = nb::cast<std::tuple<nb::bytes, uint32_t>>(found);
    codes = read_codes(block);
    return codes.empty() ? 0 : runs;
  }

  double route(uint32_t source, uint32_t target, std::vector<simulator::RouteLink>& links) override {
    const auto [latency_s, crossed] =
        nb::cast<std::tuple<double, std::vector<std::tuple<simulator::LinkId, uint32_t>>>>(
            route_(source, target));
    if (!(latency_s >= 0) || std::isinf(latency_s)) throw nb::value_error("a route has no latency");
    for (const auto& [link, weight] : crossed) links.push_back({link, weight});
    return latency_s;
  }

  void poll() override { check_signals(); }

 private:
  nb::callable next_, route_;
};

simulator::MessageCosts read_costs(const std::vector<double>& values) {
  if (values.size() != 15) throw nb::value_error("costs are fifteen numbers");
  for (const double value : values)
    if (!(value >= 0) || std::isinf(value)) throw nb::value_error("a cost is negative or infinite");
  return {values[0], values[1], values[2],  values[3],  values[4],  values[5],  values[6], values[7],
          values[8], values[9], values[10], values[11], values[12], values[13], values[14]};
}

nb::typed<nb::dict, nb::str, nb::any> describe(const simulator::SimulationOutcome& outcome) {
  nb::typed<nb::dict, nb::str, nb::any> found{nb::dict()};
  found["seconds"] = outcome.seconds;
  found["messages"] = outcome.messages;
  found["events"] = outcome.events;
  found["last"] = outcome.last;
  found["chain"] = std::vector<double>{outcome.chain.latency, outcome.chain.transfer, outcome.chain.overhead,
                                       outcome.chain.compute};
  found["actors"] = outcome.actors;
  found["ends"] = outcome.ends;
  found["busy"] = outcome.busy;
  std::vector<std::tuple<double, double, double>> links;
  links.reserve(outcome.links.size());
  for (const simulator::Usage& usage : outcome.links)
    links.emplace_back(usage.busy_s, usage.limiting_s, usage.bytes);
  found["links"] = links;
  nb::list spans;
  for (const simulator::ActorSpan& span : outcome.spans)
    spans.append(nb::make_tuple(span.actor, span.code, span.step, span.start, span.end));
  found["spans"] = spans;
  nb::list stuck;
  for (const simulator::Stuck& each : outcome.stuck)
    stuck.append(nb::make_tuple(each.actor, each.peer, each.sends, each.step, each.event,
                                each.link == simulator::kNoLink ? -1 : static_cast<int64_t>(each.link)));
  found["stuck"] = stuck;
  return found;
}

using NextFunction = nb::typed<nb::callable, nb::object(uint32_t)>;
using RouteFunction = nb::typed<nb::callable, nb::object(uint32_t, uint32_t)>;
using Description = nb::typed<nb::dict, nb::str, nb::any>;

Description simulate(uint32_t ranks, uint32_t streams, uint32_t extra,
                     const std::vector<std::tuple<uint32_t, bool>>& digits, std::vector<double> rates,
                     const std::vector<std::vector<double>>& costs, std::vector<uint32_t> costs_index,
                     uint32_t window, uint64_t most_spans, NextFunction next, RouteFunction route,
                     std::vector<uint32_t> hosts, const std::vector<std::tuple<uint32_t, uint32_t>>& cores,
                     std::vector<double> latencies, std::vector<double> bursts) {
  simulator::Setup setup;
  setup.ranks = ranks;
  setup.streams = streams;
  setup.extra = extra;
  setup.rates = std::move(rates);
  setup.costs_index = std::move(costs_index);
  setup.hosts = std::move(hosts);
  setup.latencies = std::move(latencies);
  setup.bursts = std::move(bursts);
  setup.window = window;
  setup.most_spans = most_spans;
  uint64_t product = 1;
  for (const auto& [size, moved] : digits) {
    if (size == 0) throw nb::value_error("a digit has no values");
    setup.digits.push_back({size, moved});
    product *= size;
    if (product > ranks) break;
  }
  if (!digits.empty() && product != ranks) throw nb::value_error("the digits are not those of all ranks");
  if (static_cast<uint64_t>(ranks) + extra == 0 || streams == 0 || window == 0 || window > kMostWindow ||
      costs.empty() || (static_cast<uint64_t>(ranks) + extra) * streams > INT32_MAX)
    throw nb::value_error("too few or too many ranks or streams, no costs, or no window");
  for (const auto& each : costs) setup.costs.push_back(read_costs(each));
  for (const uint32_t index : setup.costs_index)
    if (index >= setup.costs.size()) throw nb::value_error("a rank has costs that are not there");
  if (!setup.costs_index.empty() && setup.costs_index.size() != static_cast<uint64_t>(ranks) + extra)
    throw nb::value_error("costs_index is not that of all ranks");
  for (const double rate : setup.rates)
    if (!(rate >= 0)) throw nb::value_error("a link's rate is not a number or negative");
  if ((!setup.hosts.empty() && setup.hosts.size() != ranks) || (!cores.empty() && cores.size() != ranks))
    throw nb::value_error("hosts or cores are not those of all ranks");
  for (const auto& [link, weight] : cores) {
    if (link != simulator::kNoLink && (link >= setup.rates.size() || !(setup.rates[link] > 0) || weight == 0))
      throw nb::value_error("cores name a link that is not there, or that is lost");
    setup.cores.push_back({link, weight});
  }
  for (const double latency : setup.latencies)
    if (!(latency >= 0) || std::isinf(latency)) throw nb::value_error("a latency is negative or not finite");
  if (!setup.latencies.empty() && setup.latencies.size() != setup.rates.size())
    throw nb::value_error("latencies are not those of all links");
  for (const double burst : setup.bursts)
    if (!(burst >= 0) || std::isinf(burst)) throw nb::value_error("a burst is negative or not finite");
  if (!setup.bursts.empty() && setup.bursts.size() != setup.rates.size())
    throw nb::value_error("bursts are not those of all links");
  PythonProgramSource source(std::move(next), std::move(route));
  return describe(simulator::Simulation(std::move(setup), source).run());
}

using PortsTuple = std::tuple<double, int64_t, uint64_t,
                              std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint32_t, double>>,
                              std::vector<std::vector<double>>>;

PortsTuple rounds(const std::vector<nb::bytes>& programs, std::vector<int64_t> hosts,
                  const std::vector<double>& inside, const std::vector<double>& between, double reduce_s,
                  bool one_at_a_time, bool traced) {
  simulator::PortsSetup setup;
  for (const nb::bytes& program : programs) setup.programs.push_back(read_codes(program));
  if (inside.size() != 2 || (!between.empty() && between.size() != 2))
    throw nb::value_error("an edge is two numbers");
  setup.hosts = std::move(hosts);
  setup.inside = {inside[0], inside[1]};
  setup.has_between = !between.empty();
  if (setup.has_between) setup.between = {between[0], between[1]};
  setup.reduce_s = reduce_s;
  setup.one_at_a_time = one_at_a_time;
  setup.traced = traced;
  const simulator::PortsOutcome found = simulator::Ports(std::move(setup)).run(check_signals);
  std::vector<std::tuple<uint32_t, uint32_t, uint64_t, uint32_t, double>> messages;
  for (const simulator::PortMessage& message : found.messages)
    messages.emplace_back(message.sender, message.receiver, message.step, message.sends, message.end);
  return {found.seconds, found.stuck_rank, found.stuck_step, std::move(messages), found.done};
}

using GoalTuple = std::tuple<uint32_t, uint64_t, uint32_t, uint32_t, uint32_t, uint32_t,
                             std::vector<uint32_t>, std::vector<uint32_t>>;

std::tuple<std::vector<uint64_t>, uint64_t, std::vector<std::tuple<uint32_t, uint32_t>>> goal(
    const std::vector<std::vector<GoalTuple>>& ranks, const std::vector<uint64_t>& model) {
  if (model.size() != 6) throw nb::value_error("the model is six numbers");
  std::vector<std::vector<simulator::GoalOperation>> operations(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& [kind, size, peer, tag, cpu, nic, done, started] : ranks[rank]) {
      if (kind < 1 || kind > 3) throw nb::value_error("an operation has an unknown kind");
      operations[rank].push_back(
          {static_cast<simulator::GoalOperation::GoalKind>(kind), size, peer, tag, cpu, nic, done, started});
    }
  const simulator::LogGops parameters{model[0], model[1], model[2], model[3], model[4], model[5]};
  const simulator::GoalOutcome found = simulator::Goal(std::move(operations), parameters).run(check_signals);
  std::vector<std::tuple<uint32_t, uint32_t>> stuck;
  for (const simulator::GoalStuck& each : found.stuck) stuck.emplace_back(each.rank, each.operation);
  return {found.ends, found.messages, stuck};
}

}  // namespace

void bind_simulator(nb::module_& m) {
  m.def("simulate", &simulate, nb::arg("ranks"), nb::arg("streams"), nb::arg("extra"), nb::arg("digits"),
        nb::arg("rates"), nb::arg("costs"), nb::arg("costs_index"), nb::arg("window"), nb::arg("most_spans"),
        nb::arg("next"), nb::arg("route"), nb::arg("hosts") = std::vector<uint32_t>(),
        nb::arg("cores") = std::vector<std::tuple<uint32_t, uint32_t>>(),
        nb::arg("latencies") = std::vector<double>(), nb::arg("bursts") = std::vector<double>(),
        "Runs programs on a network; see csrc/simulator/simulation.hpp.");
  m.def("simulate_ports", &rounds, nb::arg("programs"), nb::arg("hosts"), nb::arg("inside"),
        nb::arg("between"), nb::arg("reduce_s"), nb::arg("one_at_a_time"), nb::arg("traced"),
        "(seconds, stuck rank or -1, its step, messages, done) of a plan; see csrc/simulator/ports.hpp.");
  m.def("simulate_goal", &goal, nb::arg("ranks"), nb::arg("model"),
        "(ends in ns, messages, stuck operations) of a GOAL program; see csrc/simulator/loggops.hpp.");
}
