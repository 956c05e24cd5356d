// What Python sees of a rank's engine. No logic: numbers in, numbers out.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstring>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr Nanoseconds kComeOut = 5'000'000'000;

// (address, numel) of buffers. Read by hand: it costs a call of all_gather a tenth of its time to convert.
using Extents = nb::typed<nb::list, nb::typed<nb::tuple, Address, size_t>>;

// Runs Python's signal handlers. True: one of them raised, and the exception is set in this thread.
// They run in the main thread only: others need not take the GIL for it.
bool interrupted(Engine& engine) {
  if (getpid() != gettid()) return false;
  const nb::gil_scoped_acquire gil;
  engine.handling.fetch_add(1, std::memory_order_relaxed);
  const bool raised = PyErr_CheckSignals() != 0;
  engine.handling.fetch_sub(1, std::memory_order_relaxed);
  return raised;
}

Extent extent(nb::handle pair) {
  PyObject* const both = pair.ptr();
  if (!PyTuple_CheckExact(both) || PyTuple_GET_SIZE(both) != 2)
    throw nb::type_error("expected (address, numel)");
  const size_t address = PyLong_AsSize_t(PyTuple_GET_ITEM(both, 0));
  const size_t numel = PyLong_AsSize_t(PyTuple_GET_ITEM(both, 1));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return {reinterpret_cast<unsigned char*>(address), numel};
}

std::vector<Extent> all(const Extents& extents) {
  std::vector<Extent> list;
  list.reserve(extents.size());
  for (const nb::handle pair : extents) list.push_back(extent(pair));
  return list;
}

Operation operation(Engine& engine, const std::vector<int32_t>& code, int kind, int dtype, int op) {
  if (dtype < 0 || static_cast<size_t>(dtype) >= kDTypeCount || op < 0 ||
      static_cast<size_t>(op) >= kReduceOpCount)
    throw std::invalid_argument("no such dtype or operation");
  return {engine.load(code), static_cast<uint8_t>(kind), static_cast<DType>(dtype),
          static_cast<ReduceOp>(op)};
}

std::shared_ptr<Request> post(Engine& engine, bool sending, int peer, int tag, int dtype, Address data,
                              size_t nbytes, double timeout_s) {
  engine.check_process();
  auto request = std::make_shared<Request>();
  request->sending = sending;
  request->peer = peer;
  request->tag = tag;
  request->dtype = static_cast<DType>(dtype);
  request->data = reinterpret_cast<unsigned char*>(data);
  request->nbytes = nbytes;
  request->deadline = deadline_after(timeout_s);
  engine.channels().post(request);
  return request;
}

// (kind, by, about, signal, exit_code, seq) of the fault that aborted the group; kind 0: none.
std::tuple<int, int, int, int, int, uint64_t> fault(Engine& engine) {
  const Fault f = engine.fault();
  return {static_cast<int>(f.kind), f.by, f.about, f.signal, f.exit_code, f.seq};
}

// (tag, dtype wanted, dtype got, bytes wanted, bytes got, seq, more, scratch) of the message that ended the
// group.
std::tuple<int, uint32_t, uint32_t, uint64_t, uint64_t, uint64_t, bool, bool> misfit(Engine& engine) {
  const Misfit m = engine.fault().misfit;
  return {m.tag,        m.wanted_dtype, m.got_dtype, m.wanted_nbytes,
          m.got_nbytes, m.seq,          m.more != 0, m.scratch != 0};
}

// (pid, started, finished, left) of a rank.
std::tuple<int, uint64_t, uint64_t, bool> standing(Engine& engine, int rank) {
  RankCell& cell = engine.world().cell(rank);
  return {cell.pid.load(), cell.started.load(), cell.finished.load(), cell.left.load() != 0};
}

// (kind, dtype, op, root, numel, algorithm) of a rank's operation number `seq`, or None when forgotten.
std::optional<std::tuple<int, int, int, int, uint64_t, int>> remembered(Engine& engine, int rank,
                                                                        uint64_t seq) {
  const CallRecord record = engine.world().record_of(rank, seq);
  if (record.seq != seq || seq == 0) return std::nullopt;
  return std::tuple<int, int, int, int, uint64_t, int>{record.kind, record.dtype, record.op,
                                                       record.root, record.numel, record.algorithm};
}

// One extent is cut into the program's chunks; several are one chunk each.
Chunks bound(const Operation& op, Space space, const Extents& extents) {
  if (extents.size() > 1) return Chunks(all(extents));
  const Extent whole = extents.size() == 0 ? Extent{} : extent(extents[0]);
  return op.cut(space, reinterpret_cast<Address>(whole.data), whole.numel);
}

