// A reduction function of the program's, as the engine calls it.
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "python/bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

std::string text_of(nb::handle text) {
  const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return PyBytes_AS_STRING(bytes.ptr());
}

// Calls `fold(out, *inputs)` with memory views. It returns None, or the text of an exception.
class PythonCombiner final : public Combiner {
 public:
  PythonCombiner(nb::object fold, size_t item) : Combiner(item), fold_(std::move(fold)) {}

  bool combine(void* out, const void* const* in, size_t k, size_t nbytes) const override {
    if (k == 1 || nbytes == 0) {
      std::memmove(out, in[0], nbytes);
      return true;
    }
    const nb::gil_scoped_acquire gil;
    std::string failure;
    try {
      const nb::object views = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(k + 1)));
      if (!views.is_valid()) throw nb::python_error();
      PyTuple_SET_ITEM(views.ptr(), 0, view(out, nbytes, PyBUF_WRITE));
      for (size_t i = 0; i < k; ++i)
        PyTuple_SET_ITEM(views.ptr(), static_cast<Py_ssize_t>(i + 1),
                         view(const_cast<void*>(in[i]), nbytes, PyBUF_READ));
      const nb::object failed =
          nb::steal(unisono_call(fold_.ptr(), PySequence_Fast_ITEMS(views.ptr()), k + 1, nullptr));
      if (!failed.is_valid()) throw nb::python_error();
      if (failed.is_none()) return true;
      failure = text_of(failed);
    } catch (nb::python_error& error) {
      if (getpid() == gettid()) {  // signal handlers run in the main thread, which raises their exceptions
        error.restore();
        return false;
      }
      failure =
          text_of(property_of(error.type(), "__name__"));  // nanobind's text of one with surrogates crashes
    }
    throw std::domain_error(failure);
  }

  // For Python's collector: an exception of the function may refer to the operation, and so to this object.
  int visit(visitproc visit, void* arg) const {
    Py_VISIT(fold_.ptr());
    return 0;
  }
  void clear() { fold_ = {}; }

 private:
  static PyObject* view(void* data, size_t nbytes, int flags) {
    PyObject* const made =
        PyMemoryView_FromMemory(static_cast<char*>(data), static_cast<Py_ssize_t>(nbytes), flags);
    if (made == nullptr) throw nb::python_error();
    return made;
  }

  nb::object fold_;
};

PythonCombiner& combiner_of(PyObject* self) {
  return static_cast<PythonCombiner&>(*nb::inst_ptr<Combiner>(self));
}

int traverse_combiner(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? combiner_of(self).visit(visit, arg) : 0;
}

int clear_combiner(PyObject* self) {
  if (nb::inst_ready(self)) combiner_of(self).clear();
  return 0;
}

PyType_Slot kCombinerSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_combiner)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear_combiner)},
                                {0, nullptr}};

}  // namespace

void bind_combiner(nb::module_& m) {
  m.attr("COMBINED_BYTES") = Combiner::kChunkBytes;
  nb::class_<Combiner>(m, "Combiner", nb::type_slots(kCombinerSlots),
                       "A reduction function, as the engine calls it.")
      .def_static(
          "of",
          [](nb::callable fold, size_t item) -> Combiner* {
            if (item == 0) throw std::invalid_argument("an item has at least one element");
            return new PythonCombiner(std::move(fold), item);
          },
          nb::arg("fold"), nb::arg("item"), nb::rv_policy::take_ownership,
          nb::sig("def of(fold: Callable[..., str | None], item: int) -> Combiner"),
          "fold(out, *inputs): combines memory, returns None or the text of an exception. item: elements "
          "that "
          "stay together.");
}
