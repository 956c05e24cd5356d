// Binds the measurements of the machine.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "calibrate/measure.hpp"
#include "python/bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

void touch(int kind, Address out, Address in, size_t nbytes) {
  if (kind < 0 || kind > static_cast<int>(calibrate::MemoryAccess::kCopy))
    throw nb::value_error("no such kind of touch");
  const GilRelease no_gil;
  calibrate::touch(static_cast<calibrate::MemoryAccess>(kind), reinterpret_cast<void*>(out),
                   reinterpret_cast<void*>(in), nbytes);
}

}  // namespace

void bind_calibrate(nb::module_& m) {
  using Release = nb::call_guard<GilRelease>;
  m.def("probe_flag", &calibrate::flag, nb::arg("first_core"), nb::arg("second_core"), nb::arg("round_trips"),
        Release(), "Seconds until one core sees a store of another core.");
  m.def("probe_wake", &calibrate::wake, nb::arg("core"), nb::arg("round_trips"), Release(),
        "Seconds until a sleeper runs that shares the waker's core.");
  m.def("probe_crowd", &calibrate::crowd, nb::arg("cores"), nb::arg("rounds"), Release(),
        "Seconds of a barrier of two threads on each core.");
  m.def(
      "probe_hand",
      [](size_t nbytes, int first_core, int second_core, int rounds) {
        const auto found = calibrate::hand(nbytes, first_core, second_core, rounds);
        return std::pair(found.give, found.take);
      },
      nb::arg("nbytes"), nb::arg("first_core"), nb::arg("second_core"), nb::arg("rounds"), Release(),
      "Bytes per second (into memory that another core has read, from memory it has just written).");
  m.def(
      "probe_rate",
      [](bool reduces, size_t nbytes, const std::vector<int>& cores, double seconds) {
        return calibrate::rate(reduces ? calibrate::MemoryPass::kReduce : calibrate::MemoryPass::kCopy,
                               nbytes, cores, seconds);
      },
      nb::arg("reduces"), nb::arg("nbytes"), nb::arg("cores"), nb::arg("seconds"), Release(),
      "Bytes per second of the slowest of one thread per core, all at once, that copies or adds f32.");
  m.def(
      "probe_loopback",
      [](double seconds) {
        const auto found = calibrate::loopback(seconds);
        return std::pair(found.latency_s, found.bytes_per_s);
      },
      nb::arg("seconds"), Release(), "(seconds one way, bytes per second) of TCP over loopback.");
  m.attr("START_BARRIER_SLOT") = calibrate::kStartBarrierSlot;
  m.def(
      "line_up",
      [](Address slots, size_t count, size_t mine, bool crowded) {
        calibrate::start_barrier(reinterpret_cast<void*>(slots), count, mine, crowded);
      },
      nb::arg("slots"), nb::arg("count"), nb::arg("mine"), nb::arg("crowded"), Release(),
      "Waits for `count` processes, each of which counts in its own START_BARRIER_SLOT bytes of shared "
      "memory.");
  m.def("touch", &touch, nb::arg("kind"), nb::arg("out"), nb::arg("in_"), nb::arg("nbytes"),
        "Passes over the bytes once: 0 reads `in_`, 1 writes `out`, 2 updates `out` in place, 3 copies.");
}
