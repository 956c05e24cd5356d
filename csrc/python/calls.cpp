// The path of every call of a group. A repeated call goes to the engine at once. A new call is first checked
// and planned by one Python function. Blocking, asynchronous and coalesced calls all take this path.
#include "python/calls.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>

#include "python/call_cache.hpp"
#include "python/message_work.hpp"
#include "python/messages.hpp"

namespace nb = nanobind;
using namespace unisono;
using call_cache::CachedCall;
using call_cache::CachedCoalescedCall;
using call_cache::CallKey;

namespace {

constexpr size_t kBriefBytes = 64 * 1024;  // copied and reduced in some microseconds
constexpr size_t kLargeBytes = 1 << 20;    // takes many times as long as waking a thread

// Buffers as Python passes them. They are not converted by nanobind: that takes a tenth of the time of an
// all_gather.
using Extents = nb::typed<nb::list, nb::typed<nb::tuple, Address, size_t>>;

BufferExtent extent(nb::handle pair) {
  PyObject* const both = pair.ptr();
  if (!PyTuple_CheckExact(both) || PyTuple_GET_SIZE(both) != 2)
    throw nb::type_error("expected (address, numel)");
  const size_t address = PyLong_AsSize_t(PyTuple_GET_ITEM(both, 0));
  const size_t numel = PyLong_AsSize_t(PyTuple_GET_ITEM(both, 1));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return {reinterpret_cast<unsigned char*>(address), numel};
}

std::vector<BufferExtent> all(const Extents& extents) {
  std::vector<BufferExtent> list;
  list.reserve(extents.size());
  for (const nb::handle pair : extents) list.push_back(extent(pair));
  return list;
}

// One extent is cut into the program's chunks; several are one chunk each.
ChunkList chunks(const OperationDescriptor& operation, Space space, std::span<const BufferExtent> extents) {
  if (extents.size() > 1) return ChunkList(std::vector<BufferExtent>(extents.begin(), extents.end()));
  const BufferExtent whole = extents.empty() ? BufferExtent{} : extents[0];
  return operation.cut(space, reinterpret_cast<Address>(whole.data), whole.numel);
}

BufferBinding binding(const OperationDescriptor& operation, std::span<const BufferExtent> out,
                      std::span<const BufferExtent> in) {
  if (operation.program->equal_blocks() || out.empty() || in.empty())
    return {chunks(operation, Space::kOut, out), chunks(operation, Space::kIn, in)};
  return {chunks(operation, Space::kOut, out), {}, in[0].data - out[0].data};
}

// Block 0 of every buffer, then block 1 of every buffer, and so on. extents: of `count` buffers, one for
// each, or one for each block of each.
std::vector<BufferExtent> by_block(const std::vector<BufferExtent>& extents, size_t count, size_t blocks,
                                   size_t item) {
  const size_t each = extents.size() / count;
  std::vector<BufferExtent> list;
  list.reserve(count * blocks);
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t i = 0; i < count; ++i) {
      if (each > 1) {
        list.push_back(extents[i * each + block]);
        continue;
      }
      const size_t numel = extents[i].numel / blocks;
      list.push_back({extents[i].data + block * numel * item, numel});
    }
  }
  return list;
}

// The native base class of `unisono.Group`: runs its calls, and remembers those that were checked.
class GroupBase {
 public:
  // context, original: of a duplicate, see `Group.duplicate`.
  GroupBase(nb::object planner, nb::object engine, double timeout_s, int context, nb::object original)
      : planner(std::move(planner)),
        context_(context),
        original_(std::move(original)),
        timeout_s_(timeout_s),
        engine_(std::move(engine)),
        slots_(kSlots) {}

  GroupBase(const GroupBase&) = delete;
  GroupBase& operator=(const GroupBase&) = delete;

  // Runs a collective and returns the caller's result.
  nb::object run(const Arguments& arguments) {
    nb::object result = repeat(arguments);
    if (result.is_valid()) return result;
    const nb::object plan = planner.attr("plan");
    std::array<PyObject*, kAsync + kArguments - kPlain> plan_arguments;  // all but async_op and timeout
    std::copy(arguments.begin(), arguments.begin() + kAsync, plan_arguments.begin());
    std::copy(arguments.begin() + kPlain, arguments.end(), plan_arguments.begin() + kAsync);
    const nb::object bound =
        nb::steal(unisono_call(plan.ptr(), plan_arguments.data(), plan_arguments.size(), nullptr));
    if (!bound.is_valid()) throw nb::python_error();
    if (nb::isinstance<BoundCall>(bound)) remember(arguments, *nb::inst_ptr<BoundCall>(bound));
    return execute(bound, arguments[kAsync], arguments[kTimeout]);
  }

