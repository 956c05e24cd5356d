// The fast path of `send`, `recv` and `sendrecv`, of arrays and of objects: arguments are read without Python
// code, and the message is passed at once.
#pragma once

#include <algorithm>
#include <memory>

#include "python/buffers.hpp"
#include "python/status.hpp"

// The bytes of a received object, writable: objects that are made of them may share their memory.
nanobind::object bytes_of(std::unique_ptr<unsigned char[]> received, size_t nbytes);

class MessageCall {
 public:
  // exact: a message shorter than the buffer is refused.
  MessageCall(bool sending, unisono::MessageKind kind, bool exact, double timeout_s,
              const char* name = nullptr)
      : sending(sending), timeout_s(timeout_s), kind_(kind), exact_(exact), name_(name) {}

  const bool sending;
  double timeout_s;  // the group's, unless the call has one

  // Arguments: x, peer, tag, timeout. False: Python has to check them. A received object has no x: its memory
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
    raw_ = engine.raw_messages;
    const bool tagged = (number >= 0 && number <= INT32_MAX) ||
                        (!sending && (number == unisono::kAnyTag || (raw_ && number < 0)));
    if (!(named || anybody) || !tagged) return false;
    if (!sized() && (!buffers_.see(given[0]) || buffers_.count != 1 || buffers_.number)) return false;
    if (!sending && buffers_.readonly) return false;
    peer_ = static_cast<int>(rank);
    tag_ = static_cast<int>(number);
    if (given[3] == Py_None) return true;
    timeout_s = PyFloat_CheckExact(given[3]) ? PyFloat_AS_DOUBLE(given[3]) : 0;
    return timeout_s > 0;
  }

  // The view that pins the memory of the buffer, if any.
  nanobind::object kept() const { return buffers_.kept(); }

  // For messages.
  nanobind::object name() const {
    const bool object = kind_ == unisono::MessageKind::kObject;
    const char* const plain = sending ? (object ? "send_object" : "send") : (object ? "recv_object" : "recv");
    const char* const what = name_ == nullptr ? plain : name_;
    return nanobind::steal(tag_ > 0 ? PyUnicode_FromFormat("%s(tag=%d)", what, tag_)
                                    : PyUnicode_FromString(what));
  }

  // After the message was passed: its Status, or True for a send, or the bytes of an object.
  nanobind::object outcome() {
    if (sending) return nanobind::bool_(true);
    if (sized()) return bytes_of(std::move(own_), nbytes_);
    return nanobind::cast(Status::of(peer_, tag_, form(), nbytes_));
  }

  // Whether no receive under way writes to this memory.
  bool unshared(unisono::Engine& engine) const {
    return !engine.channels().receive_buffers().overlap(data(), nbytes());
  }
  // Whether it could be passed at once. A receive polls for about as long as making a Request takes. The
  // caller learns later, from its Work, that it has ended: see ReceiveBuffers.
  bool pass_now(unisono::Engine& engine) {
    if (!at_once(engine, kBriefSpins)) return false;
    if (!sending) engine.channels().receive_buffers().add_ended(data(), buffers_.nbytes());
    return true;
  }
  // Whether `pass` has done nothing, because a receive under way writes to this memory: Python raises it.
  bool refused() const { return refused_; }

  unisono::FaultKind pass(unisono::Engine& engine, unisono::ReleasableLock& held) {
    unisono::Channels& channels = engine.channels();
    if (at_once(engine, channels.spins())) return unisono::FaultKind::kNone;
    held.release();
    const auto posted = request();
    refused_ = !channels.post(posted, held);
    if (refused_) return unisono::FaultKind::kNone;
    const auto fault = channels.wait(*posted, posted->deadline, true, engine.interrupt());
    if (fault == unisono::FaultKind::kNone) complete(*posted);
    return fault;
  }

 private:
  static constexpr int kBriefSpins = 64;

  bool at_once(unisono::Engine& engine, int spins) {
    engine.check_process();
    unisono::Channels& channels = engine.channels();
    if (!unshared(engine)) return false;
    if (sending) return channels.send_now(peer_, tag_, form(), data(), nbytes());
    unisono::Request wanted;
    fill(wanted);
    if (!channels.receive_now(wanted, std::min(spins, channels.spins()))) return false;
    complete(wanted);
    return true;
  }
  void complete(unisono::Request& met) {
    peer_ = met.peer;
    tag_ = met.tag;
    nbytes_ = met.nbytes;
    own_ = std::move(met.own);
  }
  bool sized() const { return !sending && kind_ == unisono::MessageKind::kObject; }
  unisono::DType dtype() const {
    return sized() ? unisono::DType::kU8 : static_cast<unisono::DType>(buffers_.dtype);
  }
  uint32_t form() const { return unisono::form_of(dtype(), kind_); }
  size_t nbytes() const { return sized() ? 0 : buffers_.nbytes(); }
  unsigned char* data() const { return sized() ? nullptr : buffers_.extents[0].data; }
  std::shared_ptr<unisono::Request> request() const {
    auto made = std::make_shared<unisono::Request>();
    fill(*made);
    made->deadline = deadline_after(timeout_s);
    return made;
  }
  void fill(unisono::Request& request) const {
    request.sending = sending;
    request.exact = exact_;
    request.sized = sized();
    request.raw = raw_;
    request.peer = peer_;
    request.tag = tag_;
    request.form = form();
    request.data = data();
    request.nbytes = nbytes();
  }

  const unisono::MessageKind kind_;
  const bool exact_;
  const char* const name_;  // of the caller's method, where it is another one
  CallBuffers buffers_;
  int peer_ = 0, tag_ = 0;
  bool refused_ = false, raw_ = false;
  uint64_t nbytes_ = 0;  // of the received message
  std::unique_ptr<unsigned char[]> own_;
};