Binding bound_together(const Operation& op, const Luggage& luggage) {
  const auto cut = [&](Space space, const Packing& packed) {
    return op.cut(space, reinterpret_cast<Address>(packed.data()), packed.numel());
  };
  return {cut(Space::kOut, luggage.out), cut(Space::kIn, luggage.in)};
}

Call call(const Operation& op, int root, size_t numel, double factor, double timeout_s, const Extents& out,
          const Extents& in, bool together, std::string site) {
  std::shared_ptr<Luggage> luggage;
  if (together || !site.empty()) luggage = std::make_shared<Luggage>();
  if (together) {
    luggage->out = Packing(all(out), itemsize(op.dtype));
    luggage->in = Packing(all(in), itemsize(op.dtype));
  }
  if (!site.empty()) luggage->site = std::move(site);
  Binding binding = together ? bound_together(op, *luggage)
                             : Binding{bound(op, Space::kOut, out), bound(op, Space::kIn, in)};
  Call made = op.call(root, numel, factor, timeout_s, std::move(binding));
  made.luggage = std::move(luggage);
  return made;
}

void bind_operation(nb::module_& m) {
  nb::class_<Operation>(m, "Operation", "A loaded plan with its element type and reduction.")
      .def(
          "run",
          [](const Operation& op, Engine& engine, int root, size_t numel, double factor, double timeout_s,
             const Extents& out, const Extents& in, bool together) {
            Call made = call(op, root, numel, factor, timeout_s, out, in, together, {});
            return waiting(engine, false, [&](Held&) { return engine.run(std::move(made)); });
          },
          "Runs to the end; 0, or the kind of fault. out, given: (address, numel) of one buffer, or of one "
          "for "
          "each chunk; `together`: of buffers that are to be treated as one.")
      .def(
          "start",
          [](const Operation& op, Engine& engine, int root, size_t numel, double factor, double timeout_s,
             const Extents& out, const Extents& in, bool together, std::string site) {
            return engine.start(call(op, root, numel, factor, timeout_s, out, in, together, std::move(site)));
          },
          "Queues the same; returns its ticket. site: where in the caller's source, for a Mismatch.");
}

void leave(Engine& engine) {
  const nb::gil_scoped_release no_gil;
  engine.leave();
  // A thread that is still in a call needs the GIL to come out of it, which it cannot get once the
  // interpreter ends: give it a moment. A call of this thread ends only after its signal handler.
  if (engine.within()) return;
  const int own = getpid() == gettid() ? engine.handling.load(std::memory_order_relaxed) : 0;
  const Nanoseconds end = later(kComeOut);
  while (engine.callers.load(std::memory_order_relaxed) > own && now_ns() < end) usleep(200);
}

void abort_group(Engine& engine) {
  engine.check_process();
  engine.abort(Fault{FaultKind::kAborted, engine.rank(), engine.rank()});
}

void bind_messages(nb::class_<Engine>& engine) {
  engine
      .def("post_send",
           [](Engine& self, int peer, int tag, int dtype, Address data, size_t nbytes, double timeout_s) {
             return post(self, true, peer, tag, dtype, data, nbytes, timeout_s);
           })
      .def("post_recv",
           [](Engine& self, int peer, int tag, int dtype, Address data, size_t nbytes, double timeout_s) {
             return post(self, false, peer, tag, dtype, data, nbytes, timeout_s);
           })
      .def(
          "hold",
          [](Engine& self, nb::object buffers) {
            if (self.unsettled()) buffers.release();  // never freed
          },
          nb::arg("buffers").none(),
          "After a failure: keeps buffers for ever if a rank that was stopped may still write to them.")
      .def("detach", [](Engine& self) { self.channels().detach(); })
      .def(
          "unexpected",
          [](Engine& self) {
            self.check_process();
            return self.channels().unexpected();
          },
          nb::call_guard<nb::gil_scoped_release>(),
          "(source, tag, dtype, bytes) of whole messages that nobody here has asked for, in order.")
      .def(
          "wait_request",
          [](Engine& self, Request& request, double timeout_s, bool fatal) {
            self.check_process();
            return waiting(self, false, [&](Held&) {
              return self.channels().wait(request, deadline_after(timeout_s), fatal, self.interrupt());
            });
          },
          nb::arg("request"), nb::arg("timeout_s"), nb::arg("fatal"));
}

void bind_request(nb::module_& m) {
  nb::class_<Request>(m, "Request", "A send or a receive on its way.")
      .def_prop_ro("done", [](const Request& r) { return r.done.load(std::memory_order_acquire); })
      .def_prop_ro("fault", [](const Request& r) { return static_cast<int>(r.fault.load()); })
      .def_ro("peer", &Request::peer)
      .def_ro("tag", &Request::tag)
      .def_ro("nbytes", &Request::nbytes);
}

