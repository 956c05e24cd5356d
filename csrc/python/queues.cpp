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

class BoundQueue {
 public:
  BoundQueue(Engine& engine, const BufferView& memory, std::vector<int> ranks, int owner, bool latest,
             double spin_s)
      : engine(engine),
        queue(engine.wait_context(), reinterpret_cast<unsigned char*>(memory.address),
              static_cast<size_t>(memory.numel), std::move(ranks), owner, latest, duration(spin_s)) {}

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

  Engine& engine;
  SharedQueue queue;
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
      .def_prop_ro("capacity", [](BoundQueue& self) { return self.queue.capacity(); })
      .def_prop_ro(
          "state", [](BoundQueue& self) { return static_cast<int>(self.queue.state()); },
          "0: open; 1: closed; 2: its owner has lost the writer.")
      .def(
          "reserve",
          [](BoundQueue& self, size_t nbytes, double timeout_s) {
            return self.run(timeout_s, [&](const WindowLimits& limits) {
              return Answer{0, self.queue.reserve(nbytes, limits), 0, 0};
            });
          },
          "(0, offset, 0, 0).")
      .def("publish", [](BoundQueue& self) { self.queue.publish(); })
      .def("end", [](BoundQueue& self, int state) { self.queue.end(static_cast<QueueState>(state)); })
      .def(
          "slowest",
          [](BoundQueue& self) {
            const SlowReader found = self.queue.find_slowest();
            return std::tuple(found.place, found.number, static_cast<double>(found.since) * 1e-9,
                              found.taken);
          },
          "(place, or -1; the message; for how many seconds; whether the reader has taken it).")
      .def(
          "line_of", [](BoundQueue& self, int place) { return self.queue.line_of(place); },
          nb::call_guard<GilRelease>())
      .def(
          "take",
          [](BoundQueue& self, int place, double timeout_s) {
            return self.run(timeout_s, [&](const WindowLimits& limits) {
              const SharedQueue::QueueMessage found = self.queue.take(place, limits);
              return Answer{0, found.number, found.offset, found.nbytes};
            });
          },
          "(0, number, offset, bytes). Number 0: none will follow, or `stop` was called.")
      .def("give_back",
           [](BoundQueue& self, int place, uint64_t number) { self.queue.give_back(place, number); })
      .def("join", [](BoundQueue& self, int place) { self.queue.join(place); })
      .def("leave", [](BoundQueue& self, int place) { self.queue.leave(place); })
      .def("stop", [](BoundQueue& self, int place) { self.queue.stop(place); })
      .def("reads", [](BoundQueue& self, int place) { return self.queue.reads(place); });
}
