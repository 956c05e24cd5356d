// Binds the windows of one-sided communication. Addresses are those of the target's process.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <new>
#include <string>

#include "python/bindings.hpp"
#include "windows/window.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr const char* kDTypeNames[] = {
#define X(enumerator, name, bytes) name,
    UNISONO_DTYPES(X)
#undef X
};
constexpr size_t kBrief = 64 << 10;  // moved within some microseconds: the GIL is kept

// The buffer of a call. `pin` keeps memory whose owner could move it.
struct CallBuffer {
  Address address;
  size_t numel;
  int dtype;
  nb::object pin;
  size_t nbytes() const { return numel * itemsize(static_cast<DType>(dtype)); }
};

CallBuffer read_buffer(nb::handle given, bool writable, const char* name) {
  const auto seen = look(given);
  if (seen && !(writable && seen->readonly)) {
    nb::object pin;
    if (seen->exported) pin = nb::steal(PyMemoryView_FromObject(given.ptr()));
    PyErr_Clear();
    return {seen->address, static_cast<size_t>(seen->numel), seen->dtype, std::move(pin)};
  }
  const nb::object view = nb::module_::import_("unisono.engine.memory.buffers").attr("view");
  const auto [address, numel, dtype] = nb::cast<std::tuple<Address, size_t, int>>(
      call_python(view, nb::borrow(given), writable, nb::str(name)));
  return {address, numel, dtype, nb::borrow(given)};
}

int64_t whole(nb::handle given) {
  const Py_ssize_t number = PyNumber_AsSsize_t(given.ptr(), PyExc_ValueError);
  if (number == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return number;
}

[[noreturn]] void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}

class BoundWindow {
 public:
  // typed: offsets count elements of the target, whose dtype is that of a call; otherwise bytes.
  template <class... Arguments>
  BoundWindow(Engine& engine, bool typed, Arguments&&... arguments)
      : engine(engine), window(engine.wait_context(), std::forward<Arguments>(arguments)...), typed_(typed) {}

  // Runs a call; returns its FaultKind.
  template <class Call>
  int run(double timeout_s, size_t nbytes, Call call) {
    engine.check_process();
    return waiting(engine, nbytes <= kBrief, [&](GilLock& gil) {
      try {
        call(WindowLimits{duration(timeout_s), &gil});
      } catch (const Fault& fault) {
        return fault.kind;
      } catch (const std::bad_alloc&) {
        engine.abort({FaultKind::kNoMemory, engine.rank(), engine.rank()});
        return FaultKind::kNoMemory;
      }
      return FaultKind::kNone;
    });
  }

  // The same for a call that answers: (fault, the answer).
  template <class Call>
  std::pair<int, bool> tell(double timeout_s, Call call) {
    bool answer = false;
    const int fault = run(timeout_s, 0, [&](const WindowLimits& limits) { answer = call(limits); });
    return {fault, answer};
  }

  bool typed() const { return typed_; }
  int member(nb::handle rank) const { return window.member(whole(rank)); }

  // (the rank, the address there) of a call's buffer. Raises ValueError, TypeError.
  std::pair<int, Address> locate(nb::handle rank_given, nb::handle offset_given, const CallBuffer& buffer) {
    const int rank = member(rank_given);
    const int64_t offset = whole(offset_given);
    const WindowPart& there = window.part(rank);
    if (!typed_) return {rank, there.base + static_cast<uint64_t>(offset)};
    if (there.unit != buffer.dtype) refuse_dtype(rank, there.unit, buffer.dtype);
    const size_t item = itemsize(static_cast<DType>(there.unit)), most = there.nbytes / item;
    if (offset < 0 || static_cast<size_t>(offset) > most || buffer.numel > most - static_cast<size_t>(offset))
      raise(PyExc_ValueError, std::to_string(buffer.numel) + " elements from offset " +
                                  std::to_string(offset) + " on are not in the array of rank " +
                                  std::to_string(rank) + ", which has " + std::to_string(most));
    return {rank, there.base + static_cast<size_t>(offset) * item};
  }

  Engine& engine;
  Window window;

 private:
  [[noreturn]] static void refuse_dtype(int rank, int unit, int dtype) {
    const std::string who = "rank " + std::to_string(rank);
    if (unit < 0) raise(PyExc_ValueError, who + " exposes no array");
    raise(PyExc_TypeError, std::string("the buffer is ") + kDTypeNames[dtype] + ", the array of " + who +
                               " is " + kDTypeNames[unit]);
  }
  const bool typed_;
};

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

