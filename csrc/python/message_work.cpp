// Python's sends and receives under way.
#include "python/message_work.hpp"

#include <limits>

#include "python/messages.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr size_t kFewDropped = 16;

[[noreturn]] void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace

void DroppedMessages::add(std::shared_ptr<Request> request, BufferReferences&& buffers) {
  std::vector<DroppedMessage> ended;  // freed after the lock: that may run Python code
  const nb::ft_lock_guard held(lock_);
  if (messages_.size() >= 2 * open_ + kFewDropped) {
    const auto first = std::partition(messages_.begin(), messages_.end(),
                                      [](const DroppedMessage& one) { return !one.request->done.load(); });
    std::move(first, messages_.end(), std::back_inserter(ended));
    messages_.erase(first, messages_.end());
    open_ = messages_.size();
  }
  messages_.push_back({std::move(request), std::move(buffers)});
}

void DroppedMessages::close(bool leak) {
  std::vector<DroppedMessage> ended;
  {
    const nb::ft_lock_guard held(lock_);
    std::swap(ended, messages_);
  }
  if (leak)
    for (DroppedMessage& one : ended) one.buffers.leak();
}

NativeMessageWork::NativeMessageWork(nb::object planner, nb::object engine, MessageName name,
                                     std::shared_ptr<Request> request, BufferReferences keep,
                                     double timeout_s)
    : planner_(std::move(planner)),
      engine_(std::move(engine)),
      name_(std::move(name)),
      request_(std::move(request)),
      keep_(std::move(keep)),
      timeout_s_(timeout_s),
      capacity_(request_->nbytes) {}

NativeMessageWork::NativeMessageWork(nb::object planner, nb::object engine, MessageName name)
    : planner_(std::move(planner)), engine_(std::move(engine)), name_(std::move(name)), begun_(true) {}

NativeMessageWork::~NativeMessageWork() {
  if (!request_ || !begun_) return;
  Channels& channels = engine().channels();
  if (request_->done.load(std::memory_order_acquire)) {
    channels.see(*request_);
    try {
      write_back();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the end of a message's work");
    }
    retain_buffers();
    return;
  }
  try {
    const nb::object dropped = planner_.attr("dropped_messages");
    nb::inst_ptr<DroppedMessages>(dropped)->add(request_, taken());
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the end of a message's work");
    taken().leak();
  } catch (const std::exception&) {
    taken().leak();
  }
}

void NativeMessageWork::outlive_call() {
  site_ = caller_site(code_);
  keep_.hold_storages();
}

bool NativeMessageWork::post(bool outlives) {
  engine().check_process();
  request_->outlives = outlives;
  GilLock gil;
  begun_ = engine().channels().post(request_, gil);
  return begun_;
}

void NativeMessageWork::start(bool outlives) {
  try {
    if (!post(outlives)) refuse_memory(name_.text());
  } catch (const std::system_error& error) {
    set_limit_error(error);
    throw nb::python_error();
  }
}

void NativeMessageWork::refuse_shared_memory() const {
  if (engine().channels().receive_buffers().overlap(request_->data, request_->nbytes))
    refuse_memory(name_.text());
}

void NativeMessageWork::detach() {
  engine().check_process();
  GilLock gil;
  engine().channels().detach(gil);
}

bool NativeMessageWork::ended() const {
  return begun_ && (!request_ || request_->done.load(std::memory_order_acquire));
}

void NativeMessageWork::write_back() const {
  if (!unpack_.is_valid() || !ended() || request_->cancelled || request_->fault.load() != FaultKind::kNone)
    return;
  call_python(unpack_, request_->nbytes);
}

bool NativeMessageWork::done() {
  if (!ended()) return false;
  if (request_) {
    engine().channels().see(*request_);
    write_back();
    retain_buffers();
  }
  return true;
}

// How it ended; kTimeout when it has not.
int NativeMessageWork::ended_with(double timeout_s, bool fatal) {
  if (!request_) return 0;
  Engine& engine = this->engine();
  engine.check_process();
  if (request_->done.load(std::memory_order_acquire) && request_->fault.load() == FaultKind::kNone) {
    engine.channels().see(*request_);
    return 0;
  }
  const bool brief = request_->nbytes < kLarge;
  return waiting(engine, brief, [&](ReleasableLock& held) {
    return engine.channels().wait(*request_, deadline_after(timeout_s), fatal, engine.interrupt(), held);
  });
}

