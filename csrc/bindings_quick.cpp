// The quickest way into an operation, for the calls a program makes all day.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr size_t kMostBuffers = 16;        // of one side of a call; more take the long way
constexpr size_t kBriefBytes = 64 * 1024;  // copied and reduced in some microseconds

// One side of a call: no buffer, one, or one for each rank. All are of one dtype.
struct Side {
  int dtype = -1;
  bool readonly = false;
  size_t count = 0;
  std::array<Extent, kMostBuffers> extents;

  // False: not to be seen natively.
  bool see(nb::handle given) {
    if (given.is_none()) return true;
    const bool list = PyList_CheckExact(given.ptr()), several = list || PyTuple_CheckExact(given.ptr());
    if (!several) return add(given);
    const auto length = static_cast<size_t>(Py_SIZE(given.ptr()));
    if (length == 0 || length > kMostBuffers) return false;
    for (size_t i = 0; i < length; ++i) {
      const auto place = static_cast<Py_ssize_t>(i);
      PyObject* const one = list ? PyList_GET_ITEM(given.ptr(), place) : PyTuple_GET_ITEM(given.ptr(), place);
      if (!add(one)) return false;
    }
    return true;
  }
  std::span<const Extent> all() const { return {extents.data(), count}; }
  size_t nbytes() const {
    size_t numel = 0;
    for (const Extent& extent : all()) numel += extent.numel;
    return count > 0 ? numel * itemsize(static_cast<DType>(dtype)) : 0;
  }

 private:
  bool add(nb::handle buffer) {
    const auto seen = look(buffer);
    if (!seen || (count > 0 && seen->dtype != dtype)) return false;
    dtype = seen->dtype;
    readonly |= seen->readonly;
    extents[count++] = {reinterpret_cast<unsigned char*>(seen->address), static_cast<size_t>(seen->numel)};
    return true;
  }
};

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
      const int fault = repeat(words, given[kOut], given[kGiven]);
      if (fault == 0) return nb::none();
      if (fault > 0) return caller.attr("fail")(nb::handle(given[kCollective]), timeout_s_);
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
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    const Operation& operation = known.operation;
    Binding binding{chunks(operation, Space::kOut, out_side), chunks(operation, Space::kIn, given_side)};
    // Nothing of the slot is looked at once the GIL is gone.
    Call made = operation.call(words.root, known.numel, known.factor, timeout_s_, std::move(binding));
    const bool brief = out_side.nbytes() + given_side.nbytes() <= kBriefBytes;
    return waiting(engine, brief, [&](Held& held) { return engine.run(std::move(made), &held); });
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
PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != kArguments) {
    PyErr_SetString(PyExc_TypeError, "Quick.call takes nine arguments");
    return nullptr;
  }
  try {
    return nb::inst_ptr<Quick>(self)->run(given).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef kRun = {
    "call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL,
    "Runs a collective: (collective, out, given, op, root, algorithm, reproducible, async_op, "
    "timeout)."};

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

void bind_quick(nb::module_& m) {
  nb::class_<Quick>(m, "Quick", nb::type_slots(kCollected),
                    "The collectives of a group, with a memory of the calls that were checked.")
      .def(nb::init<nb::object, nb::object, double>(), nb::arg("caller"), nb::arg("engine"),
           nb::arg("timeout_s"))
      .def_prop_ro(
          "call",
          [](nb::handle_t<Quick> self) { return nb::steal<nb::any>(PyCFunction_New(&kRun, self.ptr())); })
      .def("remember", &Quick::remember, nb::arg("collective"), nb::arg("out").none(),
           nb::arg("given").none(), nb::arg("op"), nb::arg("root"), nb::arg("algorithm").none(),
           nb::arg("reproducible"), nb::arg("writes"), nb::arg("operation"), nb::arg("numel"),
           nb::arg("factor"))
      .def("forget", &Quick::forget, nb::arg("timeout_s"))
      .def("close", &Quick::close);
}
