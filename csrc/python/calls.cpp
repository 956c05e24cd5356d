// The path of every call of a group. A repeated call goes to the engine at once. A new call is first checked
// and planned by one Python function. Blocking, asynchronous and coalesced calls all take this path.
#include "python/calls.hpp"

#include <nanobind/stl/vector.h>

#include <structmember.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <new>
#include <system_error>

#include "python/messages.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr size_t kBriefBytes = 64 * 1024;  // copied and reduced in some microseconds
constexpr size_t kLargeBytes = 1 << 20;    // takes many times as long as waking a thread

// Buffers as Python passes them. They are not converted by nanobind: that takes a tenth of the time of an
// all_gather.
using Extents = nb::typed<nb::list, nb::typed<nb::tuple, Address, size_t>>;

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

// One extent is cut into the program's chunks; several are one chunk each.
Chunks chunks(const Operation& operation, Space space, std::span<const Extent> extents) {
  if (extents.size() > 1) return Chunks(std::vector<Extent>(extents.begin(), extents.end()));
  const Extent whole = extents.empty() ? Extent{} : extents[0];
  return operation.cut(space, reinterpret_cast<Address>(whole.data), whole.numel);
}

bool meet(const Extent& a, const Extent& b, size_t item) {
  return a.numel > 0 && b.numel > 0 && a.data < b.data + b.numel * item && b.data < a.data + a.numel * item;
}

// Whether nothing that is written shares memory with anything else.
bool apart(const CallBuffers& out, const CallBuffers& given) {
  if (out.count == 0) return true;
  const size_t item = itemsize(static_cast<DType>(out.dtype));
  for (size_t i = 0; i < out.count; ++i) {
    for (size_t j = 0; j < i; ++j)
      if (meet(out.extents[i], out.extents[j], item)) return false;
    for (size_t j = 0; j < given.count; ++j)
      if (meet(out.extents[i], given.extents[j], item)) return false;
  }
  return true;
}

// The arguments of a call without its buffers. Objects are compared by identity: names, operations and flags
// are usually the same objects in every call. A call with another object counts as a new call.
struct CallOptions {
  PyObject *collective, *op, *algorithm, *reproducible, *codec, *between_hosts, *max_error;
  int64_t root;
  bool operator==(const CallOptions&) const = default;
};

// A call that was checked once. Another call needs no check if it has the same options, dtypes and sizes, and
// either the same distances between its buffers, or buffers that share no memory.
struct Known {
  std::array<nb::object, 7> kept;  // keeps the options alive, so that no other object gets their addresses
  CallOptions options{};
  int out_dtype = -1, given_dtype = -1;
  size_t feedback_numel = 0;
  std::vector<size_t> out_numel, given_numel;
  std::vector<ptrdiff_t> distances;  // from the first buffer
  nb::object note;                   // see BoundCall
  bool writes = false;
  Operation operation{};
  size_t numel = 0;
  double factor = 1;

  bool fits(const CallOptions& given_options, const CallBuffers& out, const CallBuffers& given,
            const CallBuffers& feedback) const {
    return operation.program != nullptr && options == given_options && out_dtype == out.dtype &&
           given_dtype == given.dtype && alike(out_numel, out) && alike(given_numel, given) &&
           !(writes && out.readonly) && (placed_alike(out, given) || apart(out, given)) &&
           (options.codec == Py_None ? feedback.count == 0 : codes(out, given, feedback));
  }
  void place(const CallBuffers& out, const CallBuffers& given) {
    distances.clear();
    each(out, given, [&](size_t, ptrdiff_t distance) {
      distances.push_back(distance);
      return true;
    });
  }

