// The quickest way into an operation, for the calls a program makes all day.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings_transfer.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr size_t kBriefBytes = 64 * 1024;  // copied and reduced in some microseconds

enum { kCollective, kOut, kGiven, kOp, kRoot, kAlgorithm, kReproducible, kAsync, kTimeout, kArguments };

// What a call says beside its buffers. Objects are compared by identity: names, operations and flags are
// the same ones in every call, and one that is not takes the long way.
struct Words {
  PyObject *collective, *op, *algorithm, *reproducible;
  int root;
  bool operator==(const Words&) const = default;
};

bool meet(const Extent& a, const Extent& b, size_t item) {
  return a.numel > 0 && b.numel > 0 && a.data < b.data + b.numel * item && b.data < a.data + a.numel * item;
}

// Whether nothing that is written shares memory with anything else.
bool apart(const Side& out, const Side& given) {
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

// A call that was checked once, and what another one must have in common with it to need no further check:
// the words, dtypes and sizes; and either the distances between its buffers, or that they share no memory.
struct Known {
  std::array<nb::object, 4> kept;  // the words, which therefore no other object can replace
  Words words{};
  int out_dtype = -1, given_dtype = -1;
  std::vector<size_t> out_numel, given_numel;
  std::vector<ptrdiff_t> distances;  // from the first buffer
  bool writes = false;
  Operation operation{};
  size_t numel = 0;
  double factor = 1;

  bool fits(const Words& said, const Side& out, const Side& given) const {
    return operation.program != nullptr && words == said && out_dtype == out.dtype &&
           given_dtype == given.dtype && alike(out_numel, out) && alike(given_numel, given) &&
           !(writes && out.readonly) && (placed_alike(out, given) || apart(out, given));
  }
  void place(const Side& out, const Side& given) {
    distances.clear();
    each(out, given, [&](size_t, ptrdiff_t distance) {
      distances.push_back(distance);
      return true;
    });
  }

 private:
  static bool alike(const std::vector<size_t>& numel, const Side& side) {
    const auto all = side.all();
    return std::equal(numel.begin(), numel.end(), all.begin(), all.end(),
                      [](size_t known, const Extent& extent) { return known == extent.numel; });
  }
  bool placed_alike(const Side& out, const Side& given) const {
    return each(out, given, [&](size_t i, ptrdiff_t distance) { return distances[i] == distance; });
  }
  template <class Look>
  static bool each(const Side& out, const Side& given, Look look) {
    const unsigned char* const first = out.count > 0 ? out.extents[0].data : given.extents[0].data;
    size_t i = 0;
    for (const Side* side : {&out, &given})
      for (const Extent& extent : side->all())
        if (!look(i++, extent.data - first)) return false;
    return true;
  }
};

// The collectives of a group, with a memory: a call that repeats one that was checked takes no Python
// between the caller and the engine. Any other goes to the group's `Caller`, which has it remembered.
class Quick {
 public:
  Quick(nb::object caller, nb::object engine, double timeout_s)
      : caller(std::move(caller)), engine_(std::move(engine)), timeout_s_(timeout_s), slots_(kSlots) {}

  // Arguments: collective, out, given, op, root, algorithm, reproducible, async_op, timeout.
  nb::object run(PyObject* const* given) {
    const nb::handle root = given[kRoot];
    if (given[kAsync] == Py_False && given[kTimeout] == Py_None && PyLong_CheckExact(root.ptr())) {
      const Words words = said(given[kCollective], given[kOp], root, given[kAlgorithm], given[kReproducible]);
      const nb::object alive = engine_;
      const int fault = repeat(words, given[kOut], given[kGiven]);
      if (fault == 0) return nb::none();
      if (fault > 0) return failed(alive, given[kCollective], given[kOut], given[kGiven], timeout_s_);
    }
    const nb::object at_length = caller.attr("at_length");
    PyObject* const result = PyObject_Vectorcall(at_length.ptr(), given, kArguments, nullptr);
    if (result == nullptr) throw nb::python_error();
    return nb::steal(result);
  }

  void remember(nb::object collective, nb::handle out, nb::handle given, nb::object op, nb::handle root,
                nb::object algorithm, nb::object reproducible, bool writes, const Operation& operation,
                size_t numel, double factor) {
    Side out_side, given_side;
    if (!PyLong_CheckExact(root.ptr()) || !out_side.see(out) || !given_side.see(given)) return;
    const Words words = said(collective, op, root, algorithm, reproducible);
    Known known;
    known.kept = {std::move(collective), std::move(op), std::move(algorithm), std::move(reproducible)};
    known.words = words;
    known.out_dtype = out_side.dtype;
    known.given_dtype = given_side.dtype;
    for (const Extent& extent : out_side.all()) known.out_numel.push_back(extent.numel);
    for (const Extent& extent : given_side.all()) known.given_numel.push_back(extent.numel);
    known.place(out_side, given_side);
    known.writes = writes;
    known.operation = operation;
    known.numel = numel;
    known.factor = factor;
    slot(words, out_side, given_side) = std::move(known);
  }

  // Repeats a plain call that is remembered. Arguments: the first five of `run`. False: it is not.
  bool again(PyObject* const* given) {
    if (!PyLong_CheckExact(given[kRoot])) return false;
    const Words words = said(given[kCollective], given[kOp], given[kRoot], Py_None, Py_False);
    const nb::object alive = engine_;
    const int fault = repeat(words, given[kOut], given[kGiven]);
    if (fault > 0) failed(alive, given[kCollective], given[kOut], given[kGiven], timeout_s_);
    return fault == 0;
  }

  // The rank a message came from, or 0; -1: not to be done natively, nothing has happened.
  // `now`: only when it can be passed at once.
  nb::object pass(PyObject* const* given, bool sending, bool now) {
    const nb::object alive = engine_;
    if (alive.is_none()) return nb::int_(-1);
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    Transfer message{sending, timeout_s_};
    if (!message.read(given, engine)) return nb::int_(-1);
    if (now) return nb::int_(message.pass_now(engine) ? message.source() : -1);
    int fault;
    try {
      fault = waiting(engine, true, [&](Held& held) { return message.pass(engine, held); });
    } catch (...) {
      alive.attr("hold")(nb::borrow(given[0]));
      throw;
    }
    if (fault != 0) return failed(alive, message.name(), given[0], Py_None, message.timeout_s);
    return nb::int_(message.source());
  }

  // What was chosen and checked under other circumstances.
  void forget(double timeout_s) {
    timeout_s_ = timeout_s;
    slots_ = std::vector<Known>(kSlots);
  }
  void close() {
    forget(timeout_s_);
    engine_ = nb::none();
  }

  nb::object caller;

 private:
  // Raises the error. `alive` is the engine of the call: another thread may have closed the group meanwhile.
  nb::object failed(const nb::object& alive, nb::handle operation, nb::handle out, nb::handle given,
                    double timeout_s) {
    alive.attr("hold")(nb::make_tuple(out, given));
    return caller.attr("fail")(operation, timeout_s);
  }

  static Words said(nb::handle collective, nb::handle op, nb::handle root, nb::handle algorithm,
                    nb::handle reproducible) {
    const long number = PyLong_AsLong(root.ptr());
    if (number == -1) PyErr_Clear();  // too large, perhaps: then no rank either
    return {collective.ptr(), op.ptr(), algorithm.ptr(), reproducible.ptr(), static_cast<int>(number)};
  }

  // The kind of fault, or -1: not remembered, nothing has happened.
  int repeat(const Words& words, nb::handle out, nb::handle given) {
    Side out_side, given_side;
    if (!out_side.see(out) || !given_side.see(given)) return -1;
    const Known& known = slot(words, out_side, given_side);
    if (!known.fits(words, out_side, given_side)) return -1;
    const nb::object alive = engine_;  // whatever other threads do to this object meanwhile
    if (alive.is_none()) return -1;    // closed while this call was looked at, or remembered
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    const Operation& operation = known.operation;
    Binding binding{chunks(operation, Space::kOut, out_side), chunks(operation, Space::kIn, given_side)};
    // Nothing of the slot is looked at once the GIL is gone.
    Call made = operation.call(words.root, known.numel, known.factor, timeout_s_, std::move(binding));
    const bool brief = out_side.nbytes() + given_side.nbytes() <= kBriefBytes;
    // A rank that was stopped may write later; to what stood in a list, too.
    const auto hold = [&] {
      alive.attr("hold")(nb::make_tuple(out, given, out_side.kept(), given_side.kept()));
    };
    try {
      const int fault =
          waiting(engine, brief, [&](Held& held) { return engine.run(std::move(made), &held); });
      if (fault > 0) hold();
      return fault;
    } catch (...) {
      hold();
      throw;
    }
  }

  static Chunks chunks(const Operation& operation, Space space, const Side& side) {
    if (side.count > 1) return Chunks(std::vector<Extent>(side.all().begin(), side.all().end()));
    const Extent whole = side.count == 0 ? Extent{} : side.extents[0];
    return operation.cut(space, reinterpret_cast<Address>(whole.data), whole.numel);
  }

  Known& slot(const Words& words, const Side& out, const Side& given) {
    uint64_t mixed = reinterpret_cast<uintptr_t>(words.collective) >> 4;
    const auto mix = [&](uint64_t value) { mixed = (mixed ^ value) * 0x9e3779b97f4a7c15ULL; };
    mix(reinterpret_cast<uintptr_t>(words.op) >> 4 ^ static_cast<uint64_t>(words.root) << 40);
    mix(static_cast<uint64_t>(out.dtype + 1) << 48 ^ static_cast<uint64_t>(given.dtype + 1) << 56 ^
        (out.count > 0 ? out.extents[0].numel : 0));
    mix(given.count > 0 ? given.extents[0].numel : 0);
    return slots_[mixed >> 56 & (kSlots - 1)];
  }

  static constexpr size_t kSlots = 128;
  nb::object engine_;
  double timeout_s_;
  std::vector<Known> slots_;
};

// Called in the interpreter's own way: nanobind's conversions would cost a barrier a tenth of its time.
using Method = nb::object (*)(Quick&, PyObject* const*);
template <size_t kCount, Method kMethod>
PyObject* called(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "takes %zu arguments", kCount);
    return nullptr;
  }
  try {
    return kMethod(*nb::inst_ptr<Quick>(self), given).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

nb::object run(Quick& quick, PyObject* const* given) { return quick.run(given); }
nb::object again(Quick& quick, PyObject* const* given) { return nb::bool_(quick.again(given)); }
nb::object send(Quick& quick, PyObject* const* given) { return quick.pass(given, true, false); }
nb::object receive(Quick& quick, PyObject* const* given) { return quick.pass(given, false, false); }
nb::object send_now(Quick& quick, PyObject* const* given) { return quick.pass(given, true, true); }
nb::object receive_now(Quick& quick, PyObject* const* given) { return quick.pass(given, false, true); }

template <size_t kCount, Method kMethod>
PyMethodDef method(const char* name, const char* what) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called<kCount, kMethod>)),
          METH_FASTCALL, what};
}

