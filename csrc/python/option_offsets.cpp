// Reads the fields of PyTorch's options objects from their memory.
//
// As Python attributes, the options of one all-reduce take three times as long to read as the all-reduce
// takes. unisono/torch/option_offsets.py finds the offset of each field: it writes to the field and compares
// the memory.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

// The beginning of an object of a pybind11 class.
struct PybindInstance {
  PyObject head;
  const unsigned char* value;
};

const unsigned char* value_of(PyObject* object) { return reinterpret_cast<PybindInstance*>(object)->value; }

// At most `count` bytes. The kernel copies them, through a pipe: where a version of PyTorch keeps its objects
// in another way, the address may be none, and then there are no bytes.
nb::bytes memory_at(uintptr_t address, size_t count) {
  std::array<char, 256> bytes;
  ssize_t got = -1;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) == 0) {
    // A system call by its number: the address sanitizer does not see that it reads behind the object.
    got = syscall(SYS_write, ends[1], reinterpret_cast<const void*>(address), std::min(count, bytes.size()));
    if (got > 0) got = ::read(ends[0], bytes.data(), static_cast<size_t>(got));
    close(ends[0]);
    close(ends[1]);
  }
  return nb::bytes(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0);
}

nb::bytes value_bytes(nb::handle object) {
  const bool enough = Py_TYPE(object.ptr())->tp_basicsize >= Py_ssize_t{sizeof(PybindInstance)};
  return memory_at(enough ? reinterpret_cast<uintptr_t>(value_of(object.ptr())) : 0, SIZE_MAX);
}

constexpr int64_t kAsync = int64_t{1} << 40;  // above every root

// The offsets of the fields of one options class, in bytes; -1: it has no such field.
class OptionOffsets {
 public:
  OptionOffsets(nb::object kind, int async_op, int timeout, int op, int root, int ops)
      : kind_(std::move(kind)), async_op_(async_op), timeout_(timeout), op_(op), root_(root), ops_(ops) {}

  // 256 times the root's rank plus the number of the reduce operation, plus kAsync if the call is; -1: the
  // caller reads the attributes.
  int64_t read(PyObject* options) const {
    if (Py_TYPE(options) != reinterpret_cast<PyTypeObject*>(kind_.ptr())) return -1;
    const unsigned char* const value = value_of(options);
    if (value == nullptr || value[async_op_] > 1 || number(value + timeout_) >= 0) return -1;
    const int64_t later = value[async_op_] != 0 ? kAsync : 0;
    const int64_t op = op_ < 0 ? 0 : value[op_], root = root_ < 0 ? 0 : number(value + root_);
    return op < ops_ && root >= 0 && root <= INT32_MAX ? later + root * 256 + op : -1;
  }

 private:
  static int64_t number(const unsigned char* place) {
    int64_t read;
    std::memcpy(&read, place, sizeof read);
    return read;
  }

  nb::object kind_;
  int async_op_, timeout_, op_, root_, ops_;
};

PyObject* read(PyObject* self, PyObject* options) {
  return PyLong_FromLongLong(nb::inst_ptr<OptionOffsets>(self)->read(options));
}

PyMethodDef kRead = {
    "read", read, METH_O,
    "256 x root + number of the reduce operation, + 2**40 if asynchronous; -1: with a timeout, or other."};

}  // namespace

void bind_fields(nb::module_& m) {
  m.def("value_bytes", &value_bytes, nb::arg("object"),
        "The memory where the C++ object of a pybind11 object begins; empty: nothing is there.");
  m.def("memory_at", &memory_at, nb::arg("address"), nb::arg("count"),
        "Bytes of memory, at most 256; empty: nothing is there.");
  nb::class_<OptionOffsets>(m, "OptionOffsets",
                            "The offsets of the fields of one class of PyTorch's options.")
      .def(nb::init<nb::object, int, int, int, int, int>(), nb::arg("kind"), nb::arg("async_op"),
           nb::arg("timeout"), nb::arg("op"), nb::arg("root"), nb::arg("ops"))
      .def_prop_ro("read", [](nb::handle_t<OptionOffsets> fields) {
        return nb::steal<nb::any>(PyCFunction_New(&kRead, fields.ptr()));
      });
}