  // Runs a coalesced call.
  nb::object run_coalesced(const Arguments& arguments) {
    nb::object result = repeat_coalesced(arguments);
    if (result.is_valid()) return result;
    const nb::object plan = planner.attr("plan_coalesced");
    const std::array<PyObject*, 8> plan_arguments{
        arguments[kCollective], arguments[kOut],          arguments[kSendbuf], arguments[kOp],
        arguments[kRoot],       arguments[kReproducible], arguments[kCodec],   arguments[kBetweenHosts]};
    const nb::object planned =
        nb::steal(unisono_call(plan.ptr(), plan_arguments.data(), plan_arguments.size(), nullptr));
    if (!planned.is_valid()) throw nb::python_error();
    if (PyList_CheckExact(planned.ptr())) remember_coalesced(arguments, planned);
    return execute(planned, arguments[kAsync], arguments[kTimeout]);
  }

  // Repeats a remembered call. Returns an invalid object, with no effect, if it is not remembered.
  [[gnu::hot]] nb::object repeat(const Arguments& arguments) {
    if (!has_plain_options(arguments)) return {};
    CallBuffers out, in, feedback;
    if (!out.see(arguments[kOut]) || !in.see(arguments[kSendbuf]) || !feedback.see(arguments[kFeedback]))
      return {};
    if (in.number || feedback.number) return {};
    const CallKey options = options_of(arguments);
    // Copied: another thread, or Python code that `seconds` and an allocation run, may put another call into
    // the slot or close the group.
    OperationDescriptor operation;
    size_t numel, made_numel;
    double factor;
    ResultKind returned;
    nb::object note;
    {
      const nb::ft_lock_guard held(lock_);
      const CachedCall* const found = find(options, out, in, feedback);
      if (found == nullptr) return {};
      operation = found->operation;
      numel = found->numel;
      made_numel = found->made_numel;
      factor = found->factor;
      returned = found->returned;
      note = found->note;
    }
    const double timeout_s = seconds(arguments[kTimeout], default_timeout_s(), planner);
    const nb::object alive = engine();
    if (alive.is_none()) return {};  // closed
    struct CallOperand {
      const CallBuffers* buffers;
      nb::handle owner;
    } written{&out, arguments[kOut]}, read{&in, arguments[kSendbuf]};
    CallBuffers made;
    CallResult outcome;
    if (returned > ResultKind::kNumber) {
      if (read.owner.is_none()) read = written;
      outcome.owner = allocated_or_none(read.owner, returned, alive);
      if (!outcome.owner.is_valid() || !made.see(outcome.owner) || made.count != 1 ||
          made.extents[0].numel != made_numel || made.dtype != read.buffers->dtype || made.readonly ||
          !call_cache::disjoint(made, *read.buffers))
        return {};
      written = {&made, outcome.owner};
    } else if (returned == ResultKind::kNumber) {
      outcome = {out.kept(), out.extents[0].data, operation.dtype};
    }
    CollectiveCall call = operation.call(static_cast<int>(options.root), numel, factor, timeout_s,
                                         binding(operation, written.buffers->all(), read.buffers->all()));
    call.coding = operation.coding;
    if (feedback.count > 0) call.coding.feedback = reinterpret_cast<float*>(feedback.extents[0].data);
    const auto keep = [&] {
      return BufferReferences{nb::borrow(written.owner),        nb::borrow(read.owner),
                              written.buffers->kept(),          read.buffers->kept(),
                              nb::borrow(arguments[kFeedback]), feedback.kept(),
                              nb::borrow(arguments[kOp])};
    };
    const size_t nbytes = written.buffers->nbytes() + read.buffers->nbytes();
    return issue(alive, arguments[kCollective], std::move(call), nbytes, std::move(outcome), note, keep,
                 arguments[kAsync] == Py_True, timeout_s);
  }

  // As `repeat`, of a coalesced call.
  nb::object repeat_coalesced(const Arguments& arguments) {
    if (!has_plain_options(arguments)) return {};
    BufferList out, in;
    if (!out.see(arguments[kOut]) || !in.see(arguments[kSendbuf])) return {};
    const CallKey options = options_of(arguments);
    std::vector<BoundCall> calls;
    {
      const nb::ft_lock_guard held(lock_);
      const auto found =
          std::ranges::find_if(lists_, [&](const auto& each) { return each->fits(options, out, in); });
      if (found == lists_.end()) return {};
      std::rotate(lists_.begin(), found, found + 1);  // the front is the last one used
      calls = lists_.front()->calls;                  // copied, as in `repeat`
    }
    const double timeout_s = seconds(arguments[kTimeout], default_timeout_s(), planner);
    const nb::object keep = nb::cast(std::pair(out.kept(), in.kept()));
    const bool async = arguments[kAsync] == Py_True;
    std::vector<nb::object> results;
    for (BoundCall& call : calls) {
      call.keep = keep;
      for (const uint32_t piece : call.pieces) {
        call.out.push_back(out.all()[piece].extent);
        if (!in.all().empty()) call.sendbuf.push_back(in.all()[piece].extent);
      }
      results.push_back(execute_one(call, async, timeout_s));
    }
    return last_of(results, async);
  }

