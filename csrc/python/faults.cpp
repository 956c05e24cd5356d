// Binds the record of a fault: the fault and the status of every rank, made by one call.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "protocol/stack_sample.hpp"
#include "python/bindings.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// A rank: its process, its status and newest calls, its report.
struct RankRecord {
  int rank, pid;
  bool left;
  RankStatus status;

  std::optional<CallRecord> call(uint64_t seq) const {
    if (seq == 0) return std::nullopt;
    for (const CallRecord& one : status.history)
      if (one.seq == seq) return one;
    return std::nullopt;
  }
};

// A fault, and the status of every rank.
struct FaultRecord {
  Fault fault;
  std::vector<RankRecord> ranks;
};

RankRecord record_of(Engine& engine, int rank) {
  const RankCell& cell = engine.group().cell(engine.member(rank));
  return {rank, engine.group().process_of(rank), cell.left.load() != 0, engine.group().status_of(rank)};
}

FaultRecord record(Engine& engine, const Fault& fault) {
  FaultRecord made{fault, {}};
  for (int rank = 0; rank < engine.size(); ++rank) made.ranks.push_back(record_of(engine, rank));
  return made;
}

FaultRecord read_fault(Engine& engine, bool refresh) {
  const GilRelease no_gil;
  if (refresh) engine.refresh();
  return record(engine, engine.fault());
}

std::optional<FaultRecord> fault_unless_alive(Engine& engine, const std::vector<int>& ranks, size_t needed,
                                              bool abort) {
  engine.check_process();
  for (const int rank : ranks) engine.member(rank);
  const Fault found = engine.fault_unless_alive(ranks, needed);
  if (found.kind == FaultKind::kNone) return std::nullopt;
  if (abort) engine.abort(found);
  engine.refresh();
  return record(engine, found);
}

// The report as a str. Invalid UTF-8 is replaced: a rank may have written any bytes.
nb::str text_of(const RankRecord& record) {
  const char* const text = record.status.report;
  const auto length = static_cast<Py_ssize_t>(strnlen(text, sizeof record.status.report));
  PyObject* const decoded = PyUnicode_DecodeUTF8(text, length, "replace");
  if (decoded == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(decoded);
}

void bind_records(nb::module_& m) {
  nb::class_<CallRecord>(m, "CallRecord", "A collective as a rank called it, in numbers; 0 stands for none.")
      .def_ro("kind", &CallRecord::kind)
      .def_ro("dtype", &CallRecord::dtype)
      .def_ro("op", &CallRecord::op)
      .def_ro("root", &CallRecord::root)
      .def_ro("numel", &CallRecord::numel)
      .def_ro("algorithm", &CallRecord::algorithm)
      .def_ro("block", &CallRecord::block)
      .def_prop_ro("between_hosts",
                   [](const CallRecord& call) { return (call.coding & kCodesBetweenHosts) != 0; })
      .def_prop_ro("fed_back", [](const CallRecord& call) { return (call.coding & kCodesFedBack) != 0; });
  nb::class_<SizeMismatch>(m, "SizeMismatch", "A message of another size than its receiver expected.")
      .def_ro("tag", &SizeMismatch::tag, "Its tag; of a collective, the number of the chunk.")
      .def_ro("expected_form", &SizeMismatch::expected_form, "The dtype, and above it what kind of message.")
      .def_ro("sent_form", &SizeMismatch::sent_form)
      .def_ro("expected_nbytes", &SizeMismatch::expected_nbytes)
      .def_ro("sent_nbytes", &SizeMismatch::sent_nbytes)
      .def_ro("seq", &SizeMismatch::seq, "The collective; 0: a message between two ranks.")
      .def_prop_ro(
          "more", [](const SizeMismatch& m) { return m.more != 0; }, "More bytes may have followed.")
      .def_prop_ro(
          "scratch", [](const SizeMismatch& m) { return m.scratch != 0; },
          "The receiver only forwards the chunk.");
  nb::class_<RankRecord>(m, "RankRecord", "The status of a rank.")
      .def_ro("rank", &RankRecord::rank)
      .def_ro("pid", &RankRecord::pid)
      .def_ro("left", &RankRecord::left, "It has closed the group.")
      .def_prop_ro(
          "started", [](const RankRecord& r) { return r.status.started; }, "Its newest collective; 0: none.")
      .def_prop_ro("finished", [](const RankRecord& r) { return r.status.finished; })
      .def_prop_ro(
          "has_report", [](const RankRecord& r) { return r.status.has_report != 0; },
          "It has reported a place.")
      .def_prop_ro(
          "report_seq", [](const RankRecord& r) { return r.status.report_seq; },
          "The collective that its report is about; 0: a message; 2**64-1: why it leaves.")
      .def_prop_ro("report", &text_of, "The text of its report.")
      .def("call", &RankRecord::call, nb::arg("seq"),
           "Its collective of this number; None: it is not remembered.");
}

void bind_fault_record(nb::module_& m) {
  nb::class_<FaultRecord>(m, "FaultRecord", "A fault, and the status of every rank.")
      .def_prop_ro("kind", [](const FaultRecord& r) { return r.fault.kind; })
      .def_prop_ro(
          "found_by", [](const FaultRecord& r) { return r.fault.found_by; }, "The rank that found it.")
      .def_prop_ro(
          "rank", [](const FaultRecord& r) { return r.fault.rank; }, "The rank that caused it, or -1.")
      .def_prop_ro(
          "signal", [](const FaultRecord& r) { return r.fault.signal; }, "What ended `rank`; 0: unknown.")
      .def_prop_ro(
          "exit_code", [](const FaultRecord& r) { return r.fault.exit_code; }, "Of `rank`; -1: unknown.")
      .def_prop_ro(
          "seq", [](const FaultRecord& r) { return r.fault.seq; }, "The collective; 0: a message.")
      .def_prop_ro("size_mismatch", [](const FaultRecord& r) { return r.fault.size_mismatch; })
      .def_prop_ro(
          "frame", [](const FaultRecord& r) { return describe(r.fault.frame); },
          "What was wrong with the frame that `rank` sent.")
      .def_prop_ro(
          "window", [](const FaultRecord& r) { return static_cast<uint32_t>(r.fault.window); },
          "What a call of a window awaited of `rank`, see WindowWait; 0: it was no such call.")
      .def_ro("ranks", &FaultRecord::ranks);
}

}  // namespace