PyMethodDef kCall =
    method<kArguments, run>("call",
                            "Runs a collective: (collective, out, given, op, root, algorithm, "
                            "reproducible, async_op, timeout).");
PyMethodDef kAgain = method<kAlgorithm, again>(
    "again", "Repeats a call that is remembered: (collective, out, given, op, root). False: it is not.");
PyMethodDef kSend = method<4, send>("send", "Sends (x, peer, tag, timeout); -1: look at it more closely.");
PyMethodDef kRecv = method<4, receive>("recv", "Receives (x, peer, tag, timeout); the rank it came from.");

PyMethodDef kSendNow = method<4, send_now>("send_now", "As `send`; -1 also when it cannot go at once.");
PyMethodDef kRecvNow = method<4, receive_now>("recv_now", "As `recv`; -1 also when it has not come.");

template <PyMethodDef* kMethod>
nb::any bound(nb::handle_t<Quick> quick) {
  return nb::steal<nb::any>(PyCFunction_New(kMethod, quick.ptr()));
}

int traverse(PyObject* self, visitproc visit, void* arg) {
#if PY_VERSION_HEX >= 0x03090000
  Py_VISIT(Py_TYPE(self));
#endif
  if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<Quick>(self)->caller.ptr());
  return 0;
}

int clear(PyObject* self) {
  nb::inst_ptr<Quick>(self)->caller.reset();
  return 0;
}

