// A call of a group in the bindings: as its arguments, or bound to its buffers.
#pragma once

#include <array>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python/buffers.hpp"
#include "python/storages.hpp"

// The arguments of any collective, in this order. A collective without one of them has a default there.
enum ArgumentIndex : uint8_t {
  kCollective,
  kOut,
  kSendbuf,
  kOp,
  kRoot,
  kAlgorithm,
  kReproducible,
  kAsync,
  kTimeout,
  kPlain,  // the number of arguments of a call without a codec
  kCodec = kPlain,
  kBetweenHosts,
  kFeedback,
  kMaxError,
  kArguments
};
using Arguments = std::array<PyObject*, kArguments>;

// What a call returns apart from None.
enum class ResultKind : uint8_t {
  kNothing,
  kScalar,    // the call was given a NumPy scalar
  kNumber,    // the call was given a number
  kGathered,  // an allocated array: [p, *shape of the input]
  kSame,      // of the input's shape
  kBlock,     // of the shape of one of p blocks of the input
};

// The array for the result of a call with this input. Invalid: the input cannot be cut into `size` blocks.
nanobind::object allocated(nanobind::handle input, ResultKind shape, int size);

// The result of a call: an array that it has allocated, or a number.
struct CallResult {
  nanobind::object owner = {};            // the array, or what holds the number; invalid: None
  const unsigned char* number = nullptr;  // where it lies
  unisono::DType dtype{};
  bool scalar = false;           // the array's only element
  nanobind::object unpack = {};  // writes packed outputs back, once; invalid: there are none

  void write_back() const {
    if (unpack.is_valid()) call_python(unpack);
  }
  nanobind::object value() const {
    if (number != nullptr) return load_number(dtype, number);
    if (scalar) return nanobind::object(owner[0]);
    return owner.is_valid() ? owner : nanobind::none();
  }
};

// A checked and planned call: the operation for the engine, and the objects that must stay alive meanwhile.
struct BoundCall {
  nanobind::object name, keep;  // keep: the buffers
  nanobind::object note;        // None, or a text that a Mismatch shows beside the source line
  OperationDescriptor operation;
  int root;
  size_t numel;  // must be equal on all ranks; 0 where they may differ
  double factor;
  bool writes;  // the call writes the first side
  std::vector<unisono::BufferExtent> out, sendbuf;
  // Of a coalesced call: which of its buffers. Several are packed into one, block by block.
  std::vector<uint32_t> pieces;
  std::pair<uint32_t, uint32_t> blocks{1, 0};  // how many blocks the output and the input have
  ResultKind returned = ResultKind::kNothing;
  nanobind::object made = {};        // the allocated array, or an array that holds the number
  unisono::BufferExtent feedback{};  // the accumulated encoding error; empty: it is dropped
  nanobind::object unpack = {};      // see `CallResult`

  size_t nbytes() const;
  CallResult outcome() const;
  unisono::CollectiveCall call(double timeout_s) const;

 private:
  unisono::CollectiveCall bound(double timeout_s) const;
};

// Keeps the buffers of a call alive: its two sides, and their items where they are lists.
struct BufferReferences {
  nanobind::object out, sendbuf, out_items, sendbuf_items, feedback = {}, feedback_items = {};
  nanobind::object op = {};  // of a repeated call: its function
  StorageHold hold = {};     // of an asynchronous call

  // Never frees them: a stopped rank may write to them later.
  void leak() {
    for (const nanobind::object* one :
         {&out, &sendbuf, &out_items, &sendbuf_items, &feedback, &feedback_items})
      if (one->is_valid()) one->inc_ref();
    hold.leak();
  }
  void hold_storages() { hold = StorageHold({out, sendbuf, out_items, sendbuf_items, feedback}); }
};

// An asynchronous collective.
class CollectiveWork {
 public:
  CollectiveWork(nanobind::object planner, nanobind::object engine, nanobind::object name,
                 BufferReferences keep, CallResult result, double timeout_s, bool brief)
      : planner_(std::move(planner)),
        engine_(std::move(engine)),
        name_(std::move(name)),
        result_(std::move(result)),
        keep_(std::move(keep)),
        timeout_s_(timeout_s),
        brief_(brief) {}

  // Queues `call`. note: see BoundCall.
  void start(unisono::CollectiveCall&& call, const nanobind::object& note);
  bool done() const { return engine().done(ticket_.load(std::memory_order_acquire)); }
  // As `done`; when it is, its buffers are the caller's again.
  bool seen_done();
  void wait(nanobind::handle timeout);
  nanobind::object exception();
  nanobind::object result();
  nanobind::object text() const;
  nanobind::object described(nanobind::handle self) const;
  // After its end: never frees its buffers if a stopped rank may still write to them.
  void retain_buffers() {
    write_back();
    BufferReferences kept = taken();
    if (engine().has_open_transfers()) kept.leak();
  }
  // Releases its buffers, which a later work of the same call keeps alive.
  void hand_over() { taken(); }
  bool raised() const { return raised_.load(std::memory_order_relaxed); }
  // Its number among the group's collectives, from 1: the same on every rank.
  uint64_t number() const { return number_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kNotYet = UINT64_MAX - 1;  // a ticket that no engine reaches

  unisono::Engine& engine() const { return *nanobind::inst_ptr<unisono::Engine>(engine_); }
  int ended(double timeout_s);
  // Writes packed outputs back, if it has ended without an error.
  void write_back();
  nanobind::object error();
  // Its buffers. Whoever asks first gets them, and frees them outside the lock: that may run Python code.
  BufferReferences taken() {
    const nanobind::ft_lock_guard held(lock_);
    return std::exchange(keep_, {});
  }

  nanobind::object planner_, engine_, name_;
  CallResult result_;
  nanobind::ft_mutex lock_;
  BufferReferences keep_;         // guarded by lock_
  nanobind::object code_, note_;  // keep alive what `site_` points to
  unisono::CallSite site_;
  // Other threads may ask a work whether it is done before `start` has queued it.
  std::atomic<uint64_t> ticket_ = kNotYet, number_ = 0;
  double timeout_s_;
  bool brief_;
  std::atomic<bool> raised_ = false;
};

// The line of the innermost frame that is neither Unisono's nor PyTorch's. `code` keeps alive what it points
// to.
unisono::CallSite caller_site(nanobind::object& code);

// Raises the ValueError of a message whose memory a receive under way writes to.
[[noreturn]] void refuse_memory(const nanobind::object& operation);

// Seconds of a timeout; `otherwise` for None. Python converts or refuses everything but a positive float.
double seconds(nanobind::handle timeout, double otherwise, nanobind::handle planner);

// Runs a call of any kind on a group.
nanobind::object run_call(nanobind::handle group, const Arguments& arguments, bool coalesced);

// Calls `body`, and turns its exceptions into Python's.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return nanobind::object(body()).release().ptr();
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (nanobind::builtin_exception& error) {
    PyErr_SetString(error.type() == nanobind::exception_type::type_error ? PyExc_TypeError : PyExc_ValueError,
                    error.what());
  } catch (const std::system_error& error) {
    set_limit_error(error);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void bind_methods(nanobind::module_& m, const nanobind::object& calls);
void bind_works(nanobind::module_& m);
