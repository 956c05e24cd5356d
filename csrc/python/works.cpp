// Python's asynchronous collectives.
#include <nanobind/stl/string.h>

#include <cstring>
#include <limits>

#include "python/calls.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();

// A value of a dictionary; invalid: it has no such key.
nb::object value_of(PyObject* dictionary, PyObject* key) {
#ifdef Py_GIL_DISABLED
  PyObject* found = nullptr;
  if (PyDict_GetItemRef(dictionary, key, &found) < 0) PyErr_Clear();
  return nb::steal(found);
#else
  PyObject* const found = PyDict_GetItemWithError(dictionary, key);
  if (found == nullptr) PyErr_Clear();
  return nb::borrow(found);
#endif
}

// Frames of these packages do not belong to the caller's program.
bool ours(PyObject* globals) {
  static InternedName name{"__name__"};
  const nb::object module = value_of(globals, name.get());
  if (!module.is_valid() || !PyUnicode_Check(module.ptr())) return false;
  const char* const text = PyUnicode_AsUTF8(module.ptr());
  if (text == nullptr) PyErr_Clear();
  return text != nullptr && (std::strncmp(text, "unisono.", 8) == 0 || std::strncmp(text, "torch.", 6) == 0);
}

nb::object globals_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return nb::steal(PyFrame_GetGlobals(frame));
#else
  return nb::borrow(frame->f_globals);
#endif
}

int offset_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * 2;
#endif
}

// Reads only the code object's table of lines, which nothing changes or frees while `CollectiveWork` holds
// it: it may run without the GIL. Waiting for the GIL here would stop the engine behind a caller that
// computes. What a tracer adds to a code object (Python 3.12 and later) has the same lifetime and the same
// lines.
std::string file_and_line(const CallSite& site) {
  auto* const code = static_cast<PyCodeObject*>(const_cast<void*>(site.code));
  const std::string place = std::string(site.file) + ":" + std::to_string(PyCode_Addr2Line(code, site.at));
  return site.note == nullptr ? place : place + " with " + site.note;
}

}  // namespace

