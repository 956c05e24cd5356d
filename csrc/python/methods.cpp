// A collective as a method of `Group`: reads its arguments in CPython's own calling convention, as the
// methods in calls.cpp.
#include "python/calls.hpp"

#include <nanobind/stl/string.h>
#include <structmember.h>

#include <algorithm>

namespace nb = nanobind;

namespace {

constexpr size_t kMostParameters = 12;

// A method of a subclass of `GroupBase`. It has the signature and the docstring of `function`, a Python
// method. That is called only to raise the TypeError for arguments that do not fit; its body never runs.
struct CollectiveMethod {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyTypeObject* owner;  // Calls
  PyObject* function;
  Arguments defaults;
  std::array<PyObject*, kMostParameters> names;
  std::array<uint8_t, kMostParameters> argument_indices;  // among the arguments
  size_t positional, count;
  uint32_t required;  // bits, of the names
  bool coalesced;
  bool receives;  // in place, or with an input and `out`
};

// By identity first: keyword names in source code are interned. Names from a dictionary may not be.
size_t find(const CollectiveMethod& method, PyObject* name) {
  const auto end = method.names.begin() + static_cast<ptrdiff_t>(method.count);
  auto found = std::find(method.names.begin(), end, name);
  if (found == end)
    found = std::find_if(method.names.begin(), end,
                         [&](PyObject* known) { return PyUnicode_Compare(known, name) == 0; });
  return static_cast<size_t>(found - method.names.begin());
}

// Puts the arguments in their places; returns whether they fit the signature.
bool assign_arguments(const CollectiveMethod& method, PyObject* const* given, size_t count,
                      PyObject* keywords, Arguments& arguments) {
  if (count > method.positional) return false;
  uint32_t seen = (uint32_t{1} << count) - 1;
  for (size_t i = 0; i < count; ++i) arguments[method.argument_indices[i]] = given[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    const size_t i = find(method, PyTuple_GET_ITEM(keywords, k));
    if (i == method.count || (seen >> i & 1) != 0) return false;
    seen |= uint32_t{1} << i;
    arguments[method.argument_indices[i]] = given[count + static_cast<size_t>(k)];
  }
  return (seen & method.required) == method.required;
}

PyObject* call_collective(PyObject* self, PyObject* const* given, size_t flags, PyObject* keywords) {
  const CollectiveMethod& method = *reinterpret_cast<CollectiveMethod*>(self);
  const auto count = static_cast<size_t>(PyVectorcall_NARGS(flags));
  if (count == 0 || !PyObject_TypeCheck(given[0], method.owner) || !nb::inst_ready(given[0])) {
    PyErr_SetString(PyExc_TypeError, "the first argument is no group, or one that was never made");
    return nullptr;
  }
  Arguments arguments = method.defaults;
  if (assign_arguments(method, given + 1, count - 1, keywords, arguments)) {
    if (method.receives && arguments[kSendbuf] != Py_None) std::swap(arguments[kOut], arguments[kSendbuf]);
    return guarded([&] { return run_call(given[0], arguments, method.coalesced); });
  }
  const nb::object refused = nb::steal(unisono_call(method.function, given, flags, keywords));
  if (refused.is_valid())  // the function moves no data, so returning would look like success
    PyErr_SetString(PyExc_SystemError, "the arguments fit a signature that the engine does not know");
  return nullptr;
}

template <class Visit>
int each(CollectiveMethod& method, Visit visit) {
  if (const int stop = visit(method.function)) return stop;
  for (PyObject*& held : method.defaults)
    if (const int stop = visit(held)) return stop;
  for (PyObject*& name : method.names)
    if (const int stop = visit(name)) return stop;
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each(*reinterpret_cast<CollectiveMethod*>(self),
              [&](PyObject*& held) { return held == nullptr ? 0 : visit(held, arg); });
}

int clear(PyObject* self) {
  return each(*reinterpret_cast<CollectiveMethod*>(self), [](PyObject*& held) {
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
  return PyObject_GetAttr(reinterpret_cast<CollectiveMethod*>(self)->function, name);
}

PyObject* text(PyObject* self) { return PyObject_Repr(reinterpret_cast<CollectiveMethod*>(self)->function); }

PyObject* doc(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<CollectiveMethod*>(self)->function, "__doc__");
}

PyMemberDef kMembers[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CollectiveMethod, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(CollectiveMethod, function), READONLY, nullptr},
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

PyType_Spec kCollectiveSpec = {"unisono._native.Collective", sizeof(CollectiveMethod), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                                   Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_GC |
                                   Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               kCollectiveSlots};

using Objects = nb::typed<nb::list, nb::object>;
using Parameters = nb::typed<nb::list, nb::typed<nb::tuple, nb::str, int, bool>>;

nb::any make_collective(const nb::object& type, nb::handle owner, nb::object function,
                        const Objects& defaults, const Parameters& parameters, size_t positional,
                        bool coalesced) {
  if (defaults.size() != kArguments || parameters.size() > kMostParameters || positional > parameters.size())
    throw std::invalid_argument("a collective has a default for each argument and at most twelve parameters");
  auto* const made = PyObject_GC_New(CollectiveMethod, reinterpret_cast<PyTypeObject*>(type.ptr()));
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
  made->coalesced = coalesced;
  made->receives = false;
  made->required = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const nb::handle parameter = parameters[i];
    made->names[i] = nb::cast<nb::str>(parameter[0]).release().ptr();
    PyUnicode_InternInPlace(&made->names[i]);
    made->argument_indices[i] = std::min<uint8_t>(nb::cast<uint8_t>(parameter[1]), kMaxError);
    made->receives |= made->argument_indices[i] == kSendbuf && nb::cast<std::string>(parameter[0]) == "out";
    made->required |= uint32_t{nb::cast<bool>(parameter[2])} << i;
  }
  PyObject_GC_Track(made);
  return method;
}

}  // namespace

void bind_methods(nb::module_& m, const nb::object& calls) {
  const nb::object type = nb::steal(PyType_FromSpec(&kCollectiveSpec));
  if (!type.is_valid()) throw nb::python_error();
  m.attr("Collective") = type;
  m.def(
      "collective",
      [type, calls](nb::object function, const Objects& defaults, const Parameters& parameters,
                    size_t positional, bool coalesced) {
        return make_collective(type, calls, std::move(function), defaults, parameters, positional, coalesced);
      },
      nb::arg("function"), nb::arg("defaults"), nb::arg("parameters"), nb::arg("positional"),
      nb::arg("coalesced"),
      "A method of `GroupBase` with the signature of `function`. defaults: all arguments of a call; "
      "parameters: (name, place among them, required) in order, the first `positional` also without a name; "
      "coalesced: its buffers are lists.");
}