 private:
  // The checks that a call with codes needs each time. Where one fails, Python raises the error.
  bool codes(const CallBuffers& out, const CallBuffers& given, const CallBuffers& feedback) const {
    const auto positive = [](const CallBuffers& side) {
      return std::ranges::all_of(side.all(), [](const Extent& extent) {
        return first_negative(reinterpret_cast<const float*>(extent.data), extent.numel) == extent.numel;
      });
    };
    if ((operation.checks_out && !positive(out)) || (operation.checks_in && !positive(given))) return false;
    if (feedback_numel == 0) return feedback.count == 0;
    return feedback.count == 1 && feedback.dtype == static_cast<int>(DType::kF32) && !feedback.readonly &&
           feedback.extents[0].numel == feedback_numel && apart(feedback, out) && apart(feedback, given);
  }
  static bool alike(const std::vector<size_t>& numel, const CallBuffers& side) {
    const auto all = side.all();
    return std::equal(numel.begin(), numel.end(), all.begin(), all.end(),
                      [](size_t known, const Extent& extent) { return known == extent.numel; });
  }
  bool placed_alike(const CallBuffers& out, const CallBuffers& given) const {
    return each(out, given, [&](size_t i, ptrdiff_t distance) { return distances[i] == distance; });
  }
  template <class Look>
  static bool each(const CallBuffers& out, const CallBuffers& given, Look look) {
    const unsigned char* const first = out.count > 0 ? out.extents[0].data : given.extents[0].data;
    size_t i = 0;
    for (const CallBuffers* side : {&out, &given})
      for (const Extent& extent : side->all())
        if (!look(i++, extent.data - first)) return false;
    return true;
  }
};

// The native base class of `unisono.Group`: runs its calls, and remembers those that were checked.
class Calls {
 public:
  Calls(nb::object planner, nb::object engine, double timeout_s)
      : planner(std::move(planner)), engine_(std::move(engine)), timeout_s_(timeout_s), slots_(kSlots) {}

  // Runs a collective and returns the caller's result.
  nb::object run(const Arguments& given) {
    nb::object result = repeat(given);
    if (result.is_valid()) return result;
    const nb::object plan = planner.attr("plan");
    std::array<PyObject*, kAsync + kArguments - kPlain> asked;  // all but async_op and timeout
    std::copy(given.begin(), given.begin() + kAsync, asked.begin());
    std::copy(given.begin() + kPlain, given.end(), asked.begin() + kAsync);
    const nb::object bound = nb::steal(PyObject_Vectorcall(plan.ptr(), asked.data(), asked.size(), nullptr));
    if (!bound.is_valid()) throw nb::python_error();
    if (nb::isinstance<BoundCall>(bound)) remember(given, *nb::inst_ptr<BoundCall>(bound));
    return execute(bound, given[kAsync], given[kTimeout]);
  }

  // Repeats a remembered call. Returns an invalid object, with no effect, if it is not remembered.
  nb::object repeat(const Arguments& given) {
    if (!PyLong_CheckExact(given[kRoot]) || !(given[kAsync] == Py_False || given[kAsync] == Py_True))
      return {};
    CallBuffers out, in, feedback;
    if (!out.see(given[kOut]) || !in.see(given[kGiven]) || !feedback.see(given[kFeedback])) return {};
    const CallOptions options = options_of(given);
    const size_t home = slot(options, out, in);
    const Known* const found =
        among(home, [&](const Known& each) { return each.fits(options, out, in, feedback); });
    if (found == nullptr) return {};
    const Known& known = *found;
    // Copied: `seconds` may run Python, which may put another call into the slot or close the group.
    const Operation operation = known.operation;
    const size_t numel = known.numel;
    const double factor = known.factor;
    const nb::object note = known.note;
    const double timeout_s = seconds(given[kTimeout], timeout_s_, planner);
    const nb::object alive = engine_;  // keeps the engine alive if another thread closes the group
    if (alive.is_none()) return {};    // closed
    Call made =
        operation.call(static_cast<int>(options.root), numel, factor, timeout_s,
                       {chunks(operation, Space::kOut, out.all()), chunks(operation, Space::kIn, in.all())});
    made.coder = operation.coder;
    if (feedback.count > 0) made.coder.feedback = reinterpret_cast<float*>(feedback.extents[0].data);
    const auto keep = [&] {
      return Kept{nb::borrow(given[kOut]),
                  nb::borrow(given[kGiven]),
                  out.kept(),
                  in.kept(),
                  nb::borrow(given[kFeedback]),
                  feedback.kept()};
    };
    return issue(alive, given[kCollective], std::move(made), out.nbytes() + in.nbytes(), nb::none(), note,
                 keep, given[kAsync] == Py_True, timeout_s);
  }