  // Runs or starts a planned call, or several in order. Of several it returns the last one's work.
  nb::object execute(nb::handle planned, nb::handle async, nb::handle timeout) {
    const double timeout_s = seconds(timeout, default_timeout_s(), planner);
    const int later = PyObject_IsTrue(async.ptr());
    if (later < 0) throw nb::python_error();
    if (nb::isinstance<BoundCall>(planned))
      return execute_one(*nb::inst_ptr<BoundCall>(planned), later != 0, timeout_s);
    if (PyCallable_Check(planned.ptr()) != 0) return planned(later != 0, timeout);  // another backend
    std::vector<nb::object> results;
    for (const nb::handle bound : planned)
      results.push_back(execute_one(nb::cast<const BoundCall&>(bound), later != 0, timeout_s));
    return last_of(results, later != 0);
  }

  // Sends (True) or receives (the Status) a message. None: Python has to do it; nothing has happened.
  // `now`: only if the message can be passed at once and has the size of the buffer.
  nb::object pass(PyObject* const* arguments, bool sending, bool now,
                  MessageContents contents = MessageContents::kArray) {
    const nb::object alive = this->engine();
    if (alive.is_none()) return nb::none();
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    MessageCall message{sending, contents, now, default_timeout_s(), context_};
    if (!message.read(arguments, engine)) return nb::none();
    if (now) return message.pass_now(engine) ? message.outcome() : nb::none();
    return message.sent(engine) ? message.outcome() : pass(engine, message, arguments[0]);
  }
  // Begins to send or to receive; the work. None as above, also where the memory is in use.
  // A receive of bytes has in place of a buffer what makes its result of them, or None.
  nb::object begin(PyObject* const* arguments, bool sending, bool exact,
                   MessageContents contents = MessageContents::kArray) {
    static InternedName isend{"isend"}, irecv{"irecv"};
    const nb::object alive = this->engine();
    if (alive.is_none()) return nb::none();
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    MessageCall message{sending, contents, exact, default_timeout_s(), context_};
    if (!message.read(arguments, engine)) return nb::none();
    MessageName name{nb::borrow((sending ? isend : irecv).get()), message.tag()};
    if (message.sent(engine)) return make_message_work(planner, alive, std::move(name));
    nb::object made = make_message_work(planner, alive, std::move(name), message.request(),
                                        BufferReferences{nb::borrow(arguments[0]), {}, message.kept(), {}},
                                        message.timeout_s);
    NativeMessageWork& work = *nb::inst_ptr<NativeMessageWork>(made);
    if (contents != MessageContents::kArray && arguments[0] != Py_None)
      work.set_decode(nb::borrow(arguments[0]));
    work.outlive_call();
    if (!work.post(true)) return nb::none();
    if (!work.ended()) work.detach();
    return made;
  }
  // The `Status` of the message that a receive would get, if it has come or comes within a moment; or None.
  nb::object peek(PyObject* const* arguments) {
    const nb::object alive = this->engine();
    if (alive.is_none()) return nb::none();
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    MessageCall message{false, MessageContents::kBytes, false, default_timeout_s(), context_, "probe"};
    return message.read(arguments, engine) ? message.peeked(engine) : nb::none();
  }
  // Sends a message and receives one; None as above, also where both share memory and Python has to copy what
  // is sent. Small messages are copied anyway. Arguments: x, dst, tag, timeout, out, src.
  nb::object send_and_receive(PyObject* const* arguments) {
    const nb::object alive = this->engine();
    if (alive.is_none()) return nb::none();
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    engine.check_process();  // before a lock that another thread may have held at the fork
    PyObject* const source[] = {arguments[4], arguments[5], arguments[2], arguments[3]};
    MessageCall sent{true, MessageContents::kArray, true, default_timeout_s(), context_};
    MessageCall received{false, MessageContents::kArray, false, default_timeout_s(), context_, "sendrecv"};
    if (!received.read(source, engine) || !sent.read(arguments, engine)) return nb::none();
    if (!received.unshared(engine)) return nb::none();
    const auto keep = [&] {
      return BufferReferences{nb::borrow(arguments[4]), nb::borrow(arguments[0]), received.kept(),
                              sent.kept()};
    };
    if (!sent.pass_now(engine)) {
      if (sent.shares_memory(received) || !sent.unshared(engine)) return nb::none();
      return pass(engine, received, keep,
                  [&](ReleasableLock& held) { return received.exchange(sent, engine, held); });
    }
    nb::object status =
        pass(engine, received, keep, [&](ReleasableLock& held) { return received.pass(engine, held); });
    if (status.is_none())
      throw nb::value_error(
          "sendrecv: x was sent, but another thread of this rank has begun to receive into the memory of "
          "out; give "
          "each thread a buffer of its own");
    return status;
  }

  // The caller has seen that the receives of `_recv_now` have ended.
  nb::object see_received() {
    const nb::object alive = this->engine();
    if (!alive.is_none()) nb::inst_ptr<Engine>(alive)->channels().receive_buffers().see_ended();
    return nb::none();
  }

