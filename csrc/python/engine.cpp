// Binds the engine of a rank. No logic: numbers in, numbers out.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cstring>

#include "python/bindings.hpp"
#include "python/messages.hpp"
#include "python/status.hpp"

namespace nb = nanobind;
using namespace unisono;

// std::is_copy_constructible is true for every vector, whatever its elements.
template <>
struct nanobind::detail::is_copy_constructible<Connections> : std::false_type {};

namespace {

constexpr Nanoseconds kReturn = 5'000'000'000;

// Reports to the other ranks which exception a signal handler has raised. Ctrl-C needs no text.
void report_cause(Engine& engine) {
  if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) != 0) return;
  nb::python_error raised;
  try {
    const nb::object why = nb::module_::import_("unisono.engine.diagnosis.close_reason").attr("close_reason");
    auto text = nb::cast<std::string>(call_python(why, raised.value()));
    if (text.empty()) text = nb::cast<std::string>(raised.type().attr("__name__"));  // such as SystemExit(0)
    engine.report(kLeaving, text);
  } catch (const nb::python_error&) {  // at the interpreter's end: nothing more is reported
  }
  raised.restore();
}

// Runs Python's signal handlers. True: one of them raised, and the exception is set in this thread.
// They run in the main thread only, so other threads need not take the GIL.
bool interrupted(Engine& engine) {
  if (getpid() != gettid()) return false;
  const nb::gil_scoped_acquire gil;
  engine.calls_interrupted.fetch_add(1, std::memory_order_relaxed);
  const bool raised = PyErr_CheckSignals() != 0;
  engine.calls_interrupted.fetch_sub(1, std::memory_order_relaxed);
  if (raised) report_cause(engine);
  return raised;
}

FileDescriptors owned(const std::vector<int>& numbers) { return {numbers.begin(), numbers.end()}; }

EdgeCoding coding_of(int codec, size_t block, uint32_t coding, const Program& program, DType dtype) {
  if (codec < 0 && !program.coded()) return {};
  if (codec < 0 || static_cast<size_t>(codec) >= kCodecCount || dtype != DType::kF32)
    throw std::invalid_argument("a plan whose edges carry codes has a codec, and f32");
  check_block(static_cast<CodecFormat>(codec), block);
  return {&kernels().codecs[static_cast<size_t>(codec)], static_cast<CodecFormat>(codec), block,
          coding % kCodings};
}

OperationDescriptor operation(Engine& engine, const std::vector<int32_t>& code, int kind, int dtype, int op,
                              uint64_t plan, int codec, size_t block, bool checks_out, bool checks_in,
                              bool between_hosts, bool fed_back) {
  if (dtype < 0 || static_cast<size_t>(dtype) >= kDTypeCount || op < 0 ||
      static_cast<size_t>(op) >= kReduceOpCount || kind < 0 || kind > UINT8_MAX)
    throw std::invalid_argument("no such kind, dtype or operation");
  const Program* const program = engine.load(code, plan);
  const uint32_t coding =
      codec < 0 ? 0 : (between_hosts ? kCodesBetweenHosts : 0) | (fed_back ? kCodesFedBack : 0);
  return {program,
          static_cast<uint8_t>(kind),
          static_cast<DType>(dtype),
          static_cast<ReduceOp>(op),
          coding_of(codec, block, coding, *program, static_cast<DType>(dtype)),
          checks_out,
          checks_in};
}