void NativeMessageWork::wait(nb::handle timeout) {
  if (!begun_) throw std::runtime_error("this message was never posted");
  const double timeout_s = timeout.is_none() ? kForever : seconds(timeout, kForever, planner_);
  int kind = ended_with(timeout_s, false);
  if (kind == static_cast<int>(FaultKind::kTimeout) && done()) kind = ended_with(kForever, false);
  if (kind == 0) {
    write_back();
    taken();  // the engine no longer uses the buffer
    return;
  }
  if (kind != static_cast<int>(FaultKind::kTimeout) || engine().fault().kind != FaultKind::kNone)
    raise(failure());
  raise(call_python(planner_.attr("late"), name_.text(), timeout_s, engine_, site_.text()));
}

int NativeMessageWork::wait_or_abort(double timeout_s) {
  const int kind = ended_with(timeout_s, true);
  if (kind == 0) write_back();
  return kind;
}

nb::object NativeMessageWork::failure() {
  retain_buffers();
  return call_python(planner_.attr("failure"), name_.text(), timeout_s_, engine_, site_.text());
}

nb::object NativeMessageWork::exception() {
  if (!done() || ended_with(kForever, false) == 0) return nb::none();
  return failure();
}

nb::object NativeMessageWork::result() {
  wait(nb::none());
  if (!request_ || !request_->sized || request_->cancelled) return nb::none();
  nb::object
      memory;  // kept until there is a result: another thread may ask meanwhile, and `decode` may raise
  {
    const nb::ft_lock_guard held(lock_);
    if (result_.is_valid()) return result_;
    if (request_->own) received_ = memory_of(std::move(request_->own), request_->nbytes);
    if (!received_.is_valid()) return nb::none();
    memory = received_;
  }
  nb::object made = bytes_of(memory, request_->nbytes, !decode_.is_valid());
  if (decode_.is_valid()) made = call_python(decode_, made);
  const nb::ft_lock_guard held(lock_);
  if (!result_.is_valid()) result_ = std::move(made);
  received_ = {};
  return result_;
}

nb::object NativeMessageWork::status() {
  if (!request_ || request_->sending || !done() || request_->cancelled ||
      request_->fault.load() != FaultKind::kNone)
    return nb::none();
  return receive_status();
}

nb::object NativeMessageWork::receive_status() const { return request_ ? nb::cast(received()) : nb::none(); }

bool NativeMessageWork::cancel() {
  if (!begun_ || !request_) return false;
  Engine& engine = this->engine();
  engine.check_process();
  const GilRelease released;
  return engine.channels().cancel(*request_);
}

bool NativeMessageWork::cancelled() { return request_ && done() && request_->cancelled; }

void NativeMessageWork::retain_buffers() {
  BufferReferences kept = taken();
  if (engine().has_open_transfers()) kept.leak();
}

nb::object NativeMessageWork::text() const {
  const nb::object group = property_of(planner_, "name"), name = name_.text();
  if (source() < 0)
    return nb::steal(PyUnicode_FromFormat("%U, any rank of group %R", name.ptr(), group.ptr()));
  return nb::steal(PyUnicode_FromFormat("%U, rank %d of group %R", name.ptr(), source(), group.ptr()));
}

nb::object NativeMessageWork::described(nb::handle self) const {
  return call_python(planner_.attr("describe"), self);
}

namespace {

// Arguments as `MessageArguments`, and the form of the message.
void make(NativeMessageWork* self, nb::object planner, nb::object engine, nb::object name, int peer, int tag,
          uint32_t form, Address data, size_t nbytes, double timeout_s, bool sending, bool exact, bool sized,
          nb::object keep, nb::object decode, bool synchronous, nb::object unpack) {
  const Engine& of = *nb::inst_ptr<Engine>(engine);
  if (sending || peer != kAnyRank) of.member(peer);
  if (!is_travelling_tag(tag) && (sending || !is_any_tag(tag)))
    throw std::invalid_argument("a tag is 0 or more");
  if (!is_form(form) && !(sized && form == kAnyForm)) throw std::invalid_argument("no such dtype");
  auto request = std::make_shared<Request>();
  request->sending = sending;
  request->exact = exact;
  request->sized = sized;
  request->synchronous = synchronous;
  request->peer = peer;
  request->tag = tag;
  request->form = form;
  request->data = reinterpret_cast<unsigned char*>(data);
  request->nbytes = nbytes;
  request->deadline = deadline_after(timeout_s);
  new (self) NativeMessageWork(std::move(planner), std::move(engine), {std::move(name), plain_tag(tag)},
                               std::move(request), {std::move(keep), {}, {}, {}}, timeout_s);
  if (!decode.is_none()) self->set_decode(std::move(decode));
  if (!unpack.is_none()) self->set_unpack(std::move(unpack));
}

}  // namespace