  // Runs or starts a planned call, or several in order. Of several it returns the last one's work.
  nb::object execute(nb::handle planned, nb::handle async, nb::handle timeout) {
    const double timeout_s = seconds(timeout, timeout_s_, planner);
    const int later = PyObject_IsTrue(async.ptr());
    if (later < 0) throw nb::python_error();
    if (nb::isinstance<BoundCall>(planned)) return execute_one(planned, later != 0, timeout_s);
    if (PyCallable_Check(planned.ptr()) != 0) return planned(later != 0, timeout);  // another backend
    nb::object result = nb::none();
    for (const nb::handle bound : planned) result = execute_one(bound, later != 0, timeout_s);
    return result;
  }

  // Sends (True) or receives (the Status) a message. None: Python has to do it; nothing has happened.
  // `now`: only if the message can be passed at once and has the size of the buffer.
  nb::object pass(PyObject* const* given, bool sending, bool now, MessageKind kind = MessageKind::kArray) {
    const nb::object alive = engine_;
    if (alive.is_none()) return nb::none();
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    Transfer message{sending, kind, now || kind == MessageKind::kObject, timeout_s_};
    if (!message.read(given, engine)) return nb::none();
    if (now) return message.pass_now(engine) ? message.outcome() : nb::none();
    const auto keep = [&] { return Kept{nb::borrow(given[0]), {}, message.kept(), {}}; };
    int fault;
    try {
      fault = waiting(engine, true, [&](HeldLock& held) { return message.pass(engine, held); });
    } catch (...) {
      if (engine.unsettled()) keep().for_ever();
      throw;
    }
    if (fault != 0) fail(engine, keep(), message.name(), message.timeout_s, nb::none());
    return message.outcome();
  }

  // Forgets all remembered calls, after a change that affects how calls are planned.
  void forget(double timeout_s) {
    timeout_s_ = timeout_s;
    slots_ = std::vector<Known>(kSlots);
  }
  void close() {
    forget(timeout_s_);
    engine_ = nb::none();
  }
  // For the garbage collector: a remembered option, such as the caller's own algorithm, may refer to the
  // group.
  int visit(visitproc visit, void* arg) {
    Py_VISIT(planner.ptr());
    for (const Known& known : slots_)
      for (const nb::object& word : known.kept) Py_VISIT(word.ptr());
    return 0;
  }
  void clear() {
    planner = nb::none();
    forget(timeout_s_);
  }
  // Asynchronous collectives that are not known to have ended.
  nb::typed<nb::list, CollectiveWork> works() const {
    nb::typed<nb::list, CollectiveWork> list;
    for (const nb::object& work : works_) list.append(work);
    return list;
  }
  // Releases these works. Call when no thread moves bytes of their buffers any more.
  void release() {
    const std::deque<nb::object> works = std::exchange(works_, {});
    for (const nb::object& work : works) nb::inst_ptr<CollectiveWork>(work)->let_go();
  }

  nb::object planner;

 private:
  nb::object execute_one(nb::handle planned, bool async, double timeout_s) {
    nb::object alive = engine_;
    if (alive.is_none()) alive = planner.attr("engine");  // raises once the group was closed
    const BoundCall& bound = nb::cast<const BoundCall&>(planned);
    const auto keep = [&] { return Kept{bound.keep, {}, {}, {}}; };
    return issue(alive, bound.name, bound.call(timeout_s), bound.nbytes(), bound.result, bound.note, keep,
                 async, timeout_s);
  }