void bind_region(nb::module_& m) {
  nb::class_<Region>(m, "Region", "Memory that the ranks of one group on one host share.")
      .def(nb::init<int, uint32_t, size_t, bool>(), nb::arg("fd"), nb::arg("ranks"), nb::arg("staging_bytes"),
           nb::arg("create"))
      .def("allow_lending", &Region::allow_lending, "Its ranks may read each other's own memory.")
      .def(
          "joined",
          [](Region& region, int place) {
            return region.cell(place).pid.load(std::memory_order_acquire) != 0;
          },
          nb::arg("place"), "Whether the engine of the rank in this place has ever been there.")
      .def("give_up", &give_up, nb::arg("place"), nb::arg("why"),
           "The rank in that place has failed before it had an engine: for the others it has left.");
  m.def("landmark", &landmark, "The address of a word by which others see that they can read this process.");
  m.def("reaches", &reaches, nb::arg("pid"), nb::arg("landmark"),
        "Whether this process can read the memory of another one.");
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_region(m);
  nb::class_<Connections>(m, "Connections", "How the ranks of a group are joined across hosts.")
      .def(
          "__init__",
          [](Connections* self, std::vector<int> places, std::vector<int> hosts, std::vector<int> pids,
             std::vector<int> control, std::vector<int> data, std::vector<int> messages) {
            new (self) Connections{std::move(places),  std::move(hosts), std::move(pids),
                                   std::move(control), std::move(data),  std::move(messages)};
          },
          nb::arg("places"), nb::arg("hosts"), nb::arg("pids"), nb::arg("control"), nb::arg("data"),
          nb::arg("messages"),
          "Lists by rank: place in the shared memory or -1, host, process id, and sockets, -1 on this host. "
          "An engine takes the sockets over.");
  bind_request(m);
  nb::class_<Engine> engine(m, "Engine", "One rank of one group.");
  bind_operation(m);
  bind_quick(m);
  bind_messages(engine);
  engine
      .def(
          "__init__",
          [](Engine* self, std::shared_ptr<Region> region, int rank, std::vector<int> pidfds, int status_fd,
             int cores, double spin_us, size_t segment_bytes, const Connections& connections) {
            new (self) Engine(std::move(region), rank,
                              {std::move(pidfds), status_fd, cores, spin_us, segment_bytes}, connections);
            self->set_interrupt([self] { return interrupted(*self); });
          },
          nb::arg("region"), nb::arg("rank"), nb::arg("pidfds"), nb::arg("status_fd"), nb::arg("cores"),
          nb::arg("spin_us"), nb::arg("segment_bytes"), nb::arg("connections") = Connections{})
      .def("operation", &operation, nb::arg("code"), nb::arg("kind"), nb::arg("dtype"), nb::arg("op"),
           "Loads a lowered plan for one element type and reduction.", nb::keep_alive<0, 1>())
      .def("done", &Engine::done, nb::arg("ticket"))
      .def(
          "wait",
          [](Engine& self, uint64_t ticket, double timeout_s) {
            return waiting(self, false, [&](Held&) { return self.wait(ticket, deadline_after(timeout_s)); });
          },
          nb::arg("ticket"), nb::arg("timeout_s"))
      .def_prop_ro("issued", &Engine::issued, "Collectives issued up to now.")
      .def_prop_ro("opened", &Engine::opened, "Messages of peers that this rank has read where they lay.")
      .def("remark", &Engine::remark, nb::arg("seq"), nb::arg("text"),
           "Tells the others what this rank knows of the fault; only the first word counts.")
      .def("remark_of", &Engine::remark_of, nb::arg("rank"),
           "(seq, text) of what a rank had to say, or None.")
      .def("fault", &fault)
      .def("refresh", &Engine::refresh, nb::call_guard<nb::gil_scoped_release>(),
           "Learns where the ranks of other hosts stand; takes a moment.")
      .def("misfit", &misfit)
      .def("standing", &standing, nb::arg("rank"))
      .def("remembered", &remembered, nb::arg("rank"), nb::arg("seq"))
      .def("abort", &abort_group)
      .def("close_copies", &Engine::close_copies,
           "In a fork's child: closes its copies of the connections to other hosts.")
      .def("leave", &leave)
      .def(
          "abandon", [](nb::handle_t<Engine> self) { self.inc_ref(); },
          "In a fork's child: never destroy this copy, whose locks are the parent's.");
}