// The innermost frame that is neither Unisono's nor PyTorch's. `code` keeps alive what the result points to.
CallSite caller_site(nb::object& code) {
  static std::atomic<PyObject*> last = nullptr;  // the last caller; held: no other code has its address
  nb::object frame = nb::steal(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  while (frame.is_valid()) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    const bool again = code.ptr() == last.load(std::memory_order_relaxed);
    if (again || !ours(globals_of(raw).ptr())) {
      if (!again) Py_XDECREF(last.exchange(code.inc_ref().ptr(), std::memory_order_acq_rel));
      const char* const file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
      if (file != nullptr) return {file_and_line, code.ptr(), file, nullptr, offset_in(raw)};
      PyErr_Clear();
      return {};
    }
    frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return {};
}

void refuse_memory(const nb::object& operation) {
  PyErr_Format(
      PyExc_ValueError,
      "%U: the buffer shares memory with that of a receive under way on this rank; wait for that receive "
      "first, or use another buffer",
      operation.ptr());
  throw nb::python_error();
}

double seconds(nb::handle timeout, double otherwise, nb::handle planner) {
  if (timeout.is_none()) return otherwise;
  if (PyFloat_CheckExact(timeout.ptr())) {
    const double value = PyFloat_AS_DOUBLE(timeout.ptr());
    if (value > 0) return value;
  }
  return nb::cast<double>(call_python(planner.attr("seconds"), timeout));
}

void CollectiveWork::start(CollectiveCall&& call, const nb::object& note) {
  try {
    site_ = caller_site(code_);
    if (!note.is_none()) {
      note_ = note;
      site_.note = PyUnicode_AsUTF8(note_.ptr());
      if (site_.note == nullptr) throw nb::python_error();
    }
    call.site = site_;
    const uint64_t ticket = engine().start(std::move(call));
    number_.store(engine().number(ticket), std::memory_order_relaxed);
    ticket_.store(ticket, std::memory_order_release);
  } catch (...) {
    ticket_.store(0,
                  std::memory_order_release);  // the engine did not accept the call; ticket 0 is always done
    throw;
  }
}

// How it ended; kTimeout when it has not.
int CollectiveWork::ended(double timeout_s) {
  Engine& engine = this->engine();
  const uint64_t ticket = ticket_.load(std::memory_order_acquire);
  int kind = waiting(engine, brief_, [&](ReleasableLock& held) {
    return engine.wait(ticket, deadline_after(timeout_s), &held);
  });
  if (kind == static_cast<int>(FaultKind::kTimeout) && done())  // it has ended since
    kind = static_cast<int>(engine.wait(ticket, INT64_MAX));
  return kind;
}

void CollectiveWork::write_back() {
  if (result_.unpack.is_valid() && done() && ended(kForever) == 0) result_.write_back();
}

bool CollectiveWork::seen_done() {
  if (!done()) return false;
  retain_buffers();
  return true;
}

nb::object CollectiveWork::error() {
  retain_buffers();
  raised_.store(true, std::memory_order_relaxed);
  return call_python(planner_.attr("failure"), name_, timeout_s_, engine_, site_.text());
}

void CollectiveWork::wait(nb::handle timeout) {
  const double timeout_s = seconds(timeout, kForever, planner_);
  const int kind = ended(timeout_s);
  if (kind == 0) {
    result_.write_back();
    hand_over();  // the engine no longer uses the buffers
    return;
  }
  const bool goes_on =
      kind == static_cast<int>(FaultKind::kTimeout) && engine().fault().kind == FaultKind::kNone;
  const nb::object raised =
      goes_on ? call_python(planner_.attr("late"), name_, timeout_s, engine_, site_.text()) : error();
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
  throw nb::python_error();
}

nb::object CollectiveWork::exception() {
  if (!done()) return nb::none();
  if (ended(kForever) != 0) return error();
  result_.write_back();
  return nb::none();
}

nb::object CollectiveWork::result() {
  wait(nb::none());
  return result_.value();
}

nb::object CollectiveWork::text() const {
  const nb::object group = property_of(planner_, "name");
  return nb::steal(PyUnicode_FromFormat("%U, queued as %llu of group %R", name_.ptr(),
                                        static_cast<unsigned long long>(ticket_.load()), group.ptr()));
}

nb::object CollectiveWork::described(nb::handle self) const {
  return call_python(planner_.attr("describe"), self);
}

void bind_works(nb::module_& m) {
  nb::class_<CollectiveWork>(m, "CollectiveWork",
                             "An asynchronous collective: done when the engine has run its ticket.")
      .def("done", &CollectiveWork::seen_done, "Whether it has ended, with or without an error.")
      .def("wait", &CollectiveWork::wait, nb::arg("timeout").none() = nb::none(),
           "Wait until it has ended, and raise its error; see `Work.wait`.")
      .def("exception", &CollectiveWork::exception, nb::sig("def exception(self) -> BaseException | None"),
           "Its error; None if it has none or is still under way.")
      .def("result", &CollectiveWork::result, nb::sig("def result(self) -> typing.Any"),
           "Wait; then return the array that the call allocated, or the number; None if the caller gave an "
           "array.")
      .def("retain_buffers", &CollectiveWork::retain_buffers,
           "After its end: keep its buffers for ever if a stopped rank may still write to them.")
      .def("_what", &CollectiveWork::text, "The operation, for messages.")
      .def("__repr__", [](const CollectiveWork& self) { return nb::str(self.described(nb::find(self))); })
      .def_prop_ro(
          "status", [](const CollectiveWork&) { return nb::none(); }, nb::sig("def status(self) -> None"),
          "None: see `Work.status`.")
      .def(
          "cancel", [](const CollectiveWork&) { return false; }, "False: see `Work.cancel`.")
      .def_prop_ro(
          "cancelled", [](const CollectiveWork&) { return false; }, "False: see `Work.cancelled`.")
      .def_prop_ro("number", &CollectiveWork::number,
                   "Its number among the collectives of its group, from 1; the same on every rank.")
      .def_prop_ro("raised", &CollectiveWork::raised, "Whether its error has been raised.");
}