// nullopt: the memory is in use, see ReceiveBuffers.
std::optional<std::shared_ptr<Request>> post(Engine& engine, bool sending, int peer, int tag, int dtype,
                                             bool object, bool exact, Address data, size_t nbytes,
                                             double timeout_s, bool synchronous = false) {
  engine.check_process();
  if (sending || peer != kAnyRank) engine.member(peer);
  if (tag < (sending ? 0 : engine.raw_messages ? INT32_MIN : kAnyTag)) throw std::invalid_argument("a tag is 0 or more");
  // The dtype of an array, or the form of codes (their dtype is uint8).
  if (dtype < 0 || !is_form(static_cast<uint32_t>(dtype)) || (object && dtype >> 8 != 0))
    throw std::invalid_argument("no such dtype");
  auto request = std::make_shared<Request>();
  request->sending = sending;
  request->exact = exact;
  request->raw = engine.raw_messages;
  request->synchronous = synchronous;
  request->peer = peer;
  request->tag = tag;
  request->form = static_cast<uint32_t>(dtype) | (object ? form_of(DType{}, MessageKind::kObject) : 0);
  request->data = reinterpret_cast<unsigned char*>(data);
  request->nbytes = nbytes;
  request->deadline = deadline_after(timeout_s);
  GilLock gil;
  if (!engine.channels().post(request, gil)) return std::nullopt;
  return request;
}

// (fault, the status of the message if one has arrived).
using Probed = std::tuple<int, std::optional<Status>>;

template <class Look>
Probed probed(Engine& engine, int peer, Look look) {
  engine.check_process();
  if (peer != kAnyRank) engine.member(peer);
  std::optional<MessageEnvelope> found;
  const int fault = waiting(engine, false, [&](ReleasableLock&) { return look(found); });
  if (!found) return {fault, std::nullopt};
  return {fault, Status::of(found->source, found->tag, found->form, found->nbytes)};
}

Probed look_for(Engine& engine, int peer, int tag) {
  return probed(engine, peer, [&](auto& found) { return engine.channels().probe_now(peer, tag, found); });
}

Probed probe(Engine& engine, int peer, int tag, double timeout_s) {
  return probed(engine, peer, [&](auto& found) {
    return engine.channels().probe(peer, tag, deadline_after(timeout_s), engine.interrupt(), found);
  });
}

void leave(Engine& engine) {
  const GilRelease no_gil;
  engine.leave();
  // A thread that is still in a call needs the GIL to return, and cannot get it once the interpreter ends:
  // wait briefly. A call of this thread ends only after its signal handler.
  if (engine.in_signal_handler()) return;
  const int own = getpid() == gettid() ? engine.calls_interrupted.load(std::memory_order_relaxed) : 0;
  const Nanoseconds end = to_deadline(kReturn);
  while (engine.calls_under_way.load(std::memory_order_relaxed) > own && now_ns() < end) usleep(200);
}

void abort_group(Engine& engine) {
  engine.check_process();
  engine.abort(Fault{FaultKind::kAborted, engine.rank(), engine.rank()});
}

bool receives_into(Engine& engine, Address data, size_t nbytes) {
  return engine.channels().receive_buffers().overlap(reinterpret_cast<unsigned char*>(data), nbytes);
}