void bind_faults(nb::module_& m, nb::class_<Engine>& engine) {
  bind_records(m);
  bind_fault_record(m);
  m.def(
      "set_stack_file",
      [](int fd, std::vector<std::string> library_folders) {
        stack_file() = {fd, std::move(library_folders)};
      },
      nb::arg("fd"), nb::arg("library_folders"),
      "The memory file into which faulthandler writes stacks, and the folders whose lines are not the "
      "program's.");
  m.def("program_line", &program_line, nb::arg("stack"), nb::arg("library_folders"), nb::arg("installed"),
        "The innermost line of the program in a stack of faulthandler's.");
  engine
      .def_prop_ro(
          "several_threads", [](Engine& self) { return self.several_threads(); },
          "Whether more than one thread has issued calls.")
      .def_prop_ro(
          "faulted", [](Engine& self) { return self.fault().kind != FaultKind::kNone; },
          "Whether a fault has ended the group.")
      .def("read_fault", &read_fault, nb::arg("refresh"),
           "The fault that ended the group, of kind NONE if there is none. refresh: first asks the ranks of "
           "other hosts for their status, which takes up to 0.7 s, and late ranks for their line, 0.2 s.")
      .def("fault_unless_alive", &fault_unless_alive, nb::arg("ranks"), nb::arg("needed"), nb::arg("abort"),
           nb::call_guard<GilRelease>(),
           "None when at least `needed` of these ranks are alive; otherwise the fault of one that is not. "
           "abort: that fault ends the group.")
      .def("record_of", &record_of, nb::arg("rank"), "The status of one rank.")
      .def(
          "await_end",
          [](Engine& self, int rank, double patience_s) { self.await_end(rank, deadline_after(patience_s)); },
          nb::arg("rank"), nb::arg("patience_s"), nb::call_guard<GilRelease>(),
          "Waits for the end of a rank's process, at most until `patience_s` after the first such call.");
}