void bind_message_works(nb::module_& m) {
  nb::class_<DroppedMessages>(m, "DroppedMessages",
                              "The buffers of messages under way whose works Python has dropped.")
      .def(nb::init<>())
      .def("close", &DroppedMessages::close, nb::arg("leak"),
           "Call when no thread moves bytes of these buffers any more. leak: a stopped rank may still write "
           "to "
           "them.");
  m.attr("ANY_FORM") = kAnyForm;
  nb::class_<NativeMessageWork>(m, "NativeMessageWork", "A send or a receive by the engine; see `Work`.")
      .def(
          "__init__", &make, nb::arg("planner"), nb::arg("engine"), nb::arg("name"), nb::arg("peer"),
          nb::arg("tag"), nb::arg("form"), nb::arg("data"), nb::arg("nbytes"), nb::arg("timeout_s"),
          nb::arg("sending"), nb::arg("exact") = false, nb::arg("sized") = false,
          nb::arg("keep").none() = nb::none(), nb::arg("decode").none() = nb::none(),
          nb::arg("synchronous") = false, nb::arg("unpack").none() = nb::none(),
          "sized: the message may have any size; `result` returns its bytes, or what `decode` makes of them. "
          "unpack: is called with the number of received bytes, see `strided`.")
      .def("outlive_call", &NativeMessageWork::outlive_call,
           "Notes the caller's line, and keeps the memory of tensors where it is. Call before `start`.")
      .def("start", &NativeMessageWork::start, nb::arg("outlives") = false, "See `MessageWork.start`.")
      .def("refuse_shared_memory", &NativeMessageWork::refuse_shared_memory,
           "See `MessageWork.refuse_shared_memory`.")
      .def("detach", &NativeMessageWork::detach, "See `MessageWork.detach`.")
      .def("ended", &NativeMessageWork::ended, "`done`, where it is not the caller that asks.")
      .def("done", &NativeMessageWork::done, "Whether it has ended, with or without an error.")
      .def("wait", &NativeMessageWork::wait, nb::arg("timeout").none() = nb::none(),
           "Wait until it has ended, and raise its error; see `Work.wait`.")
      .def("wait_or_abort", &NativeMessageWork::wait_or_abort, nb::arg("timeout_s"),
           "See `MessageWork.wait_or_abort`.")
      .def("failure", &NativeMessageWork::failure, nb::sig("def failure(self) -> BaseException"),
           "The error of the operation.")
      .def("exception", &NativeMessageWork::exception, nb::sig("def exception(self) -> BaseException | None"),
           "Its error; None if it has none or is still under way.")
      .def("result", &NativeMessageWork::result, nb::sig("def result(self) -> typing.Any"),
           "Wait; then return the received bytes or object, or None if the caller gave a buffer.")
      .def_prop_ro("status", &NativeMessageWork::status, nb::sig("def status(self) -> Status | None"),
                   "See `Work.status`.")
      .def("receive_status", &NativeMessageWork::receive_status,
           nb::sig("def receive_status(self) -> Status"), "The status of a receive whose wait has returned.")
      .def("cancel", &NativeMessageWork::cancel, "See `Work.cancel`.")
      .def_prop_ro("cancelled", &NativeMessageWork::cancelled, "See `Work.cancelled`.")
      .def_prop_ro("source", &NativeMessageWork::source,
                   "The rank that sent the received message; meaningful only when done.")
      .def_prop_ro("receives", &NativeMessageWork::receives, "Whether it is a receive.")
      .def_prop_ro("capacity", &NativeMessageWork::capacity, "The bytes that a receive has room for.")
      .def("retain_buffers", &NativeMessageWork::retain_buffers,
           "After its end: keep its buffers for ever if a stopped rank may still write to them.")
      .def("_what", &NativeMessageWork::text, "The operation, for messages.")
      .def("__repr__", [](const NativeMessageWork& self) { return nb::str(self.described(nb::find(self))); });
}