PyType_Slot kCollected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear)},
                            {0, nullptr}};

}  // namespace

bool repeat_known(nb::handle quick, PyObject* const* words) {
  return nb::inst_ptr<Quick>(quick)->again(words);
}

void bind_quick(nb::module_& m) {
  nb::class_<Quick>(m, "Quick", nb::type_slots(kCollected),
                    "The collectives of a group, with a memory of the calls that were checked.")
      .def(nb::init<nb::object, nb::object, double>(), nb::arg("caller"), nb::arg("engine"),
           nb::arg("timeout_s"))
      .def_prop_ro("call", &bound<&kCall>)
      .def_prop_ro("again", &bound<&kAgain>)
      .def_prop_ro("send", &bound<&kSend>)
      .def_prop_ro("recv", &bound<&kRecv>)
      .def_prop_ro("send_now", &bound<&kSendNow>)
      .def_prop_ro("recv_now", &bound<&kRecvNow>)
      .def("remember", &Quick::remember, nb::arg("collective"), nb::arg("out").none(),
           nb::arg("given").none(), nb::arg("op"), nb::arg("root"), nb::arg("algorithm").none(),
           nb::arg("reproducible"), nb::arg("writes"), nb::arg("operation"), nb::arg("numel"),
           nb::arg("factor"))
      .def("forget", &Quick::forget, nb::arg("timeout_s"))
      .def("close", &Quick::close);
}