  // Forgets all remembered calls, after a change that affects how calls are planned.
  void forget(double timeout_s) {
    timeout_s_.store(timeout_s, std::memory_order_relaxed);
    drop_cached_calls();
  }
  void close() {
    drop_cached_calls();
    nb::object engine = nb::none();
    const nb::ft_lock_guard held(lock_);
    std::swap(engine_, engine);
  }
  // For the garbage collector: a remembered option, such as the caller's own algorithm, may refer to the
  // group. It takes no lock: a free-threaded Python has stopped all threads, and stops none that holds it.
  int visit(visitproc visit, void* arg) {
    Py_VISIT(planner.ptr());
    Py_VISIT(original_.ptr());
    for (const CachedCall& known : slots_)
      for (const nb::object& word : known.kept) Py_VISIT(word.ptr());
    for (const auto& list : lists_)
      for (const nb::object& word : list->kept) Py_VISIT(word.ptr());
    return 0;
  }
  void clear() {
    planner = nb::none();
    drop_cached_calls();
  }
  // Asynchronous collectives that are not known to have ended.
  nb::typed<nb::list, CollectiveWork> works() const {
    nb::typed<nb::list, CollectiveWork> list;
    for (const nb::object& work : copied_works()) list.append(work);
    return list;
  }
  // Releases these works. Call when no thread moves bytes of their buffers any more.
  void release() {
    const std::deque<nb::object> works = take_works();
    for (const nb::object& work : works) nb::inst_ptr<CollectiveWork>(work)->retain_buffers();
  }

  nb::object planner;

 private:
  // Forgets all remembered calls. Their end may run Python code, which must not run with the lock held.
  void drop_cached_calls() {
    std::vector<CachedCall> slots(kSlots);
    CachedCoalescedCalls lists;
    const nb::ft_lock_guard held(lock_);
    keys_ = {};
    std::swap(slots_, slots);
    std::swap(lists_, lists);
  }
  // Keeps the engine alive if another thread closes the group. None: it was closed.
  nb::object engine() const {
    const nb::ft_lock_guard held(lock_);
    return engine_;
  }
  double default_timeout_s() const { return timeout_s_.load(std::memory_order_relaxed); }
  std::deque<nb::object> copied_works() const {
    const nb::ft_lock_guard held(lock_);
    return works_;
  }
  std::deque<nb::object> take_works() {
    const nb::ft_lock_guard held(lock_);
    return std::exchange(works_, {});
  }

  // Invalid also where the array cannot be allocated: Python then raises the error.
  static nb::object allocated_or_none(nb::handle input, ResultKind shape, const nb::object& engine) {
    try {
      return allocated(input, shape, nb::inst_ptr<Engine>(engine)->size());
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
      return {};
    }
  }

  // Whether the root and `async_op` are what a remembered call has.
  static bool has_plain_options(const Arguments& arguments) {
    return PyLong_CheckExact(arguments[kRoot]) &&
           (arguments[kAsync] == Py_False || arguments[kAsync] == Py_True);
  }

  // Passes a message that has been read, of this buffer.
  nb::object pass(Engine& engine, MessageCall& message, PyObject* buffer) {
    const auto keep = [&] { return BufferReferences{nb::borrow(buffer), {}, message.kept(), {}}; };
    return pass(engine, message, keep, [&](ReleasableLock& held) { return message.pass(engine, held); });
  }
  template <class Keep, class Wait>
  nb::object pass(Engine& engine, MessageCall& message, Keep keep, Wait wait) {
    int fault;
    try {
      fault = waiting(engine, true, wait);
    } catch (...) {
      if (engine.has_open_transfers()) keep().leak();
      throw;
    }
    if (fault != 0) fail(engine, keep(), message.name(), message.timeout_s, nb::none());
    return message.refused() ? nb::none() : message.outcome();
  }

  // The last work keeps the buffers of all: calls end in order.
  static nb::object last_of(const std::vector<nb::object>& results, bool async) {
    if (async)
      for (size_t i = 0; i + 1 < results.size(); ++i) nb::inst_ptr<CollectiveWork>(results[i])->hand_over();
    return results.empty() ? nb::none() : results.back();
  }

  nb::object execute_one(const BoundCall& bound, bool async, double timeout_s) {
    nb::object alive = engine();
    if (alive.is_none()) alive = property_of(planner, "engine");  // raises once the group was closed
    const auto keep = [&] { return BufferReferences{bound.keep, {}, {}, {}}; };
    return issue(alive, bound.name, bound.call(timeout_s), bound.nbytes(), bound.outcome(), bound.note, keep,
                 async, timeout_s);
  }

  template <class Keep>
  nb::object issue(const nb::object& alive, nb::handle name, CollectiveCall&& made, size_t nbytes,
                   CallResult outcome, const nb::object& note, Keep keep, bool async, double timeout_s) {
    const bool brief = nbytes <= kBriefBytes;
    Engine& engine = *nb::inst_ptr<Engine>(alive);
    (original_.is_none() ? *this : *nb::inst_ptr<GroupBase>(original_)).release_ended();
    if (async) {
      BufferReferences kept = keep();
      kept.hold_storages();
      made.large = nbytes >= kLargeBytes;
      const nb::object handed = nb::inst_alloc(work_type_);  // the work lies in it: one allocation
      auto* const work = nb::inst_ptr<CollectiveWork>(handed);
      new (work) CollectiveWork(planner, alive, nb::borrow(name), std::move(kept), std::move(outcome),
                                timeout_s, brief);
      nb::inst_mark_ready(handed);
      keep_work(handed);
      work->start(std::move(made), note);
      return handed;
    }
    int fault;
    try {
      fault =
          waiting(engine, brief, [&](ReleasableLock& held) { return engine.run(std::move(made), &held); });
    } catch (...) {
      if (engine.has_open_transfers()) keep().leak();
      throw;
    }
    if (fault != 0) fail(engine, keep(), name, timeout_s, note);
    outcome.write_back();
    return outcome.value();
  }