void bind_messages(nb::class_<Engine>& engine) {
  engine
      .def("post_send",
           [](Engine& self, int peer, int tag, int dtype, bool object, Address data, size_t nbytes,
              double timeout_s, bool synchronous) {
             return post(self, true, peer, tag, dtype, object, false, data, nbytes, timeout_s, synchronous);
           },
           nb::arg("peer"), nb::arg("tag"), nb::arg("dtype"), nb::arg("object"), nb::arg("data"),
           nb::arg("nbytes"), nb::arg("timeout_s"), nb::arg("synchronous") = false)
      .def_rw("raw_messages", &Engine::raw_messages,
              "Receives take bytes of any dtype; of a longer message `own` has the bytes; tags have contexts.")
      .def("post_recv",
           [](Engine& self, int peer, int tag, int dtype, bool exact, Address data, size_t nbytes,
              double timeout_s) {
             return post(self, false, peer, tag, dtype, false, exact, data, nbytes, timeout_s);
           })
      .def("receives_into", &receives_into, nb::arg("data"), nb::arg("nbytes"),
           "Whether this memory is that of a receive under way, or of one whose end the caller has not seen.")
      .def("look", &look_for, nb::arg("peer"), nb::arg("tag"),
           "(fault, `Status` or None) of the message that a receive would get now.")
      .def("probe", &probe, nb::arg("peer"), nb::arg("tag"), nb::arg("timeout_s"),
           "Waits until `look` finds such a message. After a timeout the group continues.")
      .def(
          "cancel",
          [](Engine& self, Request& request) {
            self.check_process();
            return self.channels().cancel(request);
          },
          nb::arg("request"), nb::call_guard<GilRelease>(),
          "Cancels a receive that no message has matched; False: it cannot.")
      .def(
          "hold",
          [](Engine& self, nb::object buffers) {
            if (self.has_open_transfers()) buffers.release();  // never freed
          },
          nb::arg("buffers").none(),
          "After a failure: keeps the buffers for ever if a stopped rank may still write to them.")
      .def("detach",
           [](Engine& self) {
             self.check_process();
             GilLock gil;
             self.channels().detach(gil);
           })
      .def(
          "unexpected",
          [](Engine& self) {
            self.check_process();
            std::vector<std::tuple<int, int, uint32_t, uint64_t>> found;
            for (const MessageEnvelope& one : self.channels().unexpected())
              found.emplace_back(one.source, one.tag, one.form, one.nbytes);
            return found;
          },
          nb::call_guard<GilRelease>(), "(source, tag, form, bytes) of whole unexpected messages, in order.")
      .def(
          "wait_request",
          [](Engine& self, Request& request, double timeout_s, bool fatal) {
            self.check_process();
            return waiting(self, false, [&](ReleasableLock&) {
              return self.channels().wait(request, deadline_after(timeout_s), fatal, self.interrupt());
            });
          },
          nb::arg("request"), nb::arg("timeout_s"), nb::arg("fatal"));
}

void bind_request(nb::module_& m) {
  nb::class_<Request>(m, "Request", "A send or a receive under way.")
      .def_prop_ro("done", [](const Request& r) { return r.done.load(std::memory_order_acquire); })
      .def(
          "see", [](Request& r) { r.seen.store(r.done.load(std::memory_order_acquire)); },
          "Call when the caller learns whether it is done.")
      .def_prop_ro("fault", [](const Request& r) { return static_cast<int>(r.fault.load()); })
      .def_ro("peer", &Request::peer)
      .def_ro("cancelled", &Request::cancelled)
      .def(
          "take_own",
          [](Request& r) -> nb::object {
            if (!r.own) return nb::none();
            return bytes_of(std::move(r.own), r.nbytes);
          },
          "The bytes of a message that was longer than the buffer of a raw receive, otherwise None.")
      .def_prop_ro(
          "status", [](const Request& r) { return Status::of(r.peer, r.tag, r.form, r.nbytes); },
          "The status of a receive that has ended without an error.");
}

void bind_connections(nb::module_& m) {
  nb::class_<Connections>(m, "Connections", "How the ranks of a group are connected across hosts.")
      .def(
          "__init__",
          [](Connections* self, std::vector<int> places, std::vector<int> hosts,
             const std::vector<int>& control, const std::vector<int>& data,
             const std::vector<int>& messages) {
            new (self) Connections{std::move(places), std::move(hosts), owned(control), owned(data),
                                   owned(messages)};
          },
          nb::arg("places"), nb::arg("hosts"), nb::arg("control"), nb::arg("data"), nb::arg("messages"),
          "Lists by rank: place in the shared memory or -1, host, and sockets, -1 on this host. "
          "Takes the sockets over, for one engine.");
}

