// `Status`: describes a message that has arrived.
#include "python/status.hpp"

#include <nanobind/stl/tuple.h>

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr const char* kObjectDType = "object";

bool is_object(const Status& status) {
  return status.form >> 8 == static_cast<uint32_t>(MessageKind::kObject);
}

constexpr const char* kNames[] = {
#define X(enumerator, name, bytes) name,
    UNISONO_DTYPES(X)
#undef X
};

const char* dtype_name(const Status& status) {
  return is_object(status) ? kObjectDType : kNames[dtype_of_form(status.form)];
}

// Equal to the number of its source, so that it can be compared with a rank.
nb::object equal(const Status& status, nb::handle other) {
  if (nb::isinstance<Status>(other)) return nb::bool_(status == nb::cast<const Status&>(other));
  if (PyLong_Check(other.ptr()) == 0) return nb::borrow(Py_NotImplemented);
  return nb::int_(status.source).equal(other) ? nb::bool_(true) : nb::bool_(false);
}

nb::str text(const Status& status) {
  return nb::steal<nb::str>(
      PyUnicode_FromFormat("Status(source=%d, tag=%d, numel=%llu, nbytes=%llu, dtype='%s')", status.source,
                           status.tag, static_cast<unsigned long long>(status.numel),
                           static_cast<unsigned long long>(status.nbytes), dtype_name(status)));
}

}  // namespace

void bind_status(nb::module_& m) {
  nb::class_<Status>(
      m, "Status", nb::is_final(),
      "A received message: its source, tag, size and dtype. It can be used as the number of the "
      "rank `source`, and equals that number.")
      .def_ro("source", &Status::source, "The rank that sent it.")
      .def_ro("tag", &Status::tag, "Its tag.")
      .def_ro("numel", &Status::numel, "The number of elements received; the buffer may hold more.")
      .def_ro("nbytes", &Status::nbytes, "The number of bytes received.")
      .def_prop_ro("dtype", &dtype_name, nb::sig("def dtype(self) -> str"),
                   "The name of the dtype; \"object\" for a message of `send_object`; its size is then that "
                   "of the encoding.")
      .def("__index__", [](const Status& status) { return status.source; })
      .def("__eq__", &equal, nb::arg("other"), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Status& status) { return nb::hash(nb::int_(status.source)); })
      .def("__repr__", &text)
      .def(
          "__getstate__",
          [](const Status& status) {
            return nb::make_tuple(status.source, status.tag, status.nbytes, status.form);
          },
          nb::sig("def __getstate__(self) -> tuple[int, int, int, int]"))
      .def("__setstate__",
           [](Status* self, const std::tuple<int, int, uint64_t, uint32_t>& state) {
             const auto [source, tag, nbytes, form] = state;
             if (dtype_of_form(form) >= kDTypeCount) throw std::invalid_argument("no such dtype");
             new (self) Status(Status::of(source, tag, form, nbytes));
           })
      .def(
          "__copy__", [](const Status& status) { return Status(status); }, "A copy.")
      .def(
          "__deepcopy__", [](const Status& status, nb::handle) { return Status(status); }, nb::arg("memo"),
          "A copy.");
}