  template <class Keep>
  nb::object issue(const nb::object& alive, nb::handle name, Call&& made, size_t nbytes,
                   const nb::object& result, const nb::object& note, Keep keep, bool async,
                   double timeout_s) {
    const bool brief = nbytes <= kBriefBytes;
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    if (async) {
      made.large = nbytes >= kLargeBytes;
      static const nb::handle type = nb::type<CollectiveWork>();
      const nb::object handed = nb::inst_alloc(type);  // the work lies in it: one allocation, and not two
      auto* const work = nb::inst_ptr<CollectiveWork>(handed);
      new (work) CollectiveWork(planner, alive, nb::borrow(name), keep(), result, timeout_s, brief);
      nb::inst_mark_ready(handed);
      while (!works_.empty() && nb::inst_ptr<CollectiveWork>(works_.front())->done()) {
        const nb::object ended = std::move(works_.front());
        works_.pop_front();
        nb::inst_ptr<CollectiveWork>(ended)->let_go();
      }
      works_.push_back(handed);
      work->start(std::move(made), note);
      return handed;
    }
    int fault;
    try {
      fault = waiting(engine, brief, [&](HeldLock& held) { return engine.run(std::move(made), &held); });
    } catch (...) {
      if (engine.unsettled()) keep().for_ever();
      throw;
    }
    if (fault != 0) fail(engine, keep(), name, timeout_s, note);
    return result.is_none() ? nb::none() : result();
  }

  // Raises the error. A stopped rank may write to the buffers later: then they are never freed.
  [[noreturn]] void fail(const Engine& engine, const Kept& buffers, nb::handle name, double timeout_s,
                         const nb::object& note) {
    if (engine.unsettled()) buffers.for_ever();
    planner.attr("fail")(name, timeout_s, note);
    throw std::logic_error("an operation failed, and no error was raised");
  }

  static CallOptions options_of(const Arguments& given) {
    int overflow = 0;
    const int64_t root = PyLong_AsLongLongAndOverflow(given[kRoot], &overflow);
    return {given[kCollective], given[kOp],           given[kAlgorithm], given[kReproducible],
            given[kCodec],      given[kBetweenHosts], given[kMaxError],  overflow != 0 ? INT64_MIN : root};
  }

  void remember(const Arguments& given, const BoundCall& bound) {
    CallBuffers out, in;
    if (bound.together || !bound.result.is_none() || !PyLong_CheckExact(given[kRoot]) ||
        !out.see(given[kOut]) || !in.see(given[kGiven]))
      return;
    const CallOptions options = options_of(given);
    Known known;
    known.kept = {nb::borrow(options.collective), nb::borrow(options.op),
                  nb::borrow(options.algorithm),  nb::borrow(options.reproducible),
                  nb::borrow(options.codec),      nb::borrow(options.between_hosts),
                  nb::borrow(options.max_error)};
    known.options = options;
    known.out_dtype = out.dtype;
    known.given_dtype = in.dtype;
    for (const Extent& extent : out.all()) known.out_numel.push_back(extent.numel);
    for (const Extent& extent : in.all()) known.given_numel.push_back(extent.numel);
    known.feedback_numel = bound.feedback.numel;
    known.place(out, in);
    known.writes = bound.writes;
    known.operation = bound.operation;
    known.numel = bound.numel;
    known.factor = bound.factor;
    known.note = bound.note;
    const size_t home = slot(options, out, in);
    Known* const unused = among(home, [](const Known& each) { return each.operation.program == nullptr; });
    // Swap: destroying the old entry may run Python code, and the slot has to be complete by then.
    std::swap(unused != nullptr ? *unused : slots_[home], known);
  }