void bind_region(nb::module_& m) {
  nb::class_<Region>(m, "Region", "Memory that the ranks of one group on one host share.")
      .def(nb::init<int, uint32_t, size_t, bool>(), nb::arg("fd"), nb::arg("ranks"), nb::arg("staging_bytes"),
           nb::arg("create"))
      .def("enable_zero_copy", &Region::enable_zero_copy, "Allows its ranks to read each other's memory.")
      .def(
          "joined",
          [](Region& region, int index) {
            return region.cell(region.member(index)).pid.load(std::memory_order_acquire) != 0;
          },
          nb::arg("place"), "Whether the rank in this place has made its engine.")
      .def(
          "give_up",
          [](Region& region, int index, const std::string& why) {
            give_up(region, region.member(index), why);
          },
          nb::arg("place"), nb::arg("why"),
          "Marks the rank in that place as left: it has failed before it had an engine.");
  m.def("access_probe", &access_probe,
        "The address of a known word. A process that can read it there can read this process's memory.");
  m.def("reaches", &reaches, nb::arg("pid"), nb::arg("access_probe"),
        "Whether this process can read the memory of another one.");
}

}  // namespace

void bind_engine(nb::module_& m) {
  bind_region(m);
  bind_connections(m);
  bind_status(m);
  bind_request(m);
  nb::class_<Engine> engine(m, "Engine", "One rank of one group.");
  bind_calls(m);
  bind_messages(engine);
  bind_faults(m, engine);
  bind_membership(m, engine);
  engine
      .def(
          "__init__",
          [](Engine* self, std::shared_ptr<Region> region, int rank, const std::vector<int>& pidfds,
             int status_fd, int cores, double spin_us, size_t segment_bytes, bool spread,
             Connections* connections, std::vector<int> pids) {
            EngineOptions options{owned(pidfds), status_fd, cores,          spin_us,
                                  segment_bytes, spread,    std::move(pids)};
            // Not a default `Connections`: all engines would take over the same one.
            Connections given = connections == nullptr ? Connections{} : std::move(*connections);
            new (self) Engine(std::move(region), rank, std::move(options), std::move(given));
            self->set_interrupt([self] { return interrupted(*self); });
          },
          nb::arg("region"), nb::arg("rank"), nb::arg("pidfds"), nb::arg("status_fd"), nb::arg("cores"),
          nb::arg("spin_us"), nb::arg("segment_bytes"), nb::arg("spread") = true,
          nb::arg("connections").none() = nb::none(), nb::arg("pids") = std::vector<int>(),
          "Takes over the pidfds and the sockets of `connections`, also when it raises an error. pids: the "
          "process of every rank; empty: not known where a rank has not made its engine.")
      .def(
          "operation", &operation, nb::arg("code"), nb::arg("kind"), nb::arg("dtype"), nb::arg("op"),
          nb::arg("plan") = 0, nb::arg("codec") = -1, nb::arg("block") = 0, nb::arg("checks_out") = false,
          nb::arg("checks_in") = false, nb::arg("between_hosts") = false, nb::arg("fed_back") = false,
          "Loads a lowered plan for one element type and reduction. plan: the number that identifies it when "
          "ranks compare calls; 0: its number in the catalogue. codec, block: how values are encoded, where "
          "edges carry codes; -1: none do. checks_out, checks_in: that side must not hold a negative number. "
          "between_hosts, fed_back: what errors tell of the codes.",
          nb::keep_alive<0, 1>())
      .def_prop_ro("issued", &Engine::issued, "Collectives issued up to now.")
      .def_prop_ro("mapped_messages", &Engine::mapped_messages,
                   "How many messages this rank has read in place.")
      .def("report", &Engine::report, nb::arg("seq"), nb::arg("text"),
           "Reports to the other ranks what this rank knows about the fault; only the first report counts.")
      .def("abort", &abort_group)
      .def("close_copies", &Engine::close_copies,
           "In a forked child: closes its copies of the connections to other hosts.")
      .def("leave", &leave)
      .def(
          "abandon", [](nb::handle_t<Engine> self) { self.inc_ref(); },
          "In a forked child: keeps this copy for ever, because its locks belong to the parent.");
}
