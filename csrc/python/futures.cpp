// What a callback of PyTorch's futures answers, without a frame of Python.
//
// PyTorch makes a C++ error of what a callback raises: its text, and below it every frame of Python the
// exception has passed. One that is raised here has passed none.
#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

nb::object outcome(const nb::typed<nb::list, nb::any>& box, nb::handle) {
  nb::object value = box[0];
  if (!PyExceptionInstance_Check(value.ptr())) return value;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  throw nb::python_error();
}

}  // namespace

void bind_futures(nb::module_& m) {
  m.def("outcome", &outcome, nb::arg("box"), nb::arg("future"),
        "What is in the box: returned, or raised if it is an exception.");
}
