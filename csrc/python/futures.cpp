// Below the callbacks of PyTorch's futures: without a frame of Python.
//
// PyTorch makes a C++ error of what a callback raises: its text, and below it every frame of Python that is
// on the stack. These have none.
#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

nb::object outcome(const nb::typed<nb::callable, nb::any()>& ask, nb::handle) {
  nb::object value = ask();
  if (!PyExceptionInstance_Check(value.ptr())) return value;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  throw nb::python_error();
}

void call_each(const nb::typed<nb::iterator, nb::any>& calls) {
  while (true) {
    const nb::object call = nb::steal(PyIter_Next(calls.ptr()));  // gone before the next one is waited for
    if (call.is_valid())
      call();
    else if (PyErr_Occurred())
      throw nb::python_error();
    else
      return;
  }
}

}  // namespace

void bind_futures(nb::module_& m) {
  m.def("outcome", &outcome, nb::arg("ask"), nb::arg("future"),
        "What `ask` answers: returned, or raised if it is an exception.");
  m.def("call_each", &call_each, nb::arg("calls"), "Call each of these as it comes.");
}