  // Lets the works at the front go that have ended, waited for or not.
  [[gnu::always_inline]] void release_ended() {
    for (nb::object ended = ended_work(); ended.is_valid(); ended = ended_work())
      nb::inst_ptr<CollectiveWork>(ended)->retain_buffers();
  }
  // Takes the work at the front if it has ended; otherwise invalid.
  [[gnu::always_inline]] nb::object ended_work() {
    const nb::ft_lock_guard held(lock_);
    if (works_.empty() || !nb::inst_ptr<CollectiveWork>(works_.front())->done()) return {};
    nb::object ended = std::move(works_.front());
    works_.pop_front();
    return ended;
  }
  // A duplicate may be closed while its works are under way: the original keeps them.
  void keep_work(const nb::object& work) {
    if (!original_.is_none()) return nb::inst_ptr<GroupBase>(original_)->keep_work(work);
    const nb::ft_lock_guard held(lock_);
    works_.push_back(work);
  }

  // Raises the error. A stopped rank may write to the buffers later: then they are never freed.
  [[noreturn]] void fail(const Engine& engine, BufferReferences&& buffers, nb::handle name, double timeout_s,
                         const nb::object& note) {
    if (engine.has_open_transfers()) buffers.leak();
    call_python(planner.attr("fail"), name, timeout_s, note);
    throw std::logic_error("an operation failed, and no error was raised");
  }

  static CallKey options_of(const Arguments& arguments) {
    int overflow = 0;
    const int64_t root = PyLong_AsLongLongAndOverflow(arguments[kRoot], &overflow);
    return {arguments[kCollective], arguments[kOp],
            arguments[kAlgorithm],  arguments[kReproducible],
            arguments[kCodec],      arguments[kBetweenHosts],
            arguments[kMaxError],   overflow != 0 ? INT64_MIN : root};
  }

  void remember(const Arguments& arguments, const BoundCall& bound) {
    CallBuffers out, in;
    if (!has_plain_options(arguments) || !out.see(arguments[kOut]) || !in.see(arguments[kSendbuf])) return;
    const bool allocates = bound.returned > ResultKind::kNumber;
    if (allocates && (bound.operation.checks_out || bound.operation.checks_in))
      return;  // see `CachedCall::codes`
    if (bound.returned == ResultKind::kScalar || (bound.returned == ResultKind::kNumber && !out.number) ||
        (allocates && out.number))
      return;
    // The buffers may have changed since they were checked, if the caller has other threads.
    const CallBuffers& read = allocates && in.count == 0 ? out : in;
    if (!call_cache::same_buffers(bound.sendbuf, read) ||
        !(allocates || out.number || call_cache::same_buffers(bound.out, out)))
      return;
    const CallKey options = options_of(arguments);
    CachedCall known;
    known.kept = options.owned();
    known.options = options;
    known.out_dtype = out.dtype;
    known.given_dtype = in.dtype;
    for (const BufferExtent& extent : out.all()) known.out_numel.push_back(extent.numel);
    for (const BufferExtent& extent : in.all()) known.given_numel.push_back(extent.numel);
    known.feedback_numel = bound.feedback.numel;
    known.set_distances(out, in);
    known.number = out.number;
    known.out_several = out.several;
    known.given_several = in.several;
    known.returned = bound.returned;
    known.writes = bound.writes && !allocates;
    if (allocates) known.made_numel = bound.out.front().numel;
    known.operation = bound.operation;
    known.numel = bound.numel;
    known.factor = bound.factor;
    known.note = bound.note;
    const uint64_t key = key_of(options, out, in);
    size_t slot = key % kSlots;
    const nb::ft_lock_guard held(lock_);
    for (size_t next = 0; next < kPlaces; ++next)
      if (const size_t other = (key + next) % kSlots; keys_[other] == 0) {
        slot = other;
        break;
      }
    keys_[slot] = key;
    // Swap: destroying the old entry may run Python code. By then the slot is complete, and the lock free.
    std::swap(slots_[slot], known);
  }

