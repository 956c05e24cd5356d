// A collective of one group as an object to call: what the interpreter does to enter a method written in
// Python, which has nine words to hand on, takes as long as the rest of a small call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>

#include "bindings.hpp"

namespace nb = nanobind;

namespace {

constexpr size_t kWords = 5;      // collective, out, given, op, root
constexpr size_t kMostNames = 4;  // of parameters that may stand without their name

// Its parameters are those of `fallback`, which takes every call that is not a plain one seen before, and
// refuses those that are wrong.
struct Method {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* quick;
  PyObject* fallback;
  std::array<PyObject*, kWords> words;  // what stands there when a parameter is left out
  std::array<PyObject*, kMostNames> names;
  std::array<uint8_t, kMostNames> places;  // among the words
  size_t count;
  uint32_t required;  // bits, of the names
};

size_t find(const Method& method, PyObject* name) {
  const auto end = method.names.begin() + static_cast<ptrdiff_t>(method.count);
  return static_cast<size_t>(std::find(method.names.begin(), end, name) - method.names.begin());
}

// Puts the arguments in their places; whether this is a plain call.
bool place(const Method& method, PyObject* const* given, size_t count, PyObject* keywords,
           std::array<PyObject*, kWords>& words) {
  if (count > method.count) return false;
  uint32_t seen = (uint32_t{1} << count) - 1;
  for (size_t i = 0; i < count; ++i) words[method.places[i]] = given[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    const size_t i = find(method, PyTuple_GET_ITEM(keywords, k));  // names are interned
    if (i == method.count || (seen >> i & 1) != 0) return false;
    seen |= uint32_t{1} << i;
    words[method.places[i]] = given[count + static_cast<size_t>(k)];
  }
  return (seen & method.required) == method.required;
}

PyObject* call(PyObject* self, PyObject* const* given, size_t flags, PyObject* keywords) {
  const Method& method = *reinterpret_cast<Method*>(self);
  std::array<PyObject*, kWords> words = method.words;
  try {
    if (place(method, given, static_cast<size_t>(PyVectorcall_NARGS(flags)), keywords, words) &&
        repeat_known(method.quick, words.data()))
      Py_RETURN_NONE;
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  return PyObject_Vectorcall(method.fallback, given, flags, keywords);
}

template <class Visit>
int each(Method& method, Visit visit) {
  if (const int stop = visit(method.quick)) return stop;
  if (const int stop = visit(method.fallback)) return stop;
  for (PyObject*& word : method.words)
    if (const int stop = visit(word)) return stop;
  for (PyObject*& name : method.names)
    if (const int stop = visit(name)) return stop;
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return each(*reinterpret_cast<Method*>(self),
              [&](PyObject*& held) { return held == nullptr ? 0 : visit(held, arg); });
}

int clear(PyObject* self) {
  return each(*reinterpret_cast<Method*>(self), [](PyObject*& held) {
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

// __doc__, __name__ and the rest, as the method in Python has them.
PyObject* attribute(PyObject* self, PyObject* name) {
  if (PyObject* const own = PyObject_GenericGetAttr(self, name)) return own;
  if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) return nullptr;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Method*>(self)->fallback, name);
}

PyObject* text(PyObject* self) { return PyObject_Repr(reinterpret_cast<Method*>(self)->fallback); }

PyMemberDef kMembers[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(Method, fallback), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyObject* doc(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Method*>(self)->fallback, "__doc__");
}

PyGetSetDef kComputed[] = {{"__doc__", doc, nullptr, nullptr, nullptr},
                           {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                        {Py_tp_dealloc, reinterpret_cast<void*>(end)},
                        {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(clear)},
                        {Py_tp_getattro, reinterpret_cast<void*>(attribute)},
                        {Py_tp_repr, reinterpret_cast<void*>(text)},
                        {Py_tp_members, kMembers},
                        {Py_tp_getset, kComputed},
                        {0, nullptr}};

PyType_Spec kSpec = {"unisono._native.Method", sizeof(Method), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC, kSlots};

using Five = nb::typed<nb::tuple, nb::any, nb::any, nb::any, nb::any, nb::any>;
// parameters: (name, place among the words, whether it must be given), in order.
using Parameters = std::vector<std::tuple<std::string, size_t, bool>>;

nb::any make(const nb::object& type, nb::object quick, nb::object fallback, const Five& words,
             const Parameters& parameters) {
  if (PyTuple_GET_SIZE(words.ptr()) != kWords || parameters.size() > kMostNames)
    throw std::invalid_argument("a method has five words and at most four parameters");
  auto* const made = PyObject_GC_New(Method, reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (made == nullptr) throw nb::python_error();
  made->vectorcall = call;
  made->quick = quick.release().ptr();
  made->fallback = fallback.release().ptr();
  for (size_t i = 0; i < kWords; ++i) made->words[i] = nb::object(words[i]).release().ptr();
  made->names.fill(nullptr);
  made->count = parameters.size();
  made->required = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, word, required] = parameters[i];
    made->names[i] = PyUnicode_InternFromString(name.c_str());
    made->places[i] = static_cast<uint8_t>(std::min(word, kWords - 1));
    made->required |= uint32_t{required} << i;
  }
  PyObject_GC_Track(made);
  return nb::steal<nb::any>(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void bind_methods(nb::module_& m) {
  const nb::object type = nb::steal(PyType_FromSpec(&kSpec));
  if (!type.is_valid()) throw nb::python_error();
  m.def(
      "method",
      [type](nb::object quick, nb::object fallback, const Five& words, const Parameters& parameters) {
        return make(type, std::move(quick), std::move(fallback), words, parameters);
      },
      nb::arg("quick"), nb::arg("fallback"), nb::arg("words"), nb::arg("parameters"),
      "`fallback`, a bound collective in Python, but a plain call that `quick` remembers takes no Python. "
      "words: "
      "(collective, out, given, op, root) as they are when left out; parameters: (name, place, required).");
}
