// Binds the queues in shared memory.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/bindings.hpp"
#include "windows/queue.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// (0, and what the call answers), or (the FaultKind, rank, signal, exit code).
using Answer = std::tuple<int, int64_t, int64_t, int64_t>;

struct BoundQueue : SharedQueue {
  BoundQueue(Engine& engine, const BufferView& memory, std::vector<int> ranks, int owner, bool latest,
             double spin_s)
      : SharedQueue(engine.wait_context(), reinterpret_cast<unsigned char*>(memory.address),
                    static_cast<size_t>(memory.numel), std::move(ranks), owner, latest, duration(spin_s)),
        engine(engine) {}

  template <class Call>
  Answer run(double timeout_s, Call call) {
    engine.check_process();
    Answer answer{};
    {
      GilLock gil;  // it is no call that the end of the group waits for: that ends it afterwards
      if (engine.shares_process()) gil.release();
      try {
        answer = call(WindowLimits{duration(timeout_s), &gil});
      } catch (const Fault& fault) {
        answer = {static_cast<int>(fault.kind), fault.rank, fault.signal, fault.exit_code};
      }
    }
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return answer;
  }

  std::tuple<int, uint64_t, double, bool> slowest() {
    engine.check_process();
    const auto [place, number, since, taken] = find_slowest();
    return {place, number, static_cast<double>(since) * 1e-9, taken};
  }

  Engine& engine;
};

}  // namespace

void bind_queues(nb::module_& m) {
  m.def("queue_bytes_before", &SharedQueue::bytes_before, nb::arg("places"),
        "The bytes before the messages.");
  nb::class_<BoundQueue>(m, "Queue", "The queue in a piece of shared memory. Answers begin with a FaultKind.")
      .def(
          "__init__",
          [](BoundQueue* self, Engine& engine, nb::handle memory, std::vector<int> ranks, int owner,
             bool latest, double spin_s) {
            const auto view = look(memory);
            if (!view || view->readonly) throw std::invalid_argument("the memory of a queue is bytes");
            new (self) BoundQueue(engine, *view, std::move(ranks), owner, latest, spin_s);
          },
          nb::arg("engine"), nb::arg("memory"), nb::arg("ranks"), nb::arg("owner"), nb::arg("latest"),
          nb::arg("spin_s"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def_prop_ro("capacity", &BoundQueue::capacity)
      .def_prop_ro(
          "state", [](BoundQueue& self) { return static_cast<int>(self.state()); },
          "0: open; 1: closed; 2: its owner has lost the writer.")
      .def(
          "reserve",
          [](BoundQueue& self, size_t nbytes, double timeout_s) {
            return self.run(timeout_s, [&](const WindowLimits& limits) {
              return Answer{0, self.reserve(nbytes, limits), 0, 0};
            });
          },
          "(0, offset, 0, 0).")
      .def(
          "look",
          [](BoundQueue& self) {
            return self.run(0, [&](const WindowLimits&) {
              self.look_for_dead(true);
              return Answer{};
            });
          },
          "Whether a reader has died since.")
      .def("publish", &BoundQueue::publish)
      .def("end", [](BoundQueue& self, int state) { self.end(static_cast<QueueState>(state)); })
      .def("slowest", &BoundQueue::slowest,
           "(place, or -1; the message; for how many seconds; whether the reader has taken it).")
      .def("line_of", &BoundQueue::line_of, nb::call_guard<GilRelease>())
      .def(
          "take",
          [](BoundQueue& self, int place, double timeout_s) {
            return self.run(timeout_s, [&](const WindowLimits& limits) {
              const auto [number, offset, nbytes] = self.take(place, limits);
              return Answer{0, number, offset, nbytes};
            });
          },
          "(0, number, offset, bytes). Number 0: none will follow, or `stop` was called.")
      .def("give_back", &BoundQueue::give_back)
      .def("join", &BoundQueue::join)
      .def("leave", &BoundQueue::leave)
      .def("stop", &BoundQueue::stop)
      .def("reads", &BoundQueue::reads);
}
