#include "engine/executor.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/copy.hpp"
#include "protocol/loan.hpp"

namespace unisono {
namespace {

constexpr size_t kSliceAlign = 4096;
constexpr size_t kLineElementsBytes = 64;
// Bytes read from a socket before they are reduced: they should still be in the cache then.
constexpr size_t kPartBytes = 128 * 1024;
// Values that are encoded or decoded at a time: they stay in a core's first-level cache for the next step.
constexpr size_t kCodedPartElements = 4096;
// A message of at least this size is lent rather than staged: lending costs system calls, but no extra copy
// and no cache lines of another core.
constexpr size_t kLendBytes = 128 * 1024;
// The same for a sender that also receives: it has no time to help copy what it lends.
constexpr size_t kBusyLendBytes = 256 * 1024;

// A message of at least this size is opened: receivers read it in place, without a copy, but must release it
// before the call ends. A sender that has nothing else to do lends instead: then both ends copy.
constexpr size_t kOpenBytes = 16 * 1024;

// With more ranks than cores lending needs a turn of every receiver on a core. A chunk of this size is worth
// it.
constexpr size_t kAheadBytes = 1024 * 1024;

constexpr uint64_t kMostElements = uint64_t{1} << 48;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

// ---- Chunks ----------------------------------------------------------------------------------------

// An even cut starts every chunk on a cache line of the buffer. Equal blocks are cut exactly.
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

// ---- Coder ----

size_t Coder::numel(size_t wanted) const {
  size_t low = 0, high = 2 * wanted;  // no code is shorter than half a byte
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (nbytes(middle) < wanted)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// ---- Executor --------------------------------------------------------------------------------------

struct Executor::Frame {
  const Job& job;
  Waiter& waiter;
  size_t item;
  size_t first;  // the segment: elements [first, first + segment) of every chunk
  size_t segment;
  bool opening;  // the first segment: its messages are sent even when they are empty
};

Executor::~Executor() {
  if (!unsettled_) return;
  never_free(std::move(fetched_));
  never_free(std::move(scratch_));
}

Executor::Executor(std::vector<Transport*> transports, Transport* far, Limits limits)
    : transports_(std::move(transports)), far_(far), limits_(limits) {}

size_t Executor::room_for(const Program& program) const {
  return limits_.capacity / static_cast<size_t>(program.in_flight() + 1);
}

// A sender can have the messages of two segments outstanding, so that segments overlap.
size_t Executor::segment_elements(const Job& job, size_t item) const {
  const Program& program = *job.program;
  const auto chunks =
      static_cast<size_t>(std::max({1, program.chunks(Space::kOut), program.chunks(Space::kIn)}));
  // Between hosts the time depends on the size of the codes. All messages are codes where no two ranks share
  // a host.
  const size_t shorter = program.coded() && far_ != nullptr ? job.coder.times_shorter() : 1;
  const size_t fair = limits_.segment_bytes / chunks * shorter;
  if (program.lends() && limits_.lent_bytes > 0)  // messages that do not fit into the staging memory are lent
    return std::max<size_t>(1, limits_.lent_bytes / chunks / kSliceAlign * kSliceAlign / item);
  const size_t room = room_for(program) * (limits_.apart ? shorter : 1);
  const size_t bytes = std::min(fair, room);
  const size_t most = (bytes >= kSliceAlign ? bytes / kSliceAlign * kSliceAlign : bytes) / item;
  return std::max<size_t>(1, job.coder.whole_blocks(most));
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
  const size_t segment = std::max<size_t>(1, std::min(segment_elements(job, item), longest));
  prepare_scratch(job, segment, item);
  size_t first = 0;
  do {
    if (first > 0) waiter.throw_if_aborted();
    const Frame frame{job, waiter, item, first, segment, first == 0};
    for (const Instruction& instruction : job.program->instructions()) step(instruction, frame);
    first += segment;
  } while (first < longest);
  if (lent_) settle(job, waiter);
}

// Waits until all lent memory belongs to the caller again. Meanwhile this rank helps slower receivers to
// copy.
void Executor::settle(const Job& job, Waiter& waiter) {
  lent_ = false;
  for (int peer = 0; peer < job.program->size(); ++peer) {
    Transport* const transport = transports_[static_cast<size_t>(peer)];
    if (transport == nullptr || transport->returned()) continue;
    int awaited = peer;
    waiter.until(awaited, [&] {
      transport->assist();
      const bool returned = transport->returned();
      awaited = transport->blocking_peer();
      return returned;
    });
  }
  copies_.clear();
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
      kernels().copy(to.data, from.data, from.numel * frame.item);
      return;
    }
  }
  __builtin_unreachable();
}

Extent Executor::find(ChunkRef ref, const Frame& frame) {
  if (ref.space != Space::kTmp)
    return frame.job.binding.of(ref.space).slice(ref.index, frame.first, frame.segment, frame.item);
  const size_t length = whole(ref, frame);
  return {scratch_.data() + static_cast<size_t>(ref.index) * scratch_stride_,
          length > frame.first ? std::min(frame.segment, length - frame.first) : 0};
}

// Elements of a chunk in all segments. A Tmp chunk is as long as the In or Out chunk of the same index.
size_t Executor::whole(ChunkRef ref, const Frame& frame) const {
  const Binding& binding = frame.job.binding;
  if (ref.space != Space::kTmp) return binding.of(ref.space).numel(ref.index);
  const bool in_model = binding.in.longest() > 0;
  const int32_t chunks = frame.job.program->chunks(in_model ? Space::kIn : Space::kOut);
  return (in_model ? binding.in : binding.out).numel(ref.index < chunks ? ref.index : 0);
}

// The fingerprint of a message. In the first message of a block it also carries the length of the block, in
// which two ranks' calls may differ. Otherwise a block that is too long by whole segments would be found only
// in the next call.
uint64_t Executor::fingerprint(ChunkRef chunk, const Frame& frame) const {
  const Job& job = frame.job;
  if (!job.program->equal_blocks() || !frame.opening) return job.fingerprint;
  return job.fingerprint + 2 * whole(chunk, frame);  // odd, as every operation's
}

bool Executor::runs_ahead(ChunkRef ref, const Frame& frame) const {
  if (limits_.ahead_bytes == 0 || !frame.job.program->runs_ahead()) return false;
  return frame.job.binding.of(ref.space).numel(ref.index) * frame.item >= kAheadBytes;
}

size_t Executor::segments_ahead(size_t segment, size_t item) const {
  return std::max<size_t>(1, limits_.ahead_bytes / (segment * item));
}

// The part of a chunk that one message carries: this segment or, for messages that run ahead, `many` segments
// at every `many`-th segment. Sender and receiver compute the same.
Extent Executor::find_message(ChunkRef ref, const Frame& frame) {
  if (!runs_ahead(ref, frame)) return find(ref, frame);
  const size_t many = segments_ahead(frame.segment, frame.item);
  if (frame.first / frame.segment % many != 0) return {nullptr, 0};
  return frame.job.binding.of(ref.space).slice(ref.index, frame.first, many * frame.segment, frame.item);
}

void Executor::send(const Instruction& step, const Frame& frame) {
  const Extent piece = find_message(step.dst, frame);
  if ((piece.numel == 0 && !frame.opening) || step.peers.empty()) return;
  const bool scaled = (step.flags & kRaw) != 0 && frame.job.op == ReduceOp::kPremulSum;
  const std::span<const int> peers(step.peers), near = peers.first(step.near);
  const std::span<const int> far = peers.subspan(step.near);
  const uint64_t print = fingerprint(step.dst, frame);
  const size_t nbytes = wire_bytes(piece.numel, step.coded, frame);
  const bool encoded = step.coded && !near.empty() && !far.empty();  // once: the error is accumulated once
  if (encoded) {
    codes_.resize(std::max(codes_.size(), nbytes));
    encode(step, piece, scaled, codes_.data(), frame);
  }
  const auto fill = [&](void* room) {
    if (encoded)
      kernels().copy(room, codes_.data(), nbytes);
    else if (step.coded)
      encode(step, piece, scaled, room, frame);
    else if (scaled)
      kernels().scale[static_cast<size_t>(frame.job.dtype)](room, piece.data, piece.numel, frame.job.factor);
    else if (nbytes > 0)
      kernels().copy(room, piece.data, nbytes);
    return room;
  };
  const bool lent = !scaled && !step.coded && !near.empty() &&
                    lend(*transports_[static_cast<size_t>(near[0])], step, near, piece, frame);
  if (!near.empty() && !lent)
    send_over(*transports_[static_cast<size_t>(near[0])], near, nbytes, print, fill, frame);
  if (far.empty()) return;
  // The transport to other hosts sends straight from the caller's memory.
  const bool as_it_is = !scaled && !step.coded;
  send_over(
      *transports_[static_cast<size_t>(far[0])], far, nbytes, print,
      [&](void* room) { return as_it_is ? piece.data : fill(room); }, frame);
}

// With more ranks than cores every receiver needs a turn on a core to release it. Half a segment is worth
// that.
bool Executor::worth_opening(size_t nbytes, const Frame& frame) const {
  return limits_.lending || nbytes >= segment_elements(frame.job, frame.item) * frame.item / 2;
}

// Lends the message if that is worth it; returns whether it did.
bool Executor::lend(Transport& transport, const Instruction& step, std::span<const int> peers, Extent piece,
                    const Frame& frame) {
  const size_t nbytes = piece.numel * frame.item;
  if ((step.flags & (kLast | kOpen)) == 0) return false;
  const Program& program = *frame.job.program;
  const bool idle = program.sources().empty();
  const size_t least = std::min(idle ? kLendBytes : kBusyLendBytes, room_for(program));
  if (nbytes < std::min(kOpenBytes, least)) return false;
  const bool lends = (step.flags & kLast) != 0 && (limits_.lending || runs_ahead(step.dst, frame)) &&
                     nbytes >= least && transport.lends(peers);
  const bool open = (step.flags & kOpen) != 0 && !(lends && idle) && nbytes >= kOpenBytes &&
                    transport.opens(piece.data, nbytes) && worth_opening(nbytes, frame);
  if (!open && !lends) return false;
  lent_ = true;
  const unsigned char* from = piece.data;
  const uint64_t print = fingerprint(step.dst, frame);
  if (!open && !accessible(from, nbytes)) from = copies_.emplace_back(from, from + nbytes).data();
  const auto lent = [&] { return transport.lend(peers, nbytes, print, from, open); };
  if (lent()) return true;
  int awaited = transport.blocking_peer();
  frame.waiter.until(awaited, [&] {
    if (lent()) return true;
    transport.assist();
    awaited = transport.blocking_peer();
    return false;
  });
  return true;
}

// fill(room): writes the message there and returns its address, which may be another one.
template <class Fill>
void Executor::send_over(Transport& transport, std::span<const int> peers, size_t nbytes, uint64_t print,
                         Fill fill, const Frame& frame) {
  void* room = transport.reserve(peers, nbytes);
  if (room == nullptr) {
    int awaited = transport.blocking_peer();
    frame.waiter.until(awaited, [&] {
      room = transport.reserve(peers, nbytes);
      if (room == nullptr) transport.assist();
      awaited = transport.blocking_peer();
      return room != nullptr;
    });
  }
  transport.commit(peers, nbytes, print, fill(room));
}

size_t Executor::wire_bytes(size_t numel, bool coded, const Frame& frame) const {
  return coded ? frame.job.coder.nbytes(numel) : numel * frame.item;
}

// Where the encoding error of this piece is kept: at the offset of its chunk in the In or Out buffer.
float* Executor::feedback(ChunkRef ref, const Frame& frame) const {
  float* const kept = frame.job.coder.feedback;
  if (kept == nullptr) return nullptr;
  const Binding& binding = frame.job.binding;
  const bool given = ref.space == Space::kIn || (ref.space == Space::kTmp && binding.in.longest() > 0);
  return kept + (given ? binding.in : binding.out).start(ref.index) + frame.first;
}

// Encodes in parts: values are then still in the cache when they are read again.
void Executor::encode(const Instruction& step, Extent piece, bool scaled, void* codes, const Frame& frame) {
  const Coder& coder = frame.job.coder;
  const bool rounds = (step.flags & kRounds) != 0;
  float* const kept = feedback(step.dst, frame);
  auto* const values = reinterpret_cast<float*>(piece.data);
  if (rounds) about_to_write(piece, frame);
  const size_t part = std::max(coder.whole_blocks(kCodedPartElements), coder.block);
  if ((scaled || kept != nullptr) && values_.size() < 2 * part) values_.resize(2 * part);
  for (size_t first = 0; first < piece.numel; first += part) {
    const size_t count = std::min(part, piece.numel - first);
    const float* from = values + first;
    if (scaled || kept != nullptr) {
      from = values_.data();
      kernels().scale[static_cast<size_t>(DType::kF32)](values_.data(), values + first, count,
                                                        scaled ? frame.job.factor : 1.0);
      for (size_t i = 0; kept != nullptr && i < count; ++i) values_[i] += get(kept + first + i);
    }
    auto* const to = static_cast<unsigned char*>(codes) + coder.nbytes(first);
    // The check before the call excludes it, unless the caller has written to the buffer since.
    if (coder.kernels->encode(to, from, count, {.block = coder.block}) < count)
      throw std::domain_error("a number below zero, which its codec lacks: the buffer was changed meanwhile");
    if (kept != nullptr) {
      float* const decoded = values_.data() + part;
      coder.kernels->decode(decoded, to, count, coder.block);
      for (size_t i = 0; i < count; ++i) {
        const float lost = values_[i] - decoded[i];
        put(kept + first + i,
            lost - lost == 0 ? lost : 0.0f);  // infinity and NaN would never leave the sum
      }
    }
    if (rounds) coder.kernels->decode(values + first, to, count, coder.block);
  }
}

// Copies the bytes of this memory that have not yet been sent.
void Executor::about_to_write(Extent extent, const Frame& frame) {
  if (far_ != nullptr) far_->keep(extent.data, extent.numel * frame.item);
}

void Executor::refuse(int peer, ChunkRef chunk, Message message, bool coded, const Frame& frame) {
  if (coded) message.nbytes = frame.job.coder.numel(message.nbytes) * frame.item;  // the size of the values
  const size_t before = frame.first * frame.item, segment = segment_elements(frame.job, frame.item);
  const uint64_t total =
      (message.fingerprint - frame.job.fingerprint) / 2;  // of elements, if it is the same call
  SizeMismatch sizes;
  sizes.tag = chunk.index;
  sizes.wanted_form = sizes.got_form = static_cast<uint32_t>(frame.job.dtype);
  sizes.wanted_nbytes = whole(chunk, frame) * frame.item;
  sizes.scratch = chunk.space == Space::kTmp;
  if (frame.opening && frame.job.program->equal_blocks() && total < kMostElements) {
    sizes.got_nbytes = total * frame.item - message.nbytes;
    frame.waiter.refuse(peer, frame.job.fingerprint, message.nbytes, sizes);
  }
  sizes.got_nbytes = before;
  sizes.more = message.nbytes == segment * frame.item ||
               message.nbytes == segments_ahead(segment, frame.item) * segment * frame.item;
  frame.waiter.refuse(peer, message.fingerprint, message.nbytes, sizes);
}

// The next message of `peer`, or part of it. It has to belong to this operation and have this size.
// chunk: the chunk it carries, or goes into.
template <class Peek>
Message Executor::await(int peer, ChunkRef chunk, size_t nbytes, const Frame& frame, Peek peek, bool coded) {
  Transport& transport = *transports_[static_cast<size_t>(peer)];
  Message message;
  frame.waiter.until(peer, [&] {
    if (peek(transport, message)) return true;
    if (lent_) transport.assist();
    return false;
  });
  if (message.fingerprint != fingerprint(chunk, frame) || message.nbytes != nbytes) [[unlikely]]
    refuse(peer, chunk, message, coded, frame);
  if (message.open) {
    open_ = true;
    opened_.store(opened_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  return message;
}

// Data read in place is valid only if its sender had not aborted before the read ended.
void Executor::check_open(const Frame& frame) {
  if (!std::exchange(open_, false)) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  frame.waiter.throw_if_aborted();
}

void Executor::receive(const Instruction& step, const Frame& frame) {
  if (step.coded) return reduce(step, frame);  // with one input
  const Extent piece = find_message(step.dst, frame);
  if (piece.numel == 0 && !frame.opening) return;
  about_to_write(piece, frame);
  const int peer = step.peers[0];
  const size_t nbytes = piece.numel * frame.item;
  const Message message = await(peer, step.dst, nbytes, frame, [&](Transport& transport, Message& found) {
    return transport.peek(peer, nbytes, piece.data, found);
  });
  if (message.lent)
    fetch(peer, message, piece.data, frame);
  else if (message.nbytes > 0 && message.data != piece.data)
    kernels().copy(piece.data, message.data, message.nbytes);
  check_open(frame);
  transports_[static_cast<size_t>(peer)]->release(peer);
}

void Executor::fetch(int peer, const Message& message, void* into, const Frame& frame) {
  Transport& transport = *transports_[static_cast<size_t>(peer)];
  try {
    frame.waiter.until(peer, [&] { return transport.fetch(peer, message, into); });
  } catch (...) {
    if (!transport.abandon(peer)) unsettled_ = true;
    throw;
  }
}

// The whole message of a rank of this host. input: its place among the inputs of the Reduce.
const void* Executor::near_input(int peer, size_t input, ChunkRef chunk, size_t nbytes, const Frame& frame) {
  const Message message = await(peer, chunk, nbytes, frame, [&](Transport& transport, Message& found) {
    return transport.peek(peer, nbytes, nullptr, found);
  });
  if (!message.lent) return message.data;
  if (fetched_.size() <= input) fetched_.resize(input + 1);
  if (fetched_[input].size() < nbytes) fetched_[input].resize(nbytes);
  fetch(peer, message, fetched_[input].data(), frame);
  return fetched_[input].data();
}

// Finds the inputs of a Reduce and returns their number. Inputs that arrive in parts go into part_inputs_.
size_t Executor::find_inputs(const Instruction& step, size_t nbytes, const Frame& frame) {
  const Job& job = frame.job;
  part_inputs_.clear();
  size_t k = 0;
  const auto add_own = [&] {
    if (static_cast<int32_t>(k) != step.own_at) return;
    const Extent own = find(step.own, frame);
    inputs_[k++] = own.data;
    if (job.op != ReduceOp::kPremulSum || (step.flags & kRaw) == 0) return;
    unsigned char* const scaled =
        scratch_.data() + static_cast<size_t>(job.program->chunks(Space::kTmp)) * scratch_stride_;
    kernels().scale[static_cast<size_t>(job.dtype)](scaled, own.data, own.numel, job.factor);
    inputs_[k - 1] = scaled;
  };
  add_own();
  for (size_t i = 0; i < step.peers.size(); ++i) {
    const int peer = step.peers[i];
    if (transports_[static_cast<size_t>(peer)] == far_ || step.codes_from(i))
      part_inputs_.push_back({k, peer, step.codes_from(i), nullptr});
    else
      inputs_[k] = near_input(peer, k, step.dst, nbytes, frame);
    ++k;
    add_own();
  }
  return k;
}

// The address of values [first, first + count), or of their codes, in a message of `numel` values.
const unsigned char* Executor::take_part(const PartInput& input, ChunkRef chunk, size_t numel, size_t first,
                                         size_t count, const Frame& frame) {
  const size_t nbytes = wire_bytes(numel, input.coded, frame), at = wire_bytes(first, input.coded, frame);
  const size_t length = wire_bytes(first + count, input.coded, frame) - at;
  const Message message = await(
      input.peer, chunk, nbytes, frame,
      [&](Transport& transport, Message& found) {
        return transport.peek_part(input.peer, nbytes, at, length, found);
      },
      input.coded);
  return static_cast<const unsigned char*>(message.data);
}

// Values [at, at + count) of a part. into: where to decode codes; nullptr: into decoded_.
const void* Executor::values_of(const PartInput& input, size_t at, size_t count, float* into,
                                const Frame& frame) {
  const unsigned char* const from = input.data + wire_bytes(at, input.coded, frame);
  if (!input.coded) return from;
  if (into == nullptr) {
    if (decoded_.size() <= input.place) decoded_.resize(input.place + 1);
    std::vector<float>& decoded = decoded_[input.place];
    if (decoded.size() < count) decoded.resize(count);
    into = decoded.data();
  }
  frame.job.coder.kernels->decode(into, from, count, frame.job.coder.block);
  return into;
}

// Data from other hosts is reduced in parts, as it arrives. Codes are decoded in parts, so that the values
// are still in the cache when they are reduced.
void Executor::reduce(const Instruction& step, const Frame& frame) {
  const Extent result = find(step.dst, frame);
  if (result.numel == 0 && !frame.opening) return;
  about_to_write(result, frame);
  const Job& job = frame.job;
  const size_t item = frame.item, nbytes = result.numel * item, k = find_inputs(step, nbytes, frame);
  const Coder& coder = job.coder;
  const auto blocks = [&](size_t most) { return std::max(coder.whole_blocks(most), coder.block); };
  const size_t far = step.coded ? blocks(kPartBytes / item * coder.times_shorter()) : kPartBytes / item;
  const size_t part = part_inputs_.empty() || far_ == nullptr ? result.numel : far;
  const size_t at_once = step.coded ? blocks(kCodedPartElements) : part;
  const bool averaged = job.op == ReduceOp::kAvg && (step.flags & kFinal) != 0;
  const bool moves = step.opcode == Opcode::kRecv;  // decodes straight into the result
  auto* const values = reinterpret_cast<float*>(result.data);
  const Finish finish{averaged ? static_cast<double>(job.program->size()) : 1.0};
  for (size_t first = 0;;) {
    const size_t count = std::min(part, result.numel - first);
    for (PartInput& input : part_inputs_)
      input.data = take_part(input, step.dst, result.numel, first, count, frame);
    for (size_t at = 0; at < count; at += at_once) {
      const size_t n = std::min(at_once, count - at);
      for (const PartInput& input : part_inputs_)
        inputs_[input.place] = values_of(input, at, n, moves ? values + first + at : nullptr, frame);
      if (!moves)
        kernels().reduce[static_cast<size_t>(job.dtype)][static_cast<size_t>(job.op)](
            result.data + (first + at) * item, inputs_.data(), k, n, finish);
      for (size_t i = 0; i < k; ++i) inputs_[i] = static_cast<const unsigned char*>(inputs_[i]) + n * item;
    }
    if ((first += count) >= result.numel) break;
  }
  check_open(frame);
  for (int peer : step.peers) transports_[static_cast<size_t>(peer)]->release(peer);
}

}  // namespace unisono
