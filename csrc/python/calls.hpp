// What a call of a group is to the bindings: named by its arguments, or bound to its buffers.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "python/buffers.hpp"

// The arguments of any collective, in this order. A collective that lacks one has its default there.
enum Argument : uint8_t {
  kCollective,
  kOut,
  kGiven,
  kOp,
  kRoot,
  kAlgorithm,
  kReproducible,
  kAsync,
  kTimeout,
  kPlain,  // so many has a call whose edges carry no codes
  kCodec = kPlain,
  kBetweenHosts,
  kFeedback,
  kMaxError,
  kArguments
};
using Arguments = std::array<PyObject*, kArguments>;

// A call that was checked and planned: what the engine needs to run it, and what must stay alive meanwhile.
struct BoundCall {
  nanobind::object name, keep;  // keep: the buffers
  nanobind::object result;      // None, or what to call for the caller's result once it has run
  nanobind::object note;        // None, or what to call for what a Mismatch shows of it beside its line
  Operation operation;
  int root;
  size_t numel;  // what all ranks must agree on; 0 where they may differ
  double factor;
  bool writes;    // the first side is written
  bool together;  // several buffers are treated as one
  std::vector<unisono::Extent> out, given;
  unisono::Extent feedback{};  // what encoding has lost; empty: that is not kept

  size_t nbytes() const;
  unisono::Call call(double timeout_s) const;

 private:
  unisono::Call bound(double timeout_s) const;
};

// Keeps the buffers of a call alive: its two sides, and what stood in them where they are lists.
struct Kept {
  nanobind::object out, given, out_items, given_items, feedback = {}, feedback_items = {};

  // A rank that was stopped may write to them later.
  void for_ever() const {
    for (const nanobind::object* one : {&out, &given, &out_items, &given_items, &feedback, &feedback_items})
      if (one->is_valid()) one->inc_ref();
  }
};

// A collective that was started, to be waited for later.
class CollectiveWork {
 public:
  CollectiveWork(nanobind::object planner, nanobind::object engine, nanobind::object name, Kept keep,
                 nanobind::object result, double timeout_s, bool brief)
      : planner_(std::move(planner)),
        engine_(std::move(engine)),
        name_(std::move(name)),
        result_(std::move(result)),
        keep_(std::move(keep)),
        timeout_s_(timeout_s),
        brief_(brief) {}

  // Queues `call`. note: see BoundCall.
  void start(unisono::Call&& call, const nanobind::object& note);
  bool done() const { return engine().done(ticket_); }
  void wait(nanobind::handle timeout);
  nanobind::object exception();
  nanobind::object result();
  nanobind::object text() const;
  nanobind::object described(nanobind::handle self) const;
  // After its end: keeps its buffers for ever if a rank that was stopped may still write to them.
  void let_go() const {
    if (engine().unsettled()) keep_.for_ever();
  }
  bool raised() const { return raised_; }

 private:
  static constexpr uint64_t kNotYet = UINT64_MAX - 1;  // no engine comes to this one before its end

  unisono::Engine& engine() const { return *nanobind::inst_ptr<unisono::Engine>(engine_); }
  int ended(double timeout_s);
  nanobind::object error();

  nanobind::object planner_, engine_, name_, result_;
  Kept keep_;
  nanobind::object code_, note_;  // what `site_` points into
  unisono::CallSite site_;
  uint64_t ticket_ = kNotYet;
  double timeout_s_;
  bool brief_, raised_ = false;
};

// Seconds of a timeout; `otherwise` for None. Anything but a number goes to Python, which says what is wrong.
double seconds(nanobind::handle timeout, double otherwise, nanobind::handle planner);

void bind_works(nanobind::module_& m);
