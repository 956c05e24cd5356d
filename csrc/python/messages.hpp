// The fast path of `send`, `recv` and `sendrecv`, of arrays and of objects: arguments are read without Python
// code, and the message is passed at once.
#pragma once

#include <algorithm>
#include <memory>

#include "python/buffers.hpp"
#include "python/status.hpp"

// The memory of a received message as an object. Runs no Python code.
nanobind::object memory_of(std::unique_ptr<unsigned char[]> received, size_t nbytes);
// The bytes in it, writable: objects that are made of them may share their memory. `as_array`: always a NumPy
// array.
nanobind::object bytes_of(const nanobind::object& memory, size_t nbytes, bool as_array);

// What a message is for its caller: the elements of an array, an object, or the bytes of either.
enum class MessageContents { kArray, kObject, kBytes };

class MessageCall {
 public:
  // exact: a message shorter than the buffer is refused.
  MessageCall(bool sending, MessageContents contents, bool exact, double timeout_s, int context,
              const char* name = nullptr)
      : sending(sending),
        timeout_s(timeout_s),
        contents_(contents),
        exact_(exact),
        context_(context),
        name_(name) {}

  const bool sending;
  double timeout_s;  // the group's, unless the call has one

  // Arguments: x, peer, tag, timeout. False: Python has to check them. Received bytes have no x: their memory
  // is made when a message matches.
  bool read(PyObject* const* given, const unisono::Engine& engine) {
    PyObject* const from = given[1];
    const bool anybody = !sending && from == Py_None;
    if (!(anybody || PyLong_CheckExact(from)) || !PyLong_CheckExact(given[2])) return false;
    if (!sized() && (PyList_CheckExact(given[0]) || PyTuple_CheckExact(given[0]))) return false;
    const long rank = anybody ? unisono::kAnyRank : PyLong_AsLong(from), number = PyLong_AsLong(given[2]);
    if (PyErr_Occurred() != nullptr) {  // too large a number, which reads as -1
      PyErr_Clear();
      return false;
    }
    const bool named = rank >= 0 && rank < engine.size();
    const long most = context_ == 0 ? INT32_MAX : unisono::kMostContextTag;
    const bool tagged = (number >= 0 && number <= most) || (number == unisono::kAnyTag && !sending);
    if (!(named || anybody) || !tagged) return false;
    if (!sized() && (!buffers_.see(given[0]) || buffers_.count != 1 || buffers_.number)) return false;
    if (!sending && buffers_.readonly) return false;
    peer_ = static_cast<int>(rank);
    tag_ = unisono::tag_in_context(context_, static_cast<int>(number));
    if (given[3] == Py_None) return true;
    timeout_s = PyFloat_CheckExact(given[3]) ? PyFloat_AS_DOUBLE(given[3]) : 0;
    return timeout_s > 0;
  }

  // Of an asynchronous call.
  std::shared_ptr<unisono::Request> request() const {
    auto made = std::make_shared<unisono::Request>();
    fill(*made);
    made->deadline = deadline_after(timeout_s);
    return made;
  }
  int tag() const { return unisono::plain_tag(tag_); }

  // The view that pins the memory of the buffer, if any.
  nanobind::object kept() const { return buffers_.kept(); }

  // For messages.
  nanobind::object name() const {
    static constexpr const char* kNames[2][3] = {{"recv", "recv_object", "recv_bytes"},
                                                 {"send", "send_object", "send"}};
    const char* const what = name_ == nullptr ? kNames[sending][static_cast<size_t>(contents_)] : name_;
    return nanobind::steal(tag() > 0 ? PyUnicode_FromFormat("%s(tag=%d)", what, tag())
                                     : PyUnicode_FromString(what));
  }

  // After the message was passed: True for a send, its Status, or its bytes and its Status.
  nanobind::object outcome() {
    if (sending) return nanobind::bool_(true);
    nanobind::object status = nanobind::cast(Status::of(peer_, tag_, received_form_, nbytes_));
    if (!sized()) return status;
    const bool as_array = contents_ == MessageContents::kBytes;
    return nanobind::make_tuple(bytes_of(memory_of(std::move(own_), nbytes_), nbytes_, as_array),
                                std::move(status));
  }

