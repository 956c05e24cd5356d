// Memory for arrays that other ranks read in place.
#include <nanobind/ndarray.h>

#include <atomic>
#include <system_error>
#include <utility>

#include "protocol/arena.hpp"
#include "python/bindings.hpp"
#include "python/messages.hpp"

namespace nb = nanobind;

namespace {

struct ArenaAllocation {
  std::shared_ptr<unisono::Arena> arena;
  void* data = nullptr;
  size_t nbytes = 0;
  ~ArenaAllocation() {
    if (data != nullptr) arena->give_back(data);
  }
};

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// Allocating or freeing many pages may take seconds. From this size on the GIL is released meanwhile.
constexpr size_t kMany = 64 << 20;

void end(void* kept) noexcept {
  const std::unique_ptr<ArenaAllocation> pages(static_cast<ArenaAllocation*>(kept));
  if (pages->nbytes < kMany) return;
  const GilRelease released;
  pages->arena->give_back(std::exchange(pages->data, nullptr));
}

// The pages stay allocated until the array and all views of it are gone.
Bytes shared_bytes(size_t nbytes) {
  auto pages = std::make_unique<ArenaAllocation>();
  try {
    const GilRelease released;
    pages->arena = unisono::Arena::own();
    pages->data = pages->arena->take(nbytes);
    pages->nbytes = nbytes;
  } catch (const std::system_error& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    throw nb::python_error();
  }
  void* const data = pages->data;
  const nb::capsule owner(pages.get(), end);
  pages.release();
  return Bytes(data, {nbytes}, owner);
}

// An object of less is copied, which takes less time than making an array.
constexpr size_t kSmallObject = 64 << 10;

// An array over a bytearray, in a fifth of the time of `Bytes`.
nb::object array_of(const nb::object& bytes) {
  static std::atomic<PyObject*> known = nullptr;  // not a guarded static: see `look_at_array`
  PyObject* pair = known.load(std::memory_order_acquire);
  if (pair == nullptr) {
    const nb::object numpy = nb::module_::import_("numpy"), dtype = numpy.attr("dtype")("uint8");
    pair = nb::make_tuple(numpy.attr("frombuffer"), dtype).release().ptr();
    known.store(pair, std::memory_order_release);
  }
  const std::array<PyObject*, 2> arguments{bytes.ptr(), PyTuple_GET_ITEM(pair, 1)};
  nb::object made = nb::steal(unisono_call(PyTuple_GET_ITEM(pair, 0), arguments.data(), 2, nullptr));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

// Python before 3.12 does not ask a class for `__buffer__`.
int export_buffer(PyObject* self, Py_buffer* view, int flags) {
  view->obj = nullptr;
  const nb::object memory =
      nb::steal(PyObject_CallMethod(self, "__buffer__", "i", flags));  // a memoryview, which `view` keeps
  return memory.is_valid() ? PyObject_GetBuffer(memory.ptr(), view, flags) : -1;
}

char kBufferDoc[] = "A base class: instances are memory, that of their `__buffer__`, on every Python.";
PyType_Slot kBufferSlots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(export_buffer)}, {Py_tp_doc, kBufferDoc}, {0, nullptr}};
PyType_Spec kBufferSpec = {"unisono._native.BufferExporter", sizeof(PyObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, kBufferSlots};

}  // namespace

nb::object memory_of(std::unique_ptr<unsigned char[]> received, size_t nbytes) {
  unsigned char* const data = received.get();
  if (nbytes < kSmallObject) {
    nb::object copy = nb::steal(
        PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(nbytes)));
    if (!copy.is_valid()) throw nb::python_error();
    return copy;
  }
  nb::capsule owner(data, [](void* kept) noexcept { delete[] static_cast<unsigned char*>(kept); });
  received.release();
  return owner;
}

nb::object bytes_of(const nb::object& memory, size_t nbytes, bool as_array) {
  if (PyByteArray_CheckExact(memory.ptr())) return as_array ? array_of(memory) : memory;
  return nb::cast(Bytes(nb::cast<nb::capsule>(memory).data(), {nbytes}, memory));
}

void bind_memory(nb::module_& m) {
  m.def("shared_bytes", &shared_bytes, nb::arg("nbytes"),
        "Memory that other ranks of this host can map; OSError where the system has no such memory.");
  const nb::object exporter = nb::steal(PyType_FromSpec(&kBufferSpec));
  if (!exporter.is_valid()) throw nb::python_error();
  exporter.attr("__module__") = m.attr("__name__");
  m.attr("BufferExporter") = exporter;
}
