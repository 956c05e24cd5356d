// The native module: its tables, and how it reads buffers. No logic: Python makes the error texts.
#include "python/bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "kernels/reduce.hpp"
#include "protocol/region.hpp"
#include "protocol/region_layout.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// The dtype of a buffer-protocol format, or -1.
int dtype_of_format(const char* format, Py_ssize_t itemsize) {
  if (format == nullptr) return static_cast<int>(DType::kU8);
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool complex = *format == 'Z';
  if (complex) ++format;
  if (format[0] == '\0' || format[1] != '\0') return -1;
  const auto code = [](DType dtype) { return static_cast<int>(dtype); };
  switch (*format) {
    case '?':
      return code(DType::kBool);
    case 'B':
      return code(DType::kU8);
    case 'b':
      return code(DType::kI8);
    case 'e':
      return code(DType::kF16);
    case 'f':
      return code(complex ? DType::kC64 : DType::kF32);
    case 'd':
      return code(complex ? DType::kC128 : DType::kF64);
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return code(itemsize == 2 ? DType::kI16 : itemsize == 4 ? DType::kI32 : DType::kI64);
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      return code(itemsize == 2 ? DType::kU16 : itemsize == 4 ? DType::kU32 : DType::kU64);
    default:
      return -1;
  }
}

// NumPy's scalars export writable memory, but lose what a call writes there.
bool is_scalar(nb::handle object) {
  return nb::isinstance(object, nb::module_::import_("numpy").attr("generic"));
}

}  // namespace

std::optional<BufferView> look(nb::handle object) {
  if (const auto seen = look_at_array(object)) return seen;
  PyObject* const one = object.ptr();
  constexpr int kBytes = static_cast<int>(DType::kU8);
  if (PyBytes_CheckExact(one))  // they never move
    return BufferView{reinterpret_cast<Address>(PyBytes_AS_STRING(one)), PyBytes_GET_SIZE(one), kBytes, true};
  if (PyByteArray_CheckExact(one))
    return BufferView{reinterpret_cast<Address>(PyByteArray_AS_STRING(one)), PyByteArray_GET_SIZE(one),
                      kBytes, false, true};
  if (PyObject_CheckBuffer(object.ptr()) == 0) return look_at_tensor(object);
  if (is_array_of_its_own(object)) return std::nullopt;
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const int dtype = dtype_of_format(buffer.format, buffer.itemsize);
  const auto address = reinterpret_cast<Address>(buffer.buf);
  const Py_ssize_t nbytes = buffer.len, itemsize = buffer.itemsize;
  const bool readonly = buffer.readonly != 0 || (buffer.ndim == 0 && is_scalar(object));
  PyBuffer_Release(&buffer);
  if (dtype < 0) return std::nullopt;
  return BufferView{address, nbytes / itemsize, dtype, readonly, true};
}

void set_os_error(const std::system_error& error) {
  const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
}

void set_limit_error(const std::system_error& error) {
  try {
    const nb::object given = nb::borrow(PyExc_OSError)(error.code().value(), error.what());
    const nb::object made = nb::module_::import_("unisono.engine.base.limits").attr("limit_error")(given);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
  } catch (nb::python_error& other) {
    other.restore();
  }
}

namespace {

void bind_tables(nb::module_& m) {
  m.def(
      "dtypes",
      [] {
        return std::vector<std::tuple<std::string, size_t>>{
#define X(enumerator, name, bytes) {name, bytes},
            UNISONO_DTYPES(X)
#undef X
        };
      },
      "Element types as (name, bytes per element); a dtype's code is its index in this list.");
  m.def(
      "reduce_ops",
      [] {
        return std::vector<std::string>{
#define X(enumerator, name) name,
            UNISONO_REDUCE_OPS(X)
#undef X
        };
      },
      "Names of the reduction operations; an operation's code is its index in this list.");
  m.def(
      "reducible",
      [](int dtype, int op) {
        return dtype >= 0 && static_cast<size_t>(dtype) < kDTypeCount && op >= 0 &&
               static_cast<size_t>(op) < kReduceOpCount &&
               reducible(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
      },
      nb::arg("dtype"), nb::arg("op"), "Whether the operation has a meaning for the element type.");
  m.def("isa", [] { return std::string(kernels().isa); }, "The instruction set the reductions use.");
  m.def(
      "view",
      [](nb::handle object, bool writable) -> std::optional<std::tuple<Address, Py_ssize_t, int>> {
        const auto seen = look(object);
        if (!seen || (writable && seen->readonly)) return std::nullopt;
        return std::tuple(seen->address, seen->numel, seen->dtype);
      },
      nb::arg("object"), nb::arg("writable"),
      "(address, numel, dtype) of a C-contiguous buffer or torch CPU tensor, or None.");
  nb::enum_<FaultKind>(m, "FaultKind", nb::is_arithmetic(), "How an operation ended.")
      .value("NONE", FaultKind::kNone)
      .value("TIMEOUT", FaultKind::kTimeout)
      .value("PEER_LOST", FaultKind::kPeerLost)
      .value("PEER_LEFT", FaultKind::kPeerLeft)
      .value("MISMATCH", FaultKind::kMismatch)
      .value("INTERRUPTED", FaultKind::kInterrupted)
      .value("ABORTED", FaultKind::kAborted)
      .value("NO_MEMORY", FaultKind::kNoMemory)
      .value("BAD_FRAME", FaultKind::kBadFrame)
      .value("HOST_SILENT", FaultKind::kHostSilent)
      .value("STOPPED", FaultKind::kStopped)
      .value("UNREADABLE", FaultKind::kUnreadable)
      .value("UNWRITABLE", FaultKind::kUnwritable)
      .value("NO_ACCESS", FaultKind::kNoAccess)
      .value("REPLACED", FaultKind::kReplaced);
  m.attr("FIFO_SLOTS") = kFifoSlots;
  m.attr("MOST_ENDED_RECEIVES") = ReceiveBuffers::kMostEnded;
  m.attr("HISTORY") = kHistory;
  m.attr("LAYOUT") = kLayout;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      set_os_error(error);
    }
  });
  nb::set_leak_warnings(false);  // groups that exist until the interpreter ends are closed, not leaked
  m.doc() = "The engine: shared memory, reductions, the executor of lowered plans.";
  bind_tables(m);
  bind_engine(m);
  bind_calibrate(m);
  bind_codecs(m);
  bind_fields(m);
  bind_storages(m);
  stop_threads_at_the_end();
  bind_futures(m);
  bind_packets(m);
  bind_plain_objects(m);
  bind_memory(m);
  bind_simulator(m);
  bind_windows(m);
  bind_queues(m);
  bind_requests(m);
}
