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
#include "python/message_work.hpp"
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
                              bool between_hosts, bool fed_back, const Combiner* combiner) {
  if (dtype < 0 || static_cast<size_t>(dtype) >= kDTypeCount || op < 0 ||
      static_cast<size_t>(op) >= kReduceOpCount || kind < 0 || kind > UINT8_MAX)
    throw std::invalid_argument("no such kind, dtype or operation");
  if ((static_cast<ReduceOp>(op) == ReduceOp::kFunction) != (combiner != nullptr))
    throw std::invalid_argument("a function has a combiner, and nothing else has one");
  const Program* const program = engine.load(code, plan);
  const size_t longest = combiner == nullptr ? 0 : combiner->whole_items(1);
  if (longest > engine.message_limit(*program) / itemsize(static_cast<DType>(dtype)))
    throw std::invalid_argument("an item is longer than the longest message");
  const uint32_t coding =
      codec < 0 ? 0 : (between_hosts ? kCodesBetweenHosts : 0) | (fed_back ? kCodesFedBack : 0);
  return {program,
          static_cast<uint8_t>(kind),
          static_cast<DType>(dtype),
          static_cast<ReduceOp>(op),
          coding_of(codec, block, coding, *program, static_cast<DType>(dtype)),
          checks_out,
          checks_in,
          combiner};
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
}

// A thread that is still in a call needs the GIL to return, and cannot get it once the interpreter ends:
// wait briefly. A call of this thread ends only after its signal handler.
void wait_for_calls(Engine& engine) {
  const GilRelease no_gil;
  if (engine.in_signal_handler()) return;
  const int own = getpid() == gettid() ? engine.calls_interrupted.load(std::memory_order_relaxed) : 0;
  const Nanoseconds end = to_deadline(kReturn);
  while (engine.calls_under_way.load(std::memory_order_relaxed) > own && now_ns() < end) usleep(200);
}

void abort_group(Engine& engine) {
  engine.check_process();
  engine.abort(Fault{FaultKind::kAborted, engine.rank(), engine.rank()});
}

void bind_messages(nb::class_<Engine>& engine) {
  engine
      .def("look", &look_for, nb::arg("peer"), nb::arg("tag"),
           "(fault, `Status` or None) of the message that a receive would get now.")
      .def("probe", &probe, nb::arg("peer"), nb::arg("tag"), nb::arg("timeout_s"),
           "Waits until `look` finds such a message. After a timeout the group continues.")
      .def_prop_rw(
          "raw_messages", [](Engine& self) { return self.channels().raw; },
          [](Engine& self, bool raw) { self.channels().raw = raw; },
          "Receives take bytes of any dtype and size: a longer message leaves the buffer as it is. Set it "
          "before "
          "the first message.")
      .def(
          "advance",
          [](Engine& self) {
            self.check_process();
            return static_cast<int>(self.channels().advance());
          },
          nb::call_guard<GilRelease>(),
          "Moves all messages that can be moved now; the kind of fault, if any.")
      .def_prop_ro(
          "open_messages", [](Engine& self) { return self.channels().open_requests(); },
          "Sends and receives that are not done.")
      .def(
          "unexpected",
          [](Engine& self) {
            self.check_process();
            std::vector<std::tuple<int, int, uint32_t, uint64_t>> found;
            for (const MessageEnvelope& one : self.channels().unexpected())
              found.emplace_back(one.source, one.tag, one.form, one.nbytes);
            return found;
          },
          nb::call_guard<GilRelease>(), "(source, tag, form, bytes) of whole unexpected messages, in order.");
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
  m.def(
      "tag_in_context", [](int context, int tag) { return tag_in_context(context, tag); }, nb::arg("context"),
      nb::arg("tag"), "The number by which a tag of a duplicate's messages travels.");
  m.attr("MOST_CONTEXTS") = kMostContexts;
  m.attr("MOST_CONTEXT_TAG") = kMostContextTag;
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
  nb::class_<Engine> engine(m, "Engine", "One rank of one group.");
  bind_combiner(m);
  bind_calls(m);
  bind_message_works(m);
  bind_messages(engine);
  bind_faults(m, engine);
  bind_membership(m, engine);
  engine.def("check_process", &Engine::check_process, "Raises RuntimeError in a forked child.")
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
          nb::arg("combiner").none() = nb::none(),
          "Loads a lowered plan for one element type and reduction. plan: the number that identifies it when "
          "ranks compare calls; 0: its number in the catalogue. codec, block: how values are encoded, where "
          "edges carry codes; -1: none do. checks_out, checks_in: that side must not hold a negative number. "
          "between_hosts, fed_back: what errors tell of the codes. combiner: of FUNCTION; keep it alive "
          "while "
          "calls of the operation are under way.",
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
      .def("wait_for_calls", &wait_for_calls, "After `leave`: waits until the calls of threads have ended.")
      .def(
          "abandon", [](nb::handle_t<Engine> self) { self.inc_ref(); },
          "In a forked child: keeps this copy for ever, because its locks belong to the parent.");
}
