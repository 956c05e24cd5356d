// Callbacks of PyTorch's futures without a Python frame.
//
// PyTorch turns an exception of a callback into a C++ error, whose text lists every Python frame on the
// stack. These functions have none.
#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

nb::object outcome(const nb::typed<nb::callable, nb::any()>& ask, nb::handle) {
  nb::object value = call_python(ask);
  if (!PyExceptionInstance_Check(value.ptr())) return value;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  throw nb::python_error();
}

void call_each(const nb::typed<nb::iterator, nb::any>& calls) {
  while (true) {
    const nb::object call = nb::steal(unisono_next(calls.ptr()));  // freed before the next one is awaited
    if (call.is_valid())
      call_python(call);
    else if (PyErr_Occurred())
      throw nb::python_error();
    else
      return;
  }
}

}  // namespace

void bind_futures(nb::module_& m) {
  m.def("outcome", &outcome, nb::arg("ask"), nb::arg("future"),
        "Call `ask`; return its result, or raise it if it is an exception.");
  m.def("call_each", &call_each, nb::arg("calls"), "Call each item of an iterator as it arrives.");
  m.def("stop_threads_at_the_end", &stop_threads_at_the_end,
        "Once more for a C++ library that was loaded after this module: PyTorch's.");
}