WindowCell* make_cell(Engine& engine, Address memory, uint32_t most_exposed, Address base, size_t nbytes) {
  auto* const cell = new (at<void>(memory)) WindowCell{};
  cell->ranks = static_cast<uint32_t>(engine.size());
  cell->most_exposed = most_exposed;
  if (nbytes > 0) cell->attach(base, nbytes);
  engine.group().publish_arena(engine.rank());
  return cell;
}

DType checked(int dtype, uint32_t op) {
  if (dtype < 0 || !updates(static_cast<uint32_t>(dtype), op))
    throw std::invalid_argument("windows do not combine elements of this type so");
  return static_cast<DType>(dtype);
}

FileDescriptors owned(const std::vector<int>& numbers) { return {numbers.begin(), numbers.end()}; }

using Part = std::tuple<Address, Address, size_t, int>;
using Ranks = std::vector<int>;

void bind_memory_of(nb::class_<BoundWindow>& window) {
  window
      .def("attach",
           [](BoundWindow& self, Address address, size_t nbytes) {
             return self.tell(HUGE_VAL, [&](const WindowLimits& limits) {
               return self.window.attach(address, nbytes, limits);
             });
           })
      .def("detach",
           [](BoundWindow& self, Address address) {
             return self.tell(
                 HUGE_VAL, [&](const WindowLimits& limits) { return self.window.detach(address, limits); });
           })
      .def(
          "mapped",
          [](BoundWindow& self, int rank, Address address, size_t nbytes) {
            return reinterpret_cast<Address>(self.window.mapped(self.window.member(rank), address, nbytes));
          },
          "Where the memory of a rank of this host is in this process; 0: it is not mapped here.");
}

// Calls whose buffers are arrays; the offset counts what the target's unit says.
void bind_arrays(nb::class_<BoundWindow>& window) {
  window
      .def("put",
           [](BoundWindow& self, nb::handle x, nb::handle to, nb::handle offset, double timeout_s) {
             const CallBuffer source = read_buffer(x, false, "x");
             const auto [rank, address] = self.locate(to, offset, source);
             return self.run(timeout_s, source.nbytes(), [&](const WindowLimits& limits) {
               self.window.put(rank, address, at<void>(source.address), source.nbytes(), limits);
             });
           })
      .def("get",
           [](BoundWindow& self, nb::handle out, nb::handle from, nb::handle offset, double timeout_s) {
             const CallBuffer into = read_buffer(out, true, "out");
             const auto [rank, address] = self.locate(from, offset, into);
             return self.run(timeout_s, into.nbytes(), [&](const WindowLimits& limits) {
               self.window.get(rank, address, at<void>(into.address), into.nbytes(), limits);
             });
           })
      .def(
          "update",
          [](BoundWindow& self, nb::handle x, nb::handle former, nb::handle to, nb::handle offset,
             uint32_t op, double timeout_s) {
            const CallBuffer operand = read_buffer(x, false, "x");
            const CallBuffer into = former.is_none() ? CallBuffer{} : read_buffer(former, true, "former");
            const auto [rank, address] = self.locate(to, offset, operand);
            const DType type = checked(operand.dtype, op);
            if (!former.is_none() && (into.dtype != operand.dtype || into.numel != operand.numel))
              raise(PyExc_ValueError, "the buffer of former values has another size or dtype");
            return self.run(timeout_s, operand.nbytes(), [&](const WindowLimits& limits) {
              self.window.update(rank, address, type, op, at<void>(operand.address), at<void>(into.address),
                                 operand.numel, limits);
            });
          },
          nb::arg("x"), nb::arg("former").none(), nb::arg("rank"), nb::arg("offset"), nb::arg("op"),
          nb::arg("timeout_s"))
      .def("swap", [](BoundWindow& self, nb::handle expected, nb::handle desired, nb::handle former,
                      nb::handle to, nb::handle offset, double timeout_s) {
        const CallBuffer old = read_buffer(expected, false, "expected"),
                         made = read_buffer(desired, false, "desired");
        const CallBuffer into = read_buffer(former, true, "former");
        for (const CallBuffer* one : {&old, &made, &into})
          if (one->numel != (self.typed() ? 1 : old.numel) || one->dtype != old.dtype)
            raise(PyExc_ValueError, "expected, desired and former are one element each, of one dtype");
        const auto [rank, address] = self.locate(to, offset, old);
        return self.run(timeout_s, 0, [&](const WindowLimits& limits) {
          self.window.swap(rank, address, at<void>(old.address), at<void>(made.address),
                           at<void>(into.address), old.nbytes(), limits);
        });
      });
}

// A call that names one rank.
template <void (Window::*kCall)(int, const WindowLimits&)>
int of_rank(BoundWindow& self, int rank, double timeout_s) {
  return self.run(timeout_s, 0, [&](const WindowLimits& limits) {
    (self.window.*kCall)(self.window.member(rank), limits);
  });
}

