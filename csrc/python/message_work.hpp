// A send or a receive under way, as Python has it.
#pragma once

#include <memory>
#include <vector>

#include "p2p/request.hpp"
#include "python/calls.hpp"
#include "python/status.hpp"

// The buffers of messages that are under way although Python has dropped their works.
class DroppedMessages {
 public:
  void add(std::shared_ptr<unisono::Request> request, BufferReferences&& buffers);
  // Call when no thread moves bytes of these buffers any more. leak: a stopped rank may still write to them.
  void close(bool leak);

 private:
  struct DroppedMessage {
    std::shared_ptr<unisono::Request> request;
    BufferReferences buffers;
  };
  nanobind::ft_mutex lock_;
  std::vector<DroppedMessage> messages_;
  size_t open_ = 0;  // of them, when last counted
};

// What a message is called in errors.
struct MessageName {
  nanobind::object method;  // of the caller
  int tag = 0;
  nanobind::object text() const {
    return nanobind::steal(tag > 0 ? PyUnicode_FromFormat("%U(tag=%d)", method.ptr(), tag)
                                   : Py_NewRef(method.ptr()));
  }
};

// It is made before it is posted: so the caller can check several, and then post all.
class NativeMessageWork {
 public:
  NativeMessageWork(nanobind::object planner, nanobind::object engine, MessageName name,
                    std::shared_ptr<unisono::Request> request, BufferReferences keep, double timeout_s);
  // One that was sent at once.
  NativeMessageWork(nanobind::object planner, nanobind::object engine, MessageName name);
  NativeMessageWork(const NativeMessageWork&) = delete;
  NativeMessageWork& operator=(const NativeMessageWork&) = delete;
  ~NativeMessageWork();

  // Notes the caller's line, and keeps the memory of tensors where it is: it outlives the call that posts it.
  void outlive_call();
  // Posts it. False: its memory is in use, and nothing has happened.
  bool post(bool outlives);
  void start(bool outlives);
  void refuse_shared_memory() const;
  void detach();
  bool ended() const;
  bool done();
  void wait(nanobind::handle timeout);
  int wait_or_abort(double timeout_s);
  nanobind::object failure();
  nanobind::object exception();
  nanobind::object result();
  nanobind::object status();
  nanobind::object receive_status() const;
  bool cancel();
  bool cancelled();
  int source() const { return request_ ? request_->peer : -1; }
  bool receives() const { return request_ && !request_->sending; }
  // The bytes that a receive has room for.
  uint64_t capacity() const { return receives() && request_->sized ? UINT64_MAX : capacity_; }
  // Of a receive that has ended: what it got, and whether that was more than it has room for.
  Status received() const {
    return Status::of(request_->peer, request_->tag, request_->form, request_->nbytes);
  }
  bool truncated() const { return receives() && request_->nbytes > capacity(); }
  void retain_buffers();
  nanobind::object text() const;
  nanobind::object described(nanobind::handle self) const;
  void set_decode(nanobind::object decode) { decode_ = std::move(decode); }
  void set_unpack(nanobind::object unpack) { unpack_ = std::move(unpack); }

 private:
  unisono::Engine& engine() const { return *nanobind::inst_ptr<unisono::Engine>(engine_); }
  int ended_with(double timeout_s, bool fatal);
  // Writes a received message from packed memory to its array, if it has ended without an error.
  void write_back() const;
  BufferReferences taken() {
    const nanobind::ft_lock_guard held(lock_);
    return std::exchange(keep_, {});
  }

  nanobind::object planner_, engine_;
  MessageName name_;
  std::shared_ptr<unisono::Request> request_;  // nullptr: it was sent at once
  nanobind::ft_mutex lock_;
  BufferReferences keep_;  // guarded by lock_
  nanobind::object decode_, unpack_, received_, result_, code_;
  unisono::CallSite site_;
  double timeout_s_ = 0;
  uint64_t capacity_ = 0;
  bool begun_ = false;
};

// A new work of Python's, not yet posted.
template <class... Arguments>
nanobind::object make_message_work(Arguments&&... arguments) {
  static const nanobind::handle type = nanobind::type<NativeMessageWork>();
  nanobind::object made = nanobind::inst_alloc(type);
  new (nanobind::inst_ptr<NativeMessageWork>(made)) NativeMessageWork(std::forward<Arguments>(arguments)...);
  nanobind::inst_mark_ready(made);
  return made;
}

void bind_message_works(nanobind::module_& m);
