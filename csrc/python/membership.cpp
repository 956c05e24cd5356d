// Binds what the ranks need to agree on their next membership. No logic: bytes in, bytes out.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/bindings.hpp"
#include "transport/marker.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

std::span<const unsigned char> view(const nb::bytes& bytes) {
  return {static_cast<const unsigned char*>(bytes.data()), bytes.size()};
}

// Reads the proposals of the other ranks, each version once.
class ProposalReader {
 public:
  explicit ProposalReader(Engine& engine)
      : engine_(engine), versions_(static_cast<size_t>(engine.size()), 0) {}

  std::vector<std::pair<int, nb::bytes>> read() {
    std::vector<std::pair<int, nb::bytes>> found;
    std::vector<unsigned char> bytes;
    for (int rank = 0; rank < engine_.size(); ++rank) {
      uint64_t& known = versions_[static_cast<size_t>(rank)];
      if (rank == engine_.rank() || engine_.group().proposal_version(rank) == known) continue;
      known = engine_.group().proposal_of(rank, bytes);
      found.emplace_back(rank, nb::bytes(bytes.data(), bytes.size()));
    }
    return found;
  }

  bool sleep(int rank, double slice_s) {
    const uint64_t known = versions_[static_cast<size_t>(engine_.member(rank))];
    const GilRelease no_gil;
    return engine_.group().await_proposal(rank, known, duration(slice_s));
  }

 private:
  Engine& engine_;
  std::vector<uint64_t> versions_;  // read last, by rank
};

std::pair<uint64_t, nb::bytes> proposal_of(Engine& engine, int rank) {
  std::vector<unsigned char> bytes;
  const uint64_t version = engine.group().proposal_of(engine.member(rank), bytes);
  return {version, nb::bytes(bytes.data(), bytes.size())};
}

// Of a rank of this host; kOpen for the others, whose own host settles it.
Fate settle(Engine& engine, int rank, Fate fate) {
  return engine.group().on_this_host(engine.member(rank)) ? engine.group().settle(rank, fate) : Fate::kOpen;
}

std::tuple<std::vector<int>, std::vector<int>, std::vector<int>> hand_over(Engine& engine,
                                                                           const std::vector<bool>& kept,
                                                                           double timeout_s) {
  std::array<FileDescriptors, 3> sockets;
  {
    const GilRelease no_gil;
    sockets = engine.hand_over(kept, deadline_after(timeout_s));
  }
  std::array<std::vector<int>, 3> numbers;
  for (size_t wire = 0; wire < sockets.size(); ++wire)
    for (FileDescriptor& each : sockets[wire]) numbers[wire].push_back(each.release());
  return {numbers[0], numbers[1], numbers[2]};
}

void bind_enums(nb::module_& m) {
  nb::enum_<Fate>(m, "Fate", "Whether a rank may still decide on the next membership.")
      .value("OPEN", Fate::kOpen)
      .value("DECIDED", Fate::kDecided)
      .value("EVICTED", Fate::kEvicted);
  nb::enum_<ControlPlane::State>(m, "Contact",
                                 "The connection to a rank of another host, or a process of this one.")
      .value("OPEN", ControlPlane::State::kOpen)
      .value("ENDED", ControlPlane::State::kEnded)
      .value("RESET", ControlPlane::State::kReset)
      .value("SILENT", ControlPlane::State::kSilent)
      .value("NEXT", ControlPlane::State::kNext);
}

