// The quickest way into an operation, for the calls a program makes all day.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// One in-place operation (collective, root, op), with a memory of the plans used for each dtype and size:
// a call that repeats an earlier one takes no Python between the caller and the engine.
class Quick {
 public:
  Quick(Engine& engine, int root, double factor, double timeout_s, bool writable)
      : engine_(engine), root_(root), factor_(factor), timeout_s_(timeout_s), writable_(writable) {}

  // Runs on `array`; the kind of fault, or -1: not remembered, go the long way, nothing has happened.
  int call(nb::handle array) {
    const auto seen = view(array, writable_);
    if (!seen) return -1;
    const auto [address, numel, dtype] = *seen;
    const Slot& slot = slot_of(dtype, numel);
    if (slot.operation.program == nullptr || slot.dtype != dtype || slot.numel != numel) return -1;
    const auto count = static_cast<size_t>(numel);
    // Nothing of the slot is looked at once the GIL is gone.
    Call call =
        slot.operation.call(root_, count, factor_, timeout_s_, slot.operation.bind(address, count, 0, 0));
    return waiting(engine_, [&] { return engine_.run(std::move(call)); });
  }
  void remember(int dtype, Py_ssize_t numel, const Operation& operation) {
    slot_of(dtype, numel) = {dtype, numel, operation};
  }

 private:
  struct Slot {
    int dtype = -1;
    Py_ssize_t numel = -1;
    Operation operation{};
  };
  Slot& slot_of(int dtype, Py_ssize_t numel) {
    return slots_[(static_cast<size_t>(numel) * 0x9e3779b97f4a7c15ULL >> 58 ^ static_cast<size_t>(dtype)) %
                  kSlots];
  }

  static constexpr size_t kSlots = 64;
  Engine& engine_;
  const int root_;
  const double factor_, timeout_s_;
  const bool writable_;
  Slot slots_[kSlots];
};

}  // namespace

void bind_quick(nb::module_& m) {
  nb::class_<Quick>(m, "Quick", "An in-place operation that remembers its plans by dtype and size.")
      .def(nb::init<Engine&, int, double, double, bool>(), nb::arg("engine"), nb::arg("root"),
           nb::arg("factor"), nb::arg("timeout_s"), nb::arg("writable"), nb::keep_alive<1, 2>())
      .def("__call__", &Quick::call, nb::arg("array"))
      .def("remember", &Quick::remember, nb::arg("dtype"), nb::arg("numel"), nb::arg("operation"));
}