  // Whether no receive under way writes to this memory.
  bool unshared(unisono::Engine& engine) const {
    unisono::ReceiveBuffers& buffers = engine.channels().receive_buffers();
    return buffers.empty() || !buffers.overlap(data(), nbytes());
  }
  // The message that a receive would get, if one has come or comes within a moment; otherwise None.
  nanobind::object peeked(unisono::Engine& engine) const {
    engine.check_process();
    std::optional<unisono::MessageEnvelope> found;
    unisono::Channels& channels = engine.channels();
    if (!channels.peek_now(peer_, tag_, channels.spins(), found)) return nanobind::none();
    return nanobind::cast(Status::of(found->source, found->tag, found->form, found->nbytes));
  }
  // Whether it could be passed at once. A receive polls for about as long as making a Request takes. The
  // caller learns later, from its Work, that it has ended: see ReceiveBuffers.
  bool pass_now(unisono::Engine& engine) {
    if (!at_once(engine, kBriefSpins)) return false;
    if (!sending) engine.channels().receive_buffers().add_ended(data(), buffers_.nbytes());
    return true;
  }
  // Whether it is a send that could be passed at once: no wait follows, and nothing is prepared for one.
  bool sent(unisono::Engine& engine) { return sending && at_once(engine, 0); }
  // Whether `pass` has done nothing, because a receive under way writes to this memory: Python raises it.
  bool refused() const { return refused_; }

  unisono::FaultKind pass(unisono::Engine& engine, unisono::ReleasableLock& held) {
    unisono::Channels& channels = engine.channels();
    if (at_once(engine, channels.spins())) return unisono::FaultKind::kNone;
    const auto posted = request();
    if (posted->nbytes >= unisono::kLarge) held.release();
    refused_ = !channels.post(posted, held);
    if (refused_) return unisono::FaultKind::kNone;
    const auto fault = channels.wait(*posted, posted->deadline, true, engine.interrupt(), held);
    if (fault == unisono::FaultKind::kNone) complete(*posted);
    return fault;
  }

  // Passes this receive and a send at the same time. They share no memory.
  unisono::FaultKind exchange(const MessageCall& send, unisono::Engine& engine,
                              unisono::ReleasableLock& held) {
    unisono::Channels& channels = engine.channels();
    const auto incoming = request(), outgoing = send.request();
    const auto wait = [&](unisono::Request& one) {
      return channels.wait(one, one.deadline, true, engine.interrupt(), held);
    };
    if (std::max(incoming->nbytes, outgoing->nbytes) >= unisono::kLarge) held.release();
    refused_ = !channels.post(incoming, held);
    if (refused_) return unisono::FaultKind::kNone;
    const bool posted = channels.post(outgoing, held);
    refused_ = !posted && channels.cancel(*incoming);
    if (refused_) return unisono::FaultKind::kNone;
    auto fault = posted ? wait(*outgoing) : unisono::FaultKind::kNone;
    if (fault == unisono::FaultKind::kNone) fault = wait(*incoming);
    if (fault != unisono::FaultKind::kNone) return fault;
    if (!posted)
      throw nanobind::value_error(
          "sendrecv: out was received, but another thread of this rank has begun to receive into the memory "
          "of x; give each thread a buffer of its own");
    complete(*incoming);
    return fault;
  }
  bool shares_memory(const MessageCall& other) const {
    return unisono::overlap(data(), nbytes(), other.data(), other.nbytes());
  }

 private:
  static constexpr int kBriefSpins = 64;

  bool at_once(unisono::Engine& engine, int spins) {
    engine.check_process();
    unisono::Channels& channels = engine.channels();
    if (!unshared(engine)) return false;
    if (sending) return channels.send_now(peer_, tag_, form(), data(), nbytes());
    unisono::Transfer wanted;
    fill(wanted);
    if (!channels.receive_now(wanted, std::min(spins, channels.spins()))) return false;
    complete(wanted);
    return true;
  }
  void complete(unisono::Transfer& met) {
    peer_ = met.peer;
    tag_ = met.tag;
    nbytes_ = met.nbytes;
    received_form_ = met.form;
    own_ = std::move(met.own);
  }
  bool sized() const { return !sending && contents_ != MessageContents::kArray; }
  unisono::DType dtype() const {
    return sized() ? unisono::DType::kU8 : static_cast<unisono::DType>(buffers_.dtype);
  }
  uint32_t form() const {
    if (contents_ == MessageContents::kBytes) return unisono::kAnyForm;
    const bool object = contents_ == MessageContents::kObject;
    return unisono::form_of(dtype(), object ? unisono::MessageKind::kObject : unisono::MessageKind::kArray);
  }
  size_t nbytes() const { return sized() ? 0 : buffers_.nbytes(); }
  unsigned char* data() const { return sized() ? nullptr : buffers_.extents[0].data; }
  void fill(unisono::Transfer& request) const {
    request.sending = sending;
    request.exact = exact_;
    request.sized = sized();
    request.peer = peer_;
    request.tag = tag_;
    request.form = form();
    request.data = data();
    request.nbytes = nbytes();
  }

  const MessageContents contents_;
  const bool exact_;
  const int context_;
  const char* const name_;  // of the caller's method, where it is another one
  CallBuffers buffers_;
  int peer_ = 0, tag_ = 0;
  bool refused_ = false;
  uint64_t nbytes_ = 0;  // these two: of the received message
  uint32_t received_form_ = 0;
  std::unique_ptr<unsigned char[]> own_;
};