  // The first of the slots a call may be in that `fits`; nullptr: none does.
  template <class Fits>
  Known* among(size_t home, Fits fits) {
    for (size_t next = 0; next < kPlaces; ++next)
      if (Known& each = slots_[(home + next) % kSlots]; fits(each)) return &each;
    return nullptr;
  }

  static size_t slot(const CallOptions& options, const CallBuffers& out, const CallBuffers& given) {
    uint64_t mixed = reinterpret_cast<uintptr_t>(options.collective) >> 4;
    const auto mix = [&](uint64_t value) { mixed = (mixed ^ value) * 0x9e3779b97f4a7c15ULL; };
    mix(reinterpret_cast<uintptr_t>(options.op) >> 4 ^ reinterpret_cast<uintptr_t>(options.codec) << 8 ^
        static_cast<uint64_t>(options.root) << 40);
    mix(static_cast<uint64_t>(out.dtype + 1) << 48 ^ static_cast<uint64_t>(given.dtype + 1) << 56 ^
        (out.count > 0 ? out.extents[0].numel : 0));
    mix(given.count > 0 ? given.extents[0].numel : 0);
    return (mixed >> 56) % kSlots;
  }

  static constexpr size_t kSlots = 128;
  static constexpr size_t kPlaces = 8;  // so many calls may want one slot before one has to be checked again
  nb::object engine_;
  double timeout_s_;
  std::vector<Known> slots_;
  std::deque<nb::object> works_;
};

// ---- methods in CPython's own calling convention ---------------------------------------------------
// nanobind's conversions would take a tenth of the time of a barrier.

template <class Body>
PyObject* guarded(Body body) {
  try {
    return nb::object(body()).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (nb::builtin_exception& error) {
    PyErr_SetString(error.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError,
                    error.what());
  } catch (const std::system_error& error) {
    set_os_error(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

using Body = nb::object (*)(Calls&, PyObject* const*);
template <size_t kCount, Body kBody>
PyObject* called(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "takes %zu arguments", kCount);
    return nullptr;
  }
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_RuntimeError, "this group was never made");
    return nullptr;
  }
  return guarded([&] { return kBody(*nb::inst_ptr<Calls>(self), given); });
}

nb::object send(Calls& calls, PyObject* const* given) { return calls.pass(given, true, false); }
nb::object receive(Calls& calls, PyObject* const* given) { return calls.pass(given, false, false); }
nb::object send_object(Calls& calls, PyObject* const* given) {
  return calls.pass(given, true, false, MessageKind::kObject);
}
nb::object receive_object(Calls& calls, PyObject* const* given) {
  return calls.pass(given, false, false, MessageKind::kObject);
}
nb::object send_now(Calls& calls, PyObject* const* given) { return calls.pass(given, true, true); }
nb::object receive_now(Calls& calls, PyObject* const* given) { return calls.pass(given, false, true); }
Arguments all_of(PyObject* const* given) {
  Arguments arguments;
  arguments.fill(Py_None);
  std::copy_n(given, kPlain, arguments.begin());
  return arguments;
}
nb::object run(Calls& calls, PyObject* const* given) { return calls.run(all_of(given)); }
nb::object repeat(Calls& calls, PyObject* const* given) {
  nb::object result = calls.repeat(all_of(given));
  return result.is_valid() ? result : nb::borrow(Py_NotImplemented);
}

template <size_t kCount, Body kBody>
PyMethodDef method(const char* name, const char* what) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called<kCount, kBody>)),
          METH_FASTCALL, what};
}