// A call that names several.
template <void (Window::*kCall)(std::span<const int>, const WindowLimits&)>
int of_ranks(BoundWindow& self, const Ranks& ranks, double timeout_s) {
  for (const int rank : ranks) self.window.member(rank);
  return self.run(timeout_s, 0, [&](const WindowLimits& limits) { (self.window.*kCall)(ranks, limits); });
}

void bind_synchronization(nb::class_<BoundWindow>& window) {
  window
      .def(
          "flush",
          [](BoundWindow& self, nb::handle rank, double timeout_s) {
            const int only = rank.is_none() ? -1 : self.member(rank);
            return self.run(timeout_s, 0, [&](const WindowLimits& limits) {
              only < 0 ? self.window.flush_all(limits) : self.window.flush(only, limits);
            });
          },
          nb::arg("rank").none(), nb::arg("timeout_s"), "None: at every rank.")
      .def("unlock", &of_rank<&Window::unlock>)
      .def("hold", &of_rank<&Window::hold>)
      .def("release", &of_rank<&Window::release>)
      .def("post", &of_ranks<&Window::post>)
      .def("start", &of_ranks<&Window::start>)
      .def("complete", &of_ranks<&Window::complete>)
      .def("lock",
           [](BoundWindow& self, int rank, bool shared, double timeout_s) {
             return self.run(timeout_s, 0, [&](const WindowLimits& limits) {
               self.window.lock(self.window.member(rank), shared, limits);
             });
           })
      .def("fence",
           [](BoundWindow& self, bool last, double timeout_s) {
             return self.run(timeout_s, 0, [&](const WindowLimits& limits) {
               last ? self.window.finish(limits) : self.window.fence(limits);
             });
           })
      .def(
          "completed",
          [](BoundWindow& self, const Ranks& ranks, bool wait, double timeout_s) {
            for (const int rank : ranks) self.window.member(rank);
            return self.tell(timeout_s, [&](const WindowLimits& limits) {
              return self.window.completed(ranks, wait, limits);
            });
          },
          "(fault, whether all of them have completed).");
}

}  // namespace

void bind_windows(nb::module_& m) {
  m.attr("REPLACE") = kReplaceOp;
  m.attr("NO_OP") = kNoOp;
  m.def("window_cell_bytes", &WindowCell::bytes_needed, nb::arg("ranks"), nb::arg("most_exposed"));
  m.def(
      "make_window_cell",
      [](Engine& engine, Address memory, uint32_t most_exposed, Address base, size_t nbytes) {
        make_cell(engine, memory, most_exposed, base, nbytes);
      },
      "Fills in the memory of this rank's cell. Call before the other ranks learn its address.");
  m.def("updates", &updates, nb::arg("dtype"), nb::arg("op"), "Whether windows combine elements so.");
  m.def(
      "reaches_window",
      [](Engine& engine, int rank, Address cell, size_t nbytes) {
        return Window::reaches(engine.wait_context(), engine.member(rank), cell, nbytes);
      },
      "Whether this process maps the cell of that rank.");
  nb::class_<BoundWindow> window(m, "Window", "A rank's access to the memory that all ranks expose.");
  window
      .def(
          "__init__",
          [](BoundWindow* self, Engine& engine, std::vector<int> members, const std::vector<Part>& parts,
             const std::vector<bool>& direct, const std::vector<int>& asking, const std::vector<int>& serving,
             bool dynamic, bool typed) {
            FileDescriptors asks = owned(asking), serves = owned(serving);
            engine.check_process();
            std::vector<WindowPart> seen;
            for (const auto& [cell, base, nbytes, unit] : parts) {
              if (typed && unit >= static_cast<int>(kDTypeCount))
                throw std::invalid_argument("no such dtype");
              seen.push_back({cell, base, nbytes, unit});
            }
            new (self) BoundWindow(engine, typed, std::move(members), std::move(seen), direct,
                                   std::move(asks), std::move(serves), dynamic);
          },
          nb::arg("engine"), nb::arg("members"), nb::arg("parts"), nb::arg("direct"), nb::arg("asking"),
          nb::arg("serving"), nb::arg("dynamic"), nb::arg("typed"), nb::keep_alive<1, 2>(),
          "Takes over the sockets, also when it raises an error.")
      .def(
          "end", [](BoundWindow& self) { self.window.end(); }, nb::call_guard<GilRelease>())
      .def("close_copies", [](BoundWindow& self) { self.window.close_copies(); });
  bind_memory_of(window);
  bind_arrays(window);
  bind_synchronization(window);
}
