#include "executor.hpp"

#include <algorithm>
#include <cstring>

namespace unisono {
namespace {

constexpr size_t kSliceAlign = 4096;
constexpr size_t kLineElementsBytes = 64;
// What is taken from a socket before it is reduced: it should still be in the cache then.
constexpr size_t kPartBytes = 128 * 1024;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

// ---- Chunks ----------------------------------------------------------------------------------------

// An even cut starts every chunk on a cache line of the buffer; blocks are what the caller means by them.
Chunks::Chunks(unsigned char* data, size_t numel, int32_t count, size_t item, bool equal_blocks)
    : data_(data), numel_(numel) {
  const size_t parts = static_cast<size_t>(std::max(count, 1));
  per_ = (numel + parts - 1) / parts;
  if (!equal_blocks && parts > 1) per_ = round_up(per_, kLineElementsBytes / item);
  per_ = std::max<size_t>(per_, 1);
}

size_t Chunks::numel(int32_t index) const {
  const auto i = static_cast<size_t>(index);
  if (!list_.empty()) return i < list_.size() ? list_[i].numel : 0;
  return numel_ > i * per_ ? std::min(per_, numel_ - i * per_) : 0;
}

Extent Chunks::slice(int32_t index, size_t first, size_t at_most, size_t item) const {
  const size_t length = numel(index);
  const size_t count = length > first ? std::min(at_most, length - first) : 0;
  if (count == 0) return {nullptr, 0};
  unsigned char* const start = list_.empty() ? data_ + static_cast<size_t>(index) * per_ * item
                                             : list_[static_cast<size_t>(index)].data;
  return {start + first * item, count};
}

size_t Chunks::longest() const {
  size_t most = list_.empty() ? std::min(per_, numel_) : 0;
  for (const Extent& extent : list_) most = std::max(most, extent.numel);
  return most;
}

// ---- Executor --------------------------------------------------------------------------------------

struct Executor::Frame {
  const Job& job;
  Waiter& waiter;
  size_t item;
  size_t first;  // the segment: elements [first, first + segment) of every chunk
  size_t segment;
  bool opening;  // the first segment: its messages exist even when they are empty
};

Executor::Executor(std::vector<Transport*> transports, Transport* far, int rank, Limits limits)
    : transports_(std::move(transports)), far_(far), rank_(rank), limits_(limits) {}

// A sender can have two segments' messages outstanding, which is what lets segments overlap.
size_t Executor::segment_elements(const Program& program, size_t item) const {
  const auto chunks =
      static_cast<size_t>(std::max({1, program.chunks(Space::kOut), program.chunks(Space::kIn)}));
  const size_t fair = limits_.segment_bytes / chunks;
  const size_t room = limits_.capacity / static_cast<size_t>(program.in_flight() + 1);
  const size_t bytes = std::min(fair, room);
  return std::max<size_t>(1, (bytes >= kSliceAlign ? bytes / kSliceAlign * kSliceAlign : bytes) / item);
}

void Executor::prepare_scratch(const Job& job, size_t segment, size_t item) {
  const auto chunks = static_cast<size_t>(job.program->chunks(Space::kTmp));
  const size_t spare = job.op == ReduceOp::kPremulSum ? 1 : 0;
  scratch_stride_ = round_up(segment * item, kLineElementsBytes);
  if (scratch_.size() < (chunks + spare) * scratch_stride_)
    scratch_.resize((chunks + spare) * scratch_stride_);
  if (inputs_.size() < job.program->widest_reduce()) inputs_.resize(job.program->widest_reduce());
}

void Executor::run(const Job& job, Waiter& waiter) {
  const size_t item = itemsize(job.dtype);
  const size_t longest = std::max(job.binding.out.longest(), job.binding.in.longest());
  const size_t segment = std::max<size_t>(1, std::min(segment_elements(*job.program, item), longest));
  prepare_scratch(job, segment, item);
  size_t first = 0;
  do {
    if (first > 0) waiter.throw_if_aborted();
    const Frame frame{job, waiter, item, first, segment, first == 0};
    for (const Instruction& instruction : job.program->instructions()) step(instruction, frame);
    first += segment;
  } while (first < longest);
}

void Executor::step(const Instruction& step, const Frame& frame) {
  switch (step.opcode) {
    case Opcode::kSend:
      return send(step, frame);
    case Opcode::kRecv:
      return receive(step, frame);
    case Opcode::kReduce:
      return reduce(step, frame);
    case Opcode::kCopy: {
      const Extent from = find(step.own, frame), to = find(step.dst, frame);
      if (from.numel == 0 || from.data == to.data) return;
      about_to_write(to, frame);
      std::memmove(to.data, from.data, from.numel * frame.item);
      return;
    }
  }
  __builtin_unreachable();
}

// A Tmp chunk is as long as the chunk of the same index that it stands for.
Extent Executor::find(ChunkRef ref, const Frame& frame) {
  const Binding& binding = frame.job.binding;
  if (ref.space == Space::kOut) return binding.out.slice(ref.index, frame.first, frame.segment, frame.item);
  if (ref.space == Space::kIn) return binding.in.slice(ref.index, frame.first, frame.segment, frame.item);
  const bool in_model = binding.in.longest() > 0;
  const Chunks& model = in_model ? binding.in : binding.out;
  const int32_t chunks = frame.job.program->chunks(in_model ? Space::kIn : Space::kOut);
  const size_t length =
      model.slice(ref.index < chunks ? ref.index : 0, frame.first, frame.segment, frame.item).numel;
  return {scratch_.data() + static_cast<size_t>(ref.index) * scratch_stride_, length};
}

void Executor::send(const Instruction& step, const Frame& frame) {
  const Extent piece = find(step.dst, frame);
  if ((piece.numel == 0 && !frame.opening) || step.peers.empty()) return;
  const bool scaled = (step.flags & kRaw) != 0 && frame.job.op == ReduceOp::kPremulSum;
  const std::span<const int> peers(step.peers), near = peers.first(step.near);
  const std::span<const int> far = peers.subspan(step.near);
  if (!near.empty()) send_over(*transports_[static_cast<size_t>(near[0])], near, piece, scaled, false, frame);
  if (!far.empty()) send_over(*transports_[static_cast<size_t>(far[0])], far, piece, scaled, true, frame);
}

// To other hosts a message goes from where it lies.
void Executor::send_over(Transport& transport, std::span<const int> peers, Extent piece, bool scaled,
                         bool far, const Frame& frame) {
  const size_t nbytes = piece.numel * frame.item;
  void* room = transport.reserve(peers, nbytes);
  if (room == nullptr) {
    int awaited = transport.blocking_peer();
    frame.waiter.until(awaited, [&] {
      room = transport.reserve(peers, nbytes);
      awaited = transport.blocking_peer();
      return room != nullptr;
    });
  }
  if (scaled)
    kernels().scale[static_cast<size_t>(frame.job.dtype)](room, piece.data, piece.numel, frame.job.factor);
  else if (nbytes > 0 && !far)
    std::memcpy(room, piece.data, nbytes);
  transport.commit(peers, nbytes, frame.job.fingerprint, far && !scaled ? piece.data : room);
}

// What has not yet been sent of this memory is kept.
void Executor::about_to_write(Extent extent, const Frame& frame) {
  if (far_ != nullptr) far_->keep(extent.data, extent.numel * frame.item);
}

// The next message of `peer`, or part of it; it has to be of this very operation and of this size.
template <class Peek>
Message Executor::await(int peer, size_t nbytes, const Frame& frame, Peek peek) {
  Transport& transport = *transports_[static_cast<size_t>(peer)];
  Message message;
  frame.waiter.until(peer, [&] { return peek(transport, message); });
  if (message.fingerprint != frame.job.fingerprint || message.nbytes != nbytes) [[unlikely]] {
    Fault fault;
    fault.kind = FaultKind::kMismatch;
    fault.about = peer;
    frame.waiter.fail(fault);
  }
  return message;
}

void Executor::receive(const Instruction& step, const Frame& frame) {
  const Extent piece = find(step.dst, frame);
  if (piece.numel == 0 && !frame.opening) return;
  about_to_write(piece, frame);
  const int peer = step.peers[0];
  const size_t nbytes = piece.numel * frame.item;
  const Message message = await(peer, nbytes, frame, [&](Transport& transport, Message& found) {
    return transport.peek(peer, nbytes, piece.data, found);
  });
  if (message.nbytes > 0 && message.data != piece.data) std::memcpy(piece.data, message.data, message.nbytes);
  transports_[static_cast<size_t>(peer)]->release(peer);
}

// What comes from other hosts is reduced part by part.
void Executor::reduce(const Instruction& step, const Frame& frame) {
  const Extent result = find(step.dst, frame);
  if (result.numel == 0 && !frame.opening) return;
  const Job& job = frame.job;
  const unsigned char* own = nullptr;
  if (step.own_at >= 0) {
    const Extent mine = find(step.own, frame);
    own = mine.data;
    if (job.op == ReduceOp::kPremulSum && (step.flags & kRaw) != 0) {
      unsigned char* const scaled =
          scratch_.data() + static_cast<size_t>(job.program->chunks(Space::kTmp)) * scratch_stride_;
      kernels().scale[static_cast<size_t>(job.dtype)](scaled, mine.data, mine.numel, job.factor);
      own = scaled;
    }
  }
  about_to_write(result, frame);
  const bool far = far_ != nullptr && std::any_of(step.peers.begin(), step.peers.end(), [&](int peer) {
                     return transports_[static_cast<size_t>(peer)] == far_;
                   });
  const size_t part = far ? kPartBytes / frame.item : std::max<size_t>(result.numel, 1);
  size_t first = 0;
  do reduce_part(step, frame, result, own, first, std::min(part, result.numel - first));
  while ((first += part) < result.numel);
  for (int peer : step.peers) transports_[static_cast<size_t>(peer)]->release(peer);
}

void Executor::reduce_part(const Instruction& step, const Frame& frame, Extent result,
                           const unsigned char* own, size_t first, size_t count) {
  const Job& job = frame.job;
  const size_t item = frame.item;
  size_t k = 0;
  const auto add_own = [&] {
    if (static_cast<int32_t>(k) == step.own_at) inputs_[k++] = own + first * item;
  };
  add_own();
  for (int peer : step.peers) {
    const auto peek = [&](Transport& transport, Message& found) {
      return transport.peek_part(peer, result.numel * item, first * item, count * item, found);
    };
    inputs_[k++] = await(peer, result.numel * item, frame, peek).data;
    add_own();
  }
  if (count == 0) return;
  const bool averaged = job.op == ReduceOp::kAvg && (step.flags & kFinal) != 0;
  kernels().reduce[static_cast<size_t>(job.dtype)][static_cast<size_t>(job.op)](
      result.data + first * item, inputs_.data(), k, count,
      Finish{averaged ? static_cast<double>(job.program->size()) : 1.0});
}

}  // namespace unisono