PyMethodDef kMethods[] = {
    method<kPlain, run>("_call",
                        "Runs a call of any kind: (kind, out, given, op, root, algorithm, reproducible, "
                        "async_op, timeout)."),
    method<kPlain, repeat>("_repeat", "As `_call`, for a remembered call; NotImplemented: it is not one."),
    method<4, send>("_send", "Sends (x, peer, tag, timeout); True, or None: Python has to do it."),
    method<4, receive>("_recv", "Receives (x, peer, tag, timeout); its `Status`, or None as above."),
    method<4, send_object>("_send_object", "As `_send`, a part of an object."),
    method<4, receive_object>("_recv_object", "As `_recv`, a part of an object."),
    method<4, send_now>("_send_now", "As `_send`; None also if it cannot be sent at once."),
    method<4, receive_now>("_recv_now", "As `_recv`; None also if it has not arrived, or is shorter."),
};

int traverse_calls(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<Calls>(self)->visit(visit, arg) : 0;
}

int clear_calls(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Calls>(self)->clear();
  return 0;
}

PyType_Slot kCollected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_calls)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_calls)},
                            {0, nullptr}};

// ---- a collective as a method of `Group` -----------------------------------------------------------

constexpr size_t kMostParameters = 12;

// A method of a subclass of `Calls`. It has the signature and the docstring of `function`, a Python method.
// That is called only to raise the TypeError for arguments that do not fit; its body never runs.
struct Collective {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyTypeObject* owner;  // Calls
  PyObject* function;
  Arguments defaults;
  std::array<PyObject*, kMostParameters> names;
  std::array<uint8_t, kMostParameters> places;  // among the arguments
  size_t positional, count;
  uint32_t required;  // bits, of the names
};

// By identity first: keyword names in source code are interned. Names from a dictionary may not be.
size_t find(const Collective& method, PyObject* name) {
  const auto end = method.names.begin() + static_cast<ptrdiff_t>(method.count);
  auto found = std::find(method.names.begin(), end, name);
  if (found == end)
    found = std::find_if(method.names.begin(), end,
                         [&](PyObject* known) { return PyUnicode_Compare(known, name) == 0; });
  return static_cast<size_t>(found - method.names.begin());
}

// Puts the arguments in their places; returns whether they fit the signature.
bool place(const Collective& method, PyObject* const* given, size_t count, PyObject* keywords,
           Arguments& arguments) {
  if (count > method.positional) return false;
  uint32_t seen = (uint32_t{1} << count) - 1;
  for (size_t i = 0; i < count; ++i) arguments[method.places[i]] = given[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    const size_t i = find(method, PyTuple_GET_ITEM(keywords, k));
    if (i == method.count || (seen >> i & 1) != 0) return false;
    seen |= uint32_t{1} << i;
    arguments[method.places[i]] = given[count + static_cast<size_t>(k)];
  }
  return (seen & method.required) == method.required;
}

PyObject* call_collective(PyObject* self, PyObject* const* given, size_t flags, PyObject* keywords) {
  const Collective& method = *reinterpret_cast<Collective*>(self);
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  if (count == 0 || !PyObject_TypeCheck(given[0], method.owner) || !nb::inst_ready(given[0])) {
    PyErr_SetString(PyExc_TypeError, "the first argument is no group, or one that was never made");
    return nullptr;
  }
  Arguments arguments = method.defaults;
  if (place(method, given + 1, count - 1, keywords, arguments))
    return guarded([&] { return nb::inst_ptr<Calls>(given[0])->run(arguments); });
  const nb::object refused = nb::steal(PyObject_Vectorcall(method.function, given, flags, keywords));
  if (refused.is_valid())  // the function moves no data, so returning would look like success
    PyErr_SetString(PyExc_SystemError, "the arguments fit a signature that the engine does not know");
  return nullptr;
}

template <class Visit>
int each(Collective& method, Visit visit) {
  if (const int stop = visit(method.function)) return stop;
  for (PyObject*& held : method.defaults)
    if (const int stop = visit(held)) return stop;
  for (PyObject*& name : method.names)
    if (const int stop = visit(name)) return stop;
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each(*reinterpret_cast<Collective*>(self),
              [&](PyObject*& held) { return held == nullptr ? 0 : visit(held, arg); });
}