void bind_proposals(nb::class_<Engine>& engine) {
  engine
      .def(
          "propose", [](Engine& self, const nb::bytes& bytes) { self.propose(view(bytes)); },
          nb::arg("bytes"), "Publishes what this rank proposes as the next membership.")
      .def("proposal_of", &proposal_of, nb::arg("rank"),
           "(version, bytes) of a rank's newest; 0: it has none.")
      .def("settle", &settle, nb::arg("rank"), nb::arg("fate"),
           "What became of a rank of this host, after an attempt to change it from OPEN.")
      .def("ended", &Engine::ended, nb::call_guard<GilRelease>(),
           "The ranks of this host whose process has ended, or that have left; one may be named twice.")
      .def_prop_ro("behind_others", &Engine::is_behind_others,
                   "Whether another rank has begun an operation that this one has not.")
      .def(
          "on_this_host", [](Engine& self, int rank) { return self.group().on_this_host(self.member(rank)); },
          nb::arg("rank"))
      .def(
          "state", [](Engine& self, int rank) { return self.state(self.member(rank)); }, nb::arg("rank"),
          nb::call_guard<GilRelease>(),
          "How the connection to a rank is; of this host: whether its process ended.")
      .def(
          "heard",
          [](Engine& self, int rank) {
            const Nanoseconds ago = self.silence_ns(self.member(rank));
            return ago < 0 ? -1.0 : static_cast<double>(ago) / 1e9;
          },
          nb::arg("rank"), nb::call_guard<GilRelease>(),
          "Seconds since the newest frame of a rank of another host; -1: none came.")
      .def("ask", &Engine::ask, nb::call_guard<GilRelease>(), "Asks all ranks of other hosts for a frame.")
      .def(
          "pidfd", [](Engine& self, int rank) { return self.pidfd(self.member(rank)); }, nb::arg("rank"),
          "The descriptor of a process of this host; -1: it has none. The engine owns it.");
}

void bind_reader(nb::module_& m) {
  nb::class_<ProposalReader>(m, "ProposalReader", "Reads the proposals of the other ranks of an engine.")
      .def(nb::init<Engine&>(), nb::arg("engine"), nb::keep_alive<1, 2>())
      .def("read", &ProposalReader::read, "(rank, bytes) of each proposal that was not read before.")
      .def("sleep", &ProposalReader::sleep, nb::arg("rank"), nb::arg("slice_s"),
           "Sleeps until a rank has a proposal that was not read, or the slice has passed; whether it has.");
}

void bind_next(nb::class_<Engine>& engine) {
  engine
      .def_prop_rw(
          "elastic", [](Engine& self) { return self.group().elastic(); },
          [](Engine& self, bool elastic) { self.group().set_elastic(elastic); },
          "Whether a wait also ends because a rank is stopped, or does not answer.")
      .def_prop_ro("unsettled", &Engine::has_open_transfers,
                   "Whether another rank may still write to the buffers of a failed call.")
      .def(
          "next_region",
          [](Engine& self, uint32_t ranks) { return Region::next(self.group().region(), ranks); },
          nb::arg("ranks"), nb::call_guard<GilRelease>(),
          "The memory of the next membership on this host. Every rank of it calls this.")
      .def(
          "discard_region", [](Engine& self) { self.group().region().discard(); },
          nb::call_guard<GilRelease>(), "Frees the memory of this membership, which no rank uses any more.")
      .def_prop_ro("zero_copy", [](Engine& self) { return self.group().region().zero_copy(); })
      .def("hand_over", &hand_over, nb::arg("kept"), nb::arg("timeout_s"),
           "Leaves the group, and returns its connections (control, data, messages), -1 for ranks of this "
           "host. "
           "The caller owns them. Those to ranks for which `kept` and `state` (NEXT) hold can be passed on.");
}

}  // namespace

void bind_membership(nb::module_& m, nb::class_<Engine>& engine) {
  bind_enums(m);
  bind_proposals(engine);
  bind_next(engine);
  bind_reader(m);
  m.def(
      "pass_markers",
      [](const std::vector<int>& sockets, const nb::bytes& marker, double timeout_s) {
        const std::span<const unsigned char> bytes = view(marker);
        const GilRelease no_gil;
        pass_markers(sockets, bytes, deadline_after(timeout_s));
      },
      nb::arg("sockets"), nb::arg("marker"), nb::arg("timeout_s"),
      "Sends the marker on each connection, and drops what comes before the other end's.");
  m.attr("PROPOSAL_BYTES") = kProposalBytes;
}
