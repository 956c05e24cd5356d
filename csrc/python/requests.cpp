// The requests and statuses of unisono.mpi: a program that begins a message and waits for it runs no Python
// code but that of its own calls.
#include "python/message_work.hpp"

#include <structmember.h>

namespace nb = nanobind;
using namespace unisono;

namespace {

struct StatusFields {
  PyObject_HEAD long long source, tag, nbytes, error;
  char cancelled;
};

// A request has a state of Python's; or a message's work, until something asks for its state.
struct RequestFields {
  PyObject_HEAD PyObject* state;
  PyObject* work;
  PyObject* owner;  // the CommState of the message
};

PyTypeObject* status_type = nullptr;
InternedName operation_of{"_operation_of"}, end_of{"_end"}, schedules_of{"_schedules"}, places_of{"places"};

RequestFields& fields(PyObject* self) { return *reinterpret_cast<RequestFields*>(self); }

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

// Replaces the state; what was there is freed outside the lock.
void refer(PyObject* self, PyObject* state) {
  PyObject* old[3];
  {
    const nb::ft_object_guard held(self);
    RequestFields& request = fields(self);
    old[0] = std::exchange(request.state, Py_XNewRef(state));
    old[1] = std::exchange(request.work, nullptr);
    old[2] = std::exchange(request.owner, nullptr);
  }
  for (PyObject* one : old) Py_XDECREF(one);
}

// Its (work, owner); invalid: it has a state.
std::pair<nb::object, nb::object> message_of(PyObject* self) {
  const nb::ft_object_guard held(self);
  RequestFields& request = fields(self);
  return {nb::borrow(request.work), nb::borrow(request.owner)};
}

PyObject* state_of(PyObject* self, void*) {
  return guarded([&] {
    const auto [work, owner] = message_of(self);
    if (work.is_valid()) {
      PyObject* const given[] = {self, work.ptr(), owner.ptr()};
      const nb::object made = checked(unisono_call_method(operation_of.get(), given, 3));
      refer(self, made.ptr());
    }
    const nb::ft_object_guard held(self);
    PyObject* const state = fields(self).state;
    return nb::borrow(state == nullptr ? Py_None : state);
  });
}

int set_state(PyObject* self, PyObject* value, void*) {
  refer(self, value);
  return 0;
}

// What the sender's Status says, with the rank in the communicator.
void fill(StatusFields& status, const Status& found, const nb::object& owner) {
  const nb::object places = checked(PyObject_GetAttr(owner.ptr(), places_of.get()));
  const nb::object place = checked(PyObject_GetItem(places.ptr(), nb::int_(found.source).ptr()));
  status.source = nb::cast<int>(place);
  status.tag = found.tag;
  status.nbytes = static_cast<long long>(found.nbytes);
  status.error = status.cancelled = 0;
}

// Waits for the end; the value. What is not a plain message is Python's: `_end`.
nb::object end(PyObject* self, PyObject* status) {
  const auto by_python = [&] {
    PyObject* const given[] = {self, status};
    return checked(unisono_call_method(end_of.get(), given, 2));
  };
  const auto [work, owner] = message_of(self);
  if (!work.is_valid() || (status != Py_None && PyObject_TypeCheck(status, status_type) == 0))
    return by_python();
  const nb::object schedules = checked(PyObject_GetAttr(self, schedules_of.get()));
  if (PyList_CheckExact(schedules.ptr()) == 0 || length_of(schedules.ptr()) > 0) return by_python();
  NativeMessageWork& message = *nb::inst_ptr<NativeMessageWork>(work);
  nb::object value;
  try {
    value = message.result();
  } catch (nb::python_error&) {
    if (message.ended()) refer(self, nullptr);
    throw;
  }
  if (message.cancelled() || message.truncated()) return by_python();
  if (status != Py_None) {
    if (!message.receives()) return by_python();
    fill(*reinterpret_cast<StatusFields*>(status), message.received(), owner);
  }
  refer(self, nullptr);
  return value;
}

// `Wait(status=None)`, which returns True, and `wait(status=None)`, which returns the value.
template <bool kValue>
PyObject* wait(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  const bool fits = count + named <= 1 && (named == 0 || PyUnicode_CompareWithASCIIString(
                                                             PyTuple_GET_ITEM(keywords, 0), "status") == 0);
  if (!fits) {
    PyErr_SetString(PyExc_TypeError, "takes one argument, status");
    return nullptr;
  }
  return guarded([&] {
    nb::object value = end(self, count + named == 1 ? given[0] : Py_None);
    return kValue ? value : nb::object(nb::bool_(true));
  });
}

nb::object made(PyObject* cls) {
  auto* const type = reinterpret_cast<PyTypeObject*>(cls);
  return checked(type->tp_alloc(type, 0));
}

PyObject* of_state(PyObject* cls, PyObject* state) {
  return guarded([&] {
    nb::object self = made(cls);
    fields(self.ptr()).state = Py_NewRef(state);
    return self;
  });
}

PyObject* of_work(PyObject* cls, PyObject* const* given, Py_ssize_t count) {
  return guarded([&] {
    if (count != 2 || !nb::isinstance<NativeMessageWork>(given[0]))
      throw nb::type_error("expected a message's work, and its communicator's state");
    nb::object self = made(cls);
    fields(self.ptr()).work = Py_NewRef(given[0]);
    fields(self.ptr()).owner = Py_NewRef(given[1]);
    return self;
  });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(fields(self).state);
  Py_VISIT(fields(self).work);
  Py_VISIT(fields(self).owner);
  return 0;
}

int clear(PyObject* self) {
  refer(self, nullptr);
  return 0;
}

void free_request(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

void free_status(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef kRequestMethods[] = {{"Wait", as_method(wait<false>), METH_FASTCALL | METH_KEYWORDS,
                                  "Wait($self, /, status=None)\n--\n\nWait for its end. Returns True."},
                                 {"wait", as_method(wait<true>), METH_FASTCALL | METH_KEYWORDS,
                                  "wait($self, /, status=None)\n--\n\nWait for its end; returns the object."},
                                 {"_for", of_state, METH_O | METH_CLASS, "A request of an operation."},
                                 {"_under_way", as_method(of_work), METH_FASTCALL | METH_CLASS,
                                  "A request of a message's work, in a communicator of this state."},
                                 {nullptr, nullptr, 0, nullptr}};

PyGetSetDef kRequestFields[] = {{"_state", state_of, set_state, "What the request is of.", nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot kRequestSlots[] = {{Py_tp_doc, const_cast<char*>("What `Request` runs without Python code.")},
                               {Py_tp_methods, kRequestMethods},
                               {Py_tp_getset, kRequestFields},
                               {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(free_request)},
                               {0, nullptr}};

PyMemberDef kStatusFields[] = {{"_source", T_LONGLONG, offsetof(StatusFields, source), 0, nullptr},
                               {"_tag", T_LONGLONG, offsetof(StatusFields, tag), 0, nullptr},
                               {"_nbytes", T_LONGLONG, offsetof(StatusFields, nbytes), 0, nullptr},
                               {"_error", T_LONGLONG, offsetof(StatusFields, error), 0, nullptr},
                               {"_cancelled", T_BOOL, offsetof(StatusFields, cancelled), 0, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

PyType_Slot kStatusSlots[] = {{Py_tp_doc, const_cast<char*>("The fields of `Status`.")},
                              {Py_tp_members, kStatusFields},
                              {Py_tp_dealloc, reinterpret_cast<void*>(free_status)},
                              {0, nullptr}};

PyType_Spec kRequestSpec = {"unisono._native.RequestBase", sizeof(RequestFields), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, kRequestSlots};
PyType_Spec kStatusSpec = {"unisono._native.StatusBase", sizeof(StatusFields), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, kStatusSlots};

}  // namespace

void bind_requests(nb::module_& m) {
  m.attr("RequestBase") = checked(PyType_FromSpec(&kRequestSpec));
  const nb::object status = checked(PyType_FromSpec(&kStatusSpec));
  status_type = reinterpret_cast<PyTypeObject*>(status.ptr());
  m.attr("StatusBase") = status;
}