int clear(PyObject* self) {
  return each(*reinterpret_cast<Collective*>(self), [](PyObject*& held) {
    Py_CLEAR(held);
    return 0;
  });
}

void end(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* bind(PyObject* self, PyObject* group, PyObject*) {
  return group == nullptr || group == Py_None ? Py_NewRef(self) : PyMethod_New(self, group);
}

// __name__, __qualname__ and other attributes come from the function.
PyObject* attribute(PyObject* self, PyObject* name) {
  if (PyObject* const own = PyObject_GenericGetAttr(self, name)) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Collective*>(self)->function, name);
}

PyObject* text(PyObject* self) { return PyObject_Repr(reinterpret_cast<Collective*>(self)->function); }

PyObject* doc(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Collective*>(self)->function, "__doc__");
}

PyMemberDef kMembers[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Collective, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(Collective, function), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef kComputed[] = {{"__doc__", doc, nullptr, nullptr, nullptr},
                           {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot kCollectiveSlots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                  {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(end)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                  {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                                  {Py_tp_repr, reinterpret_cast<void*>(text)},
                                  {Py_tp_members, kMembers},
                                  {Py_tp_getset, kComputed},
                                  {0, nullptr}};

PyType_Spec kCollectiveSpec = {"unisono._native.Collective", sizeof(Collective), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                                   Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_GC |
                                   Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               kCollectiveSlots};

using Objects = nb::typed<nb::list, nb::object>;
using Parameters = nb::typed<nb::list, nb::typed<nb::tuple, nb::str, int, bool>>;

nb::any make_collective(const nb::object& type, nb::handle owner, nb::object function,
                        const Objects& defaults, const Parameters& parameters, size_t positional) {
  if (defaults.size() != kArguments || parameters.size() > kMostParameters || positional > parameters.size())
    throw std::invalid_argument("a collective has a default for each argument and at most twelve parameters");
  auto* const made = PyObject_GC_New(Collective, reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (made == nullptr) throw nb::python_error();
  made->vectorcall = call_collective;
  made->owner = reinterpret_cast<PyTypeObject*>(owner.ptr());
  made->function = function.release().ptr();
  made->defaults.fill(nullptr);
  made->names.fill(nullptr);
  nb::any method = nb::steal<nb::any>(reinterpret_cast<PyObject*>(made));  // what follows may throw
  for (size_t i = 0; i < kArguments; ++i) made->defaults[i] = nb::object(defaults[i]).release().ptr();
  made->count = parameters.size();
  made->positional = positional;
  made->required = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const nb::handle parameter = parameters[i];
    made->names[i] = nb::cast<nb::str>(parameter[0]).release().ptr();
    PyUnicode_InternInPlace(&made->names[i]);
    made->places[i] = std::min<uint8_t>(nb::cast<uint8_t>(parameter[1]), kMaxError);
    made->required |= uint32_t{nb::cast<bool>(parameter[2])} << i;
  }
  PyObject_GC_Track(made);
  return method;
}

void bind_collective(nb::module_& m, const nb::object& calls) {
  const nb::object type = nb::steal(PyType_FromSpec(&kCollectiveSpec));
  if (!type.is_valid()) throw nb::python_error();
  m.attr("Collective") = type;
  m.def(
      "collective",
      [type, calls](nb::object function, const Objects& defaults, const Parameters& parameters,
                    size_t positional) {
        return make_collective(type, calls, std::move(function), defaults, parameters, positional);
      },
      nb::arg("function"), nb::arg("defaults"), nb::arg("parameters"), nb::arg("positional"),
      "A method of `Calls` with the signature of `function`. defaults: all arguments of a call; "
      "parameters: (name, place among them, required) in order, the first `positional` also without a name.");
}

}  // namespace

size_t BoundCall::nbytes() const {
  size_t numel = 0;
  for (const std::vector<Extent>* side : {&out, &given})
    for (const Extent& extent : *side) numel += extent.numel;
  return numel * itemsize(operation.dtype);
}

Call BoundCall::call(double timeout_s) const {
  Call made = bound(timeout_s);
  made.coder = operation.coder;
  if (feedback.numel > 0) made.coder.feedback = reinterpret_cast<float*>(feedback.data);
  return made;
}

Call BoundCall::bound(double timeout_s) const {
  if (!together)
    return operation.call(root, numel, factor, timeout_s,
                          {chunks(operation, Space::kOut, out), chunks(operation, Space::kIn, given)});
  auto packed = std::make_shared<PackedBuffers>();
  packed->out = Packing(out, itemsize(operation.dtype));
  packed->in = Packing(given, itemsize(operation.dtype));
  const auto cut = [&](Space space, const Packing& side) {
    return operation.cut(space, reinterpret_cast<Address>(side.data()), side.numel());
  };
  Call made = operation.call(root, numel, factor, timeout_s,
                             {cut(Space::kOut, packed->out), cut(Space::kIn, packed->in)});
  made.packed = std::move(packed);
  return made;
}

void bind_calls(nb::module_& m) {
  nb::class_<Operation>(m, "Operation", "A loaded plan with its element type and reduction.");
  nb::class_<BoundCall>(m, "BoundCall", "A call that was checked and planned, bound to its buffers.")
      .def(
          "__init__",
          [](BoundCall* self, nb::str name, const Operation& operation, int root, size_t numel, double factor,
             const Extents& out, const Extents& given, nb::object keep, bool writes, bool together,
             nb::object result, nb::object note, Address feedback, size_t feedback_numel) {
            new (self) BoundCall{std::move(name),
                                 std::move(keep),
                                 std::move(result),
                                 std::move(note),
                                 operation,
                                 root,
                                 numel,
                                 factor,
                                 writes,
                                 together,
                                 all(out),
                                 all(given),
                                 {reinterpret_cast<unsigned char*>(feedback), feedback_numel}};
          },
          nb::arg("name"), nb::arg("operation"), nb::arg("root"), nb::arg("numel"), nb::arg("factor"),
          nb::arg("out"), nb::arg("given"), nb::arg("keep").none(), nb::arg("writes") = true,
          nb::arg("together") = false, nb::arg("result").none() = nb::none(),
          nb::arg("note").none() = nb::none(), nb::arg("feedback") = 0, nb::arg("feedback_numel") = 0,
          nb::keep_alive<1, 3>(),
          "out, given: (address, numel) of one buffer, or of one for each chunk; with `together`, of buffers "
          "that are packed into one. numel: must be equal on all ranks; 0 where they may differ. result, "
          "note: "
          "callables for the caller's result, and for the text that a Mismatch shows beside the source "
          "line.");
  nb::class_<Calls> calls(m, "Calls", nb::type_slots(kCollected),
                          "The calls of a group: runs them, and remembers those that were checked.");
  calls
      .def(nb::init<nb::object, nb::object, double>(), nb::arg("planner"), nb::arg("engine").none(),
           nb::arg("timeout_s"))
      .def("_execute", &Calls::execute, nb::arg("planned"), nb::arg("async_op"), nb::arg("timeout").none(),
           "Runs or starts a `BoundCall`, or several; returns the work, or the result.")
      .def("_forget", &Calls::forget, nb::arg("timeout_s"), "Forgets all calls; sets the group's timeout.")
      .def("_close", &Calls::close, "Drops the reference to the engine.")
      .def("_release", &Calls::release, "Releases the works. Call when no thread runs them any more.")
      .def_prop_ro("_works", &Calls::works, "Works that are not known to have ended.");
  for (PyMethodDef& each : kMethods) {
    const nb::object made = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(calls.ptr()), &each));
    if (!made.is_valid()) throw nb::python_error();
    calls.attr(each.ml_name) = made;
  }
  bind_collective(m, calls);
  bind_works(m);
}