  void remember_coalesced(const Arguments& arguments, nb::handle planned) {
    BufferList out, in;
    if (!has_plain_options(arguments) || !out.see(arguments[kOut]) || !in.see(arguments[kSendbuf])) return;
    auto known = std::make_unique<CachedCoalescedCall>();
    for (const nb::handle one : planned) {
      known->calls.push_back(nb::cast<const BoundCall&>(one));
      BoundCall& call = known->calls.back();
      // Codes that refuse values are checked in each call. The lists may have changed since they were
      // checked.
      if (call.operation.checks_out || call.operation.checks_in ||
          !call_cache::same_buffers(call.out, out, call.pieces) ||
          !call_cache::same_buffers(call.sendbuf, in, call.pieces))
        return;
      call.keep = nb::none();
      call.out.clear();
      call.sendbuf.clear();
    }
    known->options = options_of(arguments);
    known->kept = known->options.owned();
    for (const BufferList::TypedExtent& one : out.all()) known->out.push_back({one.dtype, one.extent.numel});
    for (const BufferList::TypedExtent& one : in.all()) known->given.push_back({one.dtype, one.extent.numel});
    known->distances = CachedCoalescedCall::distances_of(out, in);
    std::unique_ptr<CachedCoalescedCall> dropped;  // its end may run Python code: after the lock is free
    const nb::ft_lock_guard held(lock_);
    const auto same = std::ranges::find_if(
        lists_, [&](const auto& each) { return each->same_call(known->options, out, in); });
    if (same != lists_.end()) {
      std::swap(*same, known);
      return;
    }
    lists_.push_front(std::move(known));
    if (lists_.size() <= kLists) return;
    dropped = std::move(lists_.back());
    lists_.pop_back();
  }

  const CachedCall* find(const CallKey& options, const CallBuffers& out, const CallBuffers& in,
                         const CallBuffers& feedback) const {
    const uint64_t key = key_of(options, out, in);
    for (size_t next = 0; next < kPlaces; ++next) {
      const size_t slot = (key + next) % kSlots;
      if (keys_[slot] == key && slots_[slot].fits(options, out, in, feedback)) return &slots_[slot];
    }
    return nullptr;
  }

  // Calls with different keys differ. Never 0.
  static uint64_t key_of(const CallKey& options, const CallBuffers& out, const CallBuffers& given) {
    uint64_t mixed = reinterpret_cast<uintptr_t>(options.collective) >> 4;
    const auto mix = [&](uint64_t value) { mixed = (mixed ^ value) * 0x9e3779b97f4a7c15ULL; };
    mix(reinterpret_cast<uintptr_t>(options.op) >> 4 ^ reinterpret_cast<uintptr_t>(options.codec) << 8 ^
        static_cast<uint64_t>(options.root) << 40);
    mix(static_cast<uint64_t>(out.dtype + 1) << 48 ^ static_cast<uint64_t>(given.dtype + 1) << 56 ^
        (out.count > 0 ? out.extents[0].numel : 0));
    mix(given.count > 0 ? given.extents[0].numel : 0);
    return mixed >> 32 | uint64_t{1} << 32;
  }

  static constexpr size_t kSlots = 128;
  static constexpr size_t kPlaces = 8;  // so many calls may want one slot before one has to be checked again
  static constexpr size_t kLists = 16;  // coalesced calls that are remembered
  const nb::handle work_type_ = nb::type<CollectiveWork>();
  const int context_;
  const nb::object original_;
  std::atomic<double> timeout_s_;
  mutable nb::ft_mutex lock_;  // of all that follows; no Python code runs under it
  nb::object engine_;
  std::array<uint64_t, kSlots> keys_{};  // of the calls in `slots_`; 0: the slot is free
  std::vector<CachedCall> slots_;
  using CachedCoalescedCalls = std::deque<std::unique_ptr<CachedCoalescedCall>>;
  CachedCoalescedCalls lists_;
  std::deque<nb::object> works_;
};

// ---- methods in CPython's own calling convention ---------------------------------------------------
// nanobind's conversions would take a tenth of the time of a barrier.

using Body = nb::object (*)(GroupBase&, PyObject* const*);
template <size_t kCount, Body kBody>
PyObject* called(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(kCount)) {
    PyErr_Format(PyExc_TypeError, "takes %zu arguments", kCount);
    return nullptr;
  }
  if (!nb::inst_ready(self)) {
    PyErr_SetString(PyExc_RuntimeError, "this group was never made");
    return nullptr;
  }
  return guarded([&] { return kBody(*nb::inst_ptr<GroupBase>(self), arguments); });
}

nb::object send(GroupBase& calls, PyObject* const* arguments) { return calls.pass(arguments, true, false); }
nb::object receive(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, false, false);
}
nb::object send_object(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, true, false, MessageContents::kObject);
}
nb::object receive_object(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, false, false, MessageContents::kObject);
}
nb::object receive_bytes(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, false, false, MessageContents::kBytes);
}
nb::object begin_send(GroupBase& calls, PyObject* const* arguments) {
  return calls.begin(arguments, true, false);
}
nb::object begin_receive(GroupBase& calls, PyObject* const* arguments) {
  return calls.begin(arguments, false, false);
}
nb::object begin_bytes_receive(GroupBase& calls, PyObject* const* arguments) {
  return calls.begin(arguments, false, false, MessageContents::kBytes);
}
nb::object begin_whole_receive(GroupBase& calls, PyObject* const* arguments) {
  return calls.begin(arguments, false, true);
}
nb::object peek(GroupBase& calls, PyObject* const* arguments) { return calls.peek(arguments); }
nb::object send_now(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, true, true);
}
nb::object receive_now(GroupBase& calls, PyObject* const* arguments) {
  return calls.pass(arguments, false, true);
}
nb::object send_and_receive(GroupBase& calls, PyObject* const* arguments) {
  return calls.send_and_receive(arguments);
}
nb::object see_received(GroupBase& calls, PyObject* const*) { return calls.see_received(); }
Arguments all_of(PyObject* const* given) {
  Arguments arguments;
  arguments.fill(Py_None);
  std::copy_n(given, kPlain, arguments.begin());
  return arguments;
}
nb::object run(GroupBase& calls, PyObject* const* arguments) { return calls.run(all_of(arguments)); }
nb::object repeat(GroupBase& calls, PyObject* const* arguments) {
  nb::object result = calls.repeat(all_of(arguments));
  return result.is_valid() ? result : nb::borrow(Py_NotImplemented);
}

template <size_t kCount, Body kBody>
PyMethodDef method(const char* name, const char* what) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(called<kCount, kBody>)),
          METH_FASTCALL, what};
}

PyMethodDef kMethods[] = {
    method<kPlain, run>("_call",
                        "Runs a call of any kind: (kind, out, sendbuf, op, root, algorithm, reproducible, "
                        "async_op, timeout)."),
    method<kPlain, repeat>("_repeat", "As `_call`, for a remembered call; NotImplemented: it is not one."),
    method<4, send>("_send", "Sends (x, peer, tag, timeout); True, or None: Python has to do it."),
    method<4, receive>("_recv", "Receives (x, peer, tag, timeout); its `Status`, or None as above."),
    method<4, send_object>("_send_object", "As `_send`, the bytes of an object."),
    method<4, receive_object>("_recv_object",
                              "As `_recv`, with None for x: the bytes of an object, and its `Status`."),
    method<4, receive_bytes>("_recv_bytes",
                             "As `_recv`, with None for x: the bytes of any message, and its `Status`."),
    method<4, begin_send>("_isend", "As `_send`, but begins to; the work."),
    method<4, begin_receive>("_irecv", "As `_recv`, but begins to; the work."),
    method<4, begin_bytes_receive>(
        "_irecv_bytes", "As `_irecv`, of any message; x: makes the work's result of its bytes, or None."),
    method<4, begin_whole_receive>("_irecv_all", "As `_irecv`; a message has to fill x."),
    method<4, peek>(
        "_peek",
        "Of (None, peer, tag, None): the `Status` of the message that a receive would get, or None: "
        "Python has to look."),
    method<4, send_now>("_send_now", "As `_send`; None also if it cannot be sent at once."),
    method<4, receive_now>("_recv_now", "As `_recv`; None also if it has not arrived, or is shorter."),
    method<6, send_and_receive>(
        "_sendrecv",
        "Sends and receives (x, dst, tag, timeout, out, src); the `Status`, or None: Python "
        "has to do it."),
    method<0, see_received>("_see_received", "The caller knows that the receives of `_recv_now` have ended."),
};

int traverse_calls(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return nb::inst_ready(self) ? nb::inst_ptr<GroupBase>(self)->visit(visit, arg) : 0;
}

int clear_calls(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<GroupBase>(self)->clear();
  return 0;
}

PyType_Slot kCollected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_calls)},
                            {Py_tp_clear, reinterpret_cast<void*>(clear_calls)},
                            {0, nullptr}};

}  // namespace

size_t BoundCall::nbytes() const {
  size_t numel = 0;
  for (const std::vector<BufferExtent>* side : {&out, &sendbuf})
    for (const BufferExtent& extent : *side) numel += extent.numel;
  return numel * itemsize(operation.dtype);
}

CollectiveCall BoundCall::call(double timeout_s) const {
  CollectiveCall made = bound(timeout_s);
  made.coding = operation.coding;
  if (feedback.numel > 0) made.coding.feedback = reinterpret_cast<float*>(feedback.data);
  return made;
}

CallResult BoundCall::outcome() const {
  const bool number = returned == ResultKind::kNumber;
  return {made, number ? out.front().data : nullptr, operation.dtype, returned == ResultKind::kScalar,
          unpack};
}

CollectiveCall BoundCall::bound(double timeout_s) const {
  if (pieces.size() <= 1)
    return operation.call(root, numel, factor, timeout_s, binding(operation, out, sendbuf));
  const size_t item = itemsize(operation.dtype);
  auto packed = std::make_shared<CoalescedBuffers>();
  packed->out = BufferPacker(by_block(out, pieces.size(), blocks.first, item), item);
  packed->in = BufferPacker(by_block(sendbuf, pieces.size(), blocks.second, item), item);
  const auto cut = [&](Space space, const BufferPacker& side) {
    return operation.cut(space, reinterpret_cast<Address>(side.data()), side.numel());
  };
  CollectiveCall made = operation.call(root, numel, factor, timeout_s,
                                       {cut(Space::kOut, packed->out), cut(Space::kIn, packed->in)});
  made.packed = std::move(packed);
  return made;
}

nb::object run_call(nb::handle group, const Arguments& arguments, bool coalesced) {
  GroupBase& calls = *nb::inst_ptr<GroupBase>(group);
  return coalesced ? calls.run_coalesced(arguments) : calls.run(arguments);
}

namespace {

void bind_bound_call(nb::module_& m) {
  nb::class_<OperationDescriptor>(m, "OperationDescriptor",
                                  "A loaded plan with its element type and reduction.");
  nb::class_<BoundCall>(m, "BoundCall", "A call that was checked and planned, bound to its buffers.")
      .def(
          "__init__",
          [](BoundCall* self, nb::str name, const OperationDescriptor& operation, int root, size_t numel,
             double factor, const Extents& out, const Extents& sendbuf, nb::object keep, bool writes,
             std::vector<uint32_t> pieces, std::pair<uint32_t, uint32_t> blocks, nb::object made,
             ResultKind returned, nb::object note, Address feedback, size_t feedback_numel,
             nb::object unpack) {
            if (returned != ResultKind::kNothing && out.size() != 1)
              throw std::invalid_argument("a call that returns something has one output");
            new (self) BoundCall{std::move(name),
                                 std::move(keep),
                                 std::move(note),
                                 operation,
                                 root,
                                 numel,
                                 factor,
                                 writes,
                                 all(out),
                                 all(sendbuf),
                                 std::move(pieces),
                                 blocks,
                                 returned,
                                 std::move(made),
                                 {reinterpret_cast<unsigned char*>(feedback), feedback_numel},
                                 unpack.is_none() ? nb::object() : std::move(unpack)};
          },
          nb::arg("name"), nb::arg("operation"), nb::arg("root"), nb::arg("numel"), nb::arg("factor"),
          nb::arg("out"), nb::arg("sendbuf"), nb::arg("keep").none(), nb::arg("writes") = true,
          nb::arg("pieces") = std::vector<uint32_t>(),
          nb::arg("blocks") = std::pair<uint32_t, uint32_t>(1, 0), nb::arg("made").none() = nb::none(),
          nb::arg("returned") = ResultKind::kNothing, nb::arg("note").none() = nb::none(),
          nb::arg("feedback") = 0, nb::arg("feedback_numel") = 0, nb::arg("unpack").none() = nb::none(),
          nb::keep_alive<1, 3>(),
          "out, sendbuf: (address, numel) of one buffer, or of one for each chunk. numel: must be equal on "
          "all "
          "ranks; 0 where they may differ. pieces: the places of the buffers in the lists of a coalesced "
          "call; several are packed into one, where `blocks` says how many blocks an output and an input "
          "have. made, returned: the call's result. note: a text that a Mismatch shows beside the "
          "source line. unpack: is called after the call, see `strided`.");
}

}  // namespace

void bind_calls(nb::module_& m) {
  nb::enum_<ResultKind>(m, "ResultKind", "What a call returns.")
      .value("NOTHING", ResultKind::kNothing)
      .value("SCALAR", ResultKind::kScalar, "The call was given a NumPy scalar.")
      .value("NUMBER", ResultKind::kNumber, "The call was given a number.")
      .value("GATHERED", ResultKind::kGathered, "An allocated array: [p, *shape of the input].")
      .value("SAME", ResultKind::kSame, "An allocated array of the input's shape.")
      .value("BLOCK", ResultKind::kBlock,
             "An allocated array, of the shape of one of p blocks of the input.");
  m.def(
      "allocated",
      [](nb::handle input, ResultKind shape, int size) {
        nb::object made = allocated(input, shape, size);
        if (!made.is_valid()) throw nb::value_error("the input cannot be cut into that many blocks");
        return made;
      },
      nb::arg("input"), nb::arg("shape"), nb::arg("size"),
      nb::sig("def allocated(input: typing.Any, shape: ResultKind, size: int) -> typing.Any"),
      "The array for the result of a call with this input.");
  bind_bound_call(m);
  nb::class_<GroupBase> calls(m, "GroupBase", nb::type_slots(kCollected),
                              "The calls of a group: runs them, and remembers those that were checked.");
  calls
      .def(nb::init<nb::object, nb::object, double, int, nb::object>(), nb::arg("planner"),
           nb::arg("engine").none(), nb::arg("timeout_s"), nb::arg("context") = 0,
           nb::arg("original").none() = nb::none(),
           "context: of the messages of a duplicate; original: the group of which it is one.")
      .def("_execute", &GroupBase::execute, nb::arg("planned"), nb::arg("async_op"),
           nb::arg("timeout").none(),
           "Runs or starts a `BoundCall`, or several; returns the work, or the result.")
      .def("_forget", &GroupBase::forget, nb::arg("timeout_s"),
           "Forgets all calls; sets the group's timeout.")
      .def("_close", &GroupBase::close, "Drops the reference to the engine.")
      .def("_release", &GroupBase::release, "Releases the works. Call when no thread runs them any more.")
      .def_prop_ro("_works", &GroupBase::works, "Works that are not known to have ended.");
  for (PyMethodDef& each : kMethods) {
    const nb::object made = nb::steal(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(calls.ptr()), &each));
    if (!made.is_valid()) throw nb::python_error();
    calls.attr(each.ml_name) = made;
  }
  bind_methods(m, calls);
  bind_works(m);
}
