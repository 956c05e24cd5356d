#include "engine/executor.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "kernels/copy.hpp"
#include "protocol/zero_copy.hpp"

namespace unisono {
namespace {

constexpr size_t kSliceAlign = 4096;
constexpr size_t kLineElementsBytes = 64;
// Bytes read from a socket before they are reduced: they should still be in the cache then.
constexpr size_t kPartBytes = 128 * 1024;
// Values that are encoded or decoded at a time: they stay in a core's first-level cache for the next step.
constexpr size_t kCodedPartElements = 4096;
// A message of at least this size is sent with zero copy rather than staged. Zero copy costs system calls,
// and a fixed time for each page; a staged message is copied once more, within the caches, see `warm_bytes`.
constexpr size_t kZeroCopyBytes = 512 * 1024;
// Where all messages of a plan could be sent with zero copy, calls to this size are staged in segments.
constexpr size_t kStagedBytes = 4 * 1024 * 1024;

// A message of at least this size is opened: receivers read it in place, without a copy, but must release it
// before the call ends. A sender that has nothing else to do sends with zero copy instead: then both ends
// copy.
constexpr size_t kMappedBytes = 16 * 1024;

// With more ranks than cores zero copy needs a turn of every receiver on a core. A chunk of this size is
// worth it.
constexpr size_t kAheadBytes = 1024 * 1024;

constexpr uint64_t kMostElements = uint64_t{1} << 48;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

// ---- Chunks ----------------------------------------------------------------------------------------

// An even cut starts every chunk on a cache line of the buffer. Equal blocks are cut exactly.
ChunkList::ChunkList(unsigned char* data, size_t numel, int32_t count, size_t item, bool equal_blocks,
                     size_t least)
    : data_(data), numel_(numel) {
  const size_t parts = static_cast<size_t>(std::max(count, 1));
  chunk_numel_ = (numel + parts - 1) / parts;
  if (!equal_blocks && parts > 1)
    chunk_numel_ = round_up(chunk_numel_, least > 0 ? least : kLineElementsBytes / item);
  chunk_numel_ = std::max<size_t>(chunk_numel_, 1);
}

size_t ChunkList::numel(int32_t index) const {
  const auto i = static_cast<size_t>(index);
  if (!list_.empty()) return i < list_.size() ? list_[i].numel : 0;
  return numel_ > i * chunk_numel_ ? std::min(chunk_numel_, numel_ - i * chunk_numel_) : 0;
}

BufferExtent ChunkList::slice(int32_t index, size_t first, size_t at_most, size_t item) const {
  const size_t length = numel(index);
  const size_t count = length > first ? std::min(at_most, length - first) : 0;
  if (count == 0) return {nullptr, 0};
  unsigned char* const start = list_.empty() ? data_ + static_cast<size_t>(index) * chunk_numel_ * item
                                             : list_[static_cast<size_t>(index)].data;
  return {start + first * item, count};
}

size_t ChunkList::longest() const {
  size_t most = list_.empty() ? std::min(chunk_numel_, numel_) : 0;
  for (const BufferExtent& extent : list_) most = std::max(most, extent.numel);
  return most;
}

// ---- Coding ---------------------------------------------------------------------------------------

size_t EdgeCoding::numel(size_t wanted) const {
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

struct Executor::SegmentContext {
  const CollectiveTask& task;
  Waiter& waiter;
  size_t item;
  size_t first;  // the segment: elements [first, first + segment) of every chunk
  size_t segment;
  bool first_segment;  // the first segment: its messages are sent even when they are empty
};

Executor::~Executor() {
  if (!has_open_transfers_) return;
  never_free(std::move(fetched_inputs_));
  never_free(std::move(scratch_));
}

Executor::Executor(std::vector<Transport*> transports, Transport* remote, ExecutorLimits limits)
    : transports_(std::move(transports)), remote_(remote), limits_(limits) {}

size_t Executor::message_limit(const Program& program) const {
  return limits_.capacity / static_cast<size_t>(program.in_flight() + 1);
}

// Whether all messages of a plan that allows zero copy are staged all the same.
bool Executor::stages(const CollectiveTask& task, size_t item) const {
  return limits_.zero_copy && task.numel > 0 && task.numel * item <= kStagedBytes;
}

// A sender can have the messages of two segments outstanding, so that segments overlap.
size_t Executor::segment_elements(const CollectiveTask& task, size_t item) const {
  const Program& program = *task.program;
  const auto chunks =
      static_cast<size_t>(std::max({1, program.chunks(Space::kOut), program.chunks(Space::kIn)}));
  // Between hosts the time depends on the size of the codes. All messages are codes where no two ranks share
  // a host.
  const size_t shorter = program.coded() && remote_ != nullptr ? task.coding.times_shorter() : 1;
  const size_t fair = limits_.segment_bytes / chunks * shorter;
  // Messages that do not fit into the staging memory are sent with zero copy.
  if (program.can_zero_copy() && limits_.zero_copy_segment_bytes > 0 && !stages(task, item))
    return task.whole_items(
        std::max<size_t>(1, limits_.zero_copy_segment_bytes / chunks / kSliceAlign * kSliceAlign / item));
  const size_t room = message_limit(program) * (limits_.one_rank_per_host ? shorter : 1);
  const size_t bytes = std::min(fair, room);
  const size_t most = (bytes >= kSliceAlign ? bytes / kSliceAlign * kSliceAlign : bytes) / item;
  return task.whole_items(std::max<size_t>(1, task.coding.whole_blocks(most)));
}

void Executor::prepare_scratch(const CollectiveTask& task, size_t segment, size_t item) {
  const auto chunks = static_cast<size_t>(task.program->chunks(Space::kTmp));
  const size_t spare = task.op == ReduceOp::kPremulSum ? 1 : 0;
  scratch_stride_ = round_up(segment * item, kLineElementsBytes);
  if (scratch_.size() < (chunks + spare) * scratch_stride_)
    scratch_.resize((chunks + spare) * scratch_stride_);
  if (inputs_.size() < task.program->widest_reduce()) inputs_.resize(task.program->widest_reduce());
}

void Executor::check_memory(const CollectiveTask& task, size_t item, Waiter& waiter) {
  const BufferBinding& binding = task.binding;
  const auto check = [&](const ChunkList& buffers, ptrdiff_t behind, FaultKind fault) {
    buffers.each([&](const BufferExtent& one) {
      const size_t nbytes = one.numel * item;
      if (nbytes >= kCheckedBytes && !is_present(one.data + behind, nbytes)) waiter.fail_here(fault);
    });
  };
  check(binding.out, 0, task.program->writes_out() ? FaultKind::kUnwritable : FaultKind::kUnreadable);
  check(binding.in, 0, FaultKind::kUnreadable);
  if (binding.untouched != 0) check(binding.out, binding.untouched, FaultKind::kUnreadable);
}

void Executor::run(const CollectiveTask& task, Waiter& waiter) {
  const size_t item = itemsize(task.dtype);
  const size_t longest = std::max(task.binding.out.longest(), task.binding.in.longest());
  const auto chunks =
      static_cast<size_t>(task.program->chunks(Space::kOut) + task.program->chunks(Space::kIn));
  if (chunks * longest * item >= kCheckedBytes) [[unlikely]]
    check_memory(task, item, waiter);
  const size_t segment = std::max<size_t>(1, std::min(segment_elements(task, item), longest));
  prepare_scratch(task, segment, item);
  size_t first = 0;
  do {
    if (first > 0) waiter.throw_if_aborted();
    const SegmentContext context{task, waiter, item, first, segment, first == 0};
    for (const Instruction& instruction : task.program->instructions()) step(instruction, context);
    first += segment;
  } while (first < longest);
  if (zero_copy_in_flight_) complete_zero_copy(task, waiter);
}

// Waits until all zero-copy memory belongs to the caller again. Meanwhile this rank helps slower receivers to
// copy.
void Executor::complete_zero_copy(const CollectiveTask& task, Waiter& waiter) {
  zero_copy_in_flight_ = false;
  for (int peer = 0; peer < task.program->size(); ++peer) {
    Transport* const transport = transports_[static_cast<size_t>(peer)];
    if (transport == nullptr || transport->zero_copy_complete()) continue;
    int awaited = peer;
    waiter.until(awaited, [&] {
      transport->progress_zero_copy();
      const bool zero_copy_complete = transport->zero_copy_complete();
      awaited = transport->blocking_peer();
      return zero_copy_complete;
    });
  }
  copies_.clear();
}

void Executor::step(const Instruction& step, const SegmentContext& context) {
  switch (step.opcode) {
    case Opcode::kSend:
      return send(step, context);
    case Opcode::kRecv:
      return receive(step, context);
    case Opcode::kReduce:
      return reduce(step, context);
    case Opcode::kCopy: {
      const BufferExtent from = as_read(locate(step.own, context), step.own, step, context);
      const BufferExtent to = locate(step.dst, context);
      if (from.numel == 0 || from.data == to.data) return;
      about_to_write(to, context);
      kernels().copy(to.data, from.data, from.numel * context.item);
      return;
    }
  }
  __builtin_unreachable();
}

BufferExtent Executor::locate(ChunkRef ref, const SegmentContext& context) {
  if (ref.space != Space::kTmp)
    return context.task.binding.of(ref.space).slice(ref.index, context.first, context.segment, context.item);
  const size_t length = chunk_numel(ref, context);
  return {scratch_.data() + static_cast<size_t>(ref.index) * scratch_stride_,
          length > context.first ? std::min(context.segment, length - context.first) : 0};
}

// A chunk that a step reads: of an input beside the output while it is untouched.
BufferExtent Executor::as_read(BufferExtent piece, ChunkRef ref, const Instruction& step,
                               const SegmentContext& context) {
  if (piece.numel > 0 && ref.space == Space::kOut && (step.flags & kRaw) != 0)
    piece.data += context.task.binding.untouched;
  return piece;
}

// Elements of a chunk in all segments. A Tmp chunk is as long as the In or Out chunk of the same index.
size_t Executor::chunk_numel(ChunkRef ref, const SegmentContext& context) const {
  const BufferBinding& binding = context.task.binding;
  if (ref.space != Space::kTmp) return binding.of(ref.space).numel(ref.index);
  const bool in_model = binding.in.longest() > 0;
  const int32_t chunks = context.task.program->chunks(in_model ? Space::kIn : Space::kOut);
  return (in_model ? binding.in : binding.out).numel(ref.index < chunks ? ref.index : 0);
}

// The fingerprint of a message. In the first message of a block it also carries the length of the block, in
// which two ranks' calls may differ. Otherwise a block that is too long by whole segments would be found only
// in the next call.
uint64_t Executor::fingerprint(ChunkRef chunk, const SegmentContext& context) const {
  const CollectiveTask& task = context.task;
  if (!task.program->equal_blocks() || !context.first_segment) return task.fingerprint;
  return task.fingerprint + 2 * chunk_numel(chunk, context);  // odd, as every operation's
}

bool Executor::runs_ahead(ChunkRef ref, const SegmentContext& context) const {
  if (limits_.ahead_bytes == 0 || !context.task.program->runs_ahead()) return false;
  return context.task.binding.of(ref.space).numel(ref.index) * context.item >= kAheadBytes;
}

size_t Executor::segments_ahead(size_t segment, size_t item) const {
  return std::max<size_t>(1, limits_.ahead_bytes / (segment * item));
}

// The part of a chunk that one message carries: this segment or, for messages that run ahead, `many` segments
// at every `many`-th segment. Sender and receiver compute the same.
BufferExtent Executor::locate_message(ChunkRef ref, const SegmentContext& context) {
  if (!runs_ahead(ref, context)) return locate(ref, context);
  const size_t many = segments_ahead(context.segment, context.item);
  if (context.first / context.segment % many != 0) return {nullptr, 0};
  return context.task.binding.of(ref.space).slice(ref.index, context.first, many * context.segment,
                                                  context.item);
}

void Executor::send(const Instruction& step, const SegmentContext& context) {
  const BufferExtent piece = as_read(locate_message(step.dst, context), step.dst, step, context);
  if ((piece.numel == 0 && !context.first_segment) || step.peers.empty()) return;
  const bool scaled = (step.flags & kRaw) != 0 && context.task.op == ReduceOp::kPremulSum;
  const std::span<const int> peers(step.peers), local = peers.first(step.local_receivers);
  const std::span<const int> remote = peers.subspan(step.local_receivers);
  const uint64_t message_fingerprint = fingerprint(step.dst, context);
  const size_t nbytes = wire_bytes(piece.numel, step.coded, context);
  const bool encoded =
      step.coded && !local.empty() && !remote.empty();  // once: the error is accumulated once
  if (encoded) {
    codes_.resize(std::max(codes_.size(), nbytes));
    encode(step, piece, scaled, codes_.data(), context);
  }
  const auto fill = [&](void* room) {
    if (encoded)
      kernels().copy(room, codes_.data(), nbytes);
    else if (step.coded)
      encode(step, piece, scaled, room, context);
    else if (scaled)
      kernels().scale[static_cast<size_t>(context.task.dtype)](room, piece.data, piece.numel,
                                                               context.task.factor);
    else if (nbytes > 0)
      shared_copy_.copy(room, piece.data, nbytes);
    return room;
  };
  const bool sent_in_place =
      !scaled && !step.coded && !local.empty() &&
      send_zero_copy(*transports_[static_cast<size_t>(local[0])], step, local, piece, context);
  if (!local.empty() && !sent_in_place)
    send_over(*transports_[static_cast<size_t>(local[0])], local, nbytes, message_fingerprint, fill, context);
  if (remote.empty()) return;
  // The transport to other hosts sends straight from the caller's memory.
  const bool as_it_is = !scaled && !step.coded;
  send_over(
      *transports_[static_cast<size_t>(remote[0])], remote, nbytes, message_fingerprint,
      [&](void* room) { return as_it_is ? piece.data : fill(room); }, context);
}

// With more ranks than cores every receiver needs a turn on a core to release it. Half a segment is worth
// that.
bool Executor::worth_mapping(size_t nbytes, const SegmentContext& context) const {
  return limits_.zero_copy || nbytes >= segment_elements(context.task, context.item) * context.item / 2;
}

// Sends the message with zero copy if that is worth it; returns whether it did.
bool Executor::send_zero_copy(Transport& transport, const Instruction& step, std::span<const int> peers,
                              BufferExtent piece, const SegmentContext& context) {
  const size_t nbytes = piece.numel * context.item;
  if ((step.flags & (kLast | kMappable)) == 0) return false;
  const Program& program = *context.task.program;
  const bool idle = program.sources().empty();
  const bool staged = program.can_zero_copy() && stages(context.task, context.item);
  const size_t least = staged ? SIZE_MAX : std::min(kZeroCopyBytes, message_limit(program));
  if (nbytes < std::min(kMappedBytes, least)) return false;
  const bool can_zero_copy = (step.flags & kLast) != 0 &&
                             (limits_.zero_copy || runs_ahead(step.dst, context)) && nbytes >= least &&
                             transport.can_zero_copy(peers);
  const bool mapped = (step.flags & kMappable) != 0 && !(can_zero_copy && idle && nbytes >= kZeroCopyBytes) &&
                      nbytes >= kMappedBytes && transport.can_map(piece.data, nbytes) &&
                      worth_mapping(nbytes, context);
  if (!mapped && !can_zero_copy) return false;
  zero_copy_in_flight_ = true;
  const unsigned char* from = piece.data;
  const uint64_t message_fingerprint = fingerprint(step.dst, context);
  if (!mapped && !accessible(from, nbytes)) {
    if (!readable(from, nbytes)) context.waiter.fail_here(FaultKind::kUnreadable);
    from = copies_.emplace_back(from, from + nbytes).data();
  }
  const auto sent_in_place = [&] {
    return transport.send_zero_copy(peers, nbytes, message_fingerprint, from, mapped);
  };
  if (sent_in_place()) return true;
  int awaited = transport.blocking_peer();
  context.waiter.until(awaited, [&] {
    if (sent_in_place()) return true;
    transport.progress_zero_copy();
    awaited = transport.blocking_peer();
    return false;
  });
  return true;
}

// fill(room): writes the message there and returns its address, which may be another one.
template <class Fill>
void Executor::send_over(Transport& transport, std::span<const int> peers, size_t nbytes,
                         uint64_t message_fingerprint, Fill fill, const SegmentContext& context) {
  void* room = transport.reserve(peers, nbytes);
  if (room == nullptr) {
    int awaited = transport.blocking_peer();
    context.waiter.until(awaited, [&] {
      room = transport.reserve(peers, nbytes);
      if (room == nullptr) transport.progress_zero_copy();
      awaited = transport.blocking_peer();
      return room != nullptr;
    });
  }
  transport.commit(peers, nbytes, message_fingerprint, fill(room));
}

size_t Executor::wire_bytes(size_t numel, bool coded, const SegmentContext& context) const {
  return coded ? context.task.coding.nbytes(numel) : numel * context.item;
}

// Where the encoding error of this piece is kept: at the offset of its chunk in the In or Out buffer.
float* Executor::feedback(ChunkRef ref, const SegmentContext& context) const {
  float* const accumulated = context.task.coding.feedback;
  if (accumulated == nullptr) return nullptr;
  const BufferBinding& binding = context.task.binding;
  const bool given = ref.space == Space::kIn || (ref.space == Space::kTmp && binding.in.longest() > 0);
  return accumulated + (given ? binding.in : binding.out).start(ref.index) + context.first;
}

// Encodes in parts: values are then still in the cache when they are read again.
void Executor::encode(const Instruction& step, BufferExtent piece, bool scaled, void* codes,
                      const SegmentContext& context) {
  const EdgeCoding& coding = context.task.coding;
  const bool rounds = (step.flags & kRounds) != 0;
  float* const accumulated = feedback(step.dst, context);
  auto* const values = reinterpret_cast<float*>(piece.data);
  if (rounds) about_to_write(piece, context);
  const size_t part = std::max(coding.whole_blocks(kCodedPartElements), coding.block);
  if ((scaled || accumulated != nullptr) && values_.size() < 2 * part) values_.resize(2 * part);
  for (size_t first = 0; first < piece.numel; first += part) {
    const size_t count = std::min(part, piece.numel - first);
    const float* from = values + first;
    if (scaled || accumulated != nullptr) {
      from = values_.data();
      kernels().scale[static_cast<size_t>(DType::kF32)](values_.data(), values + first, count,
                                                        scaled ? context.task.factor : 1.0);
      for (size_t i = 0; accumulated != nullptr && i < count; ++i) values_[i] += get(accumulated + first + i);
    }
    auto* const to = static_cast<unsigned char*>(codes) + coding.nbytes(first);
    // The check before the call excludes it, unless the caller has written to the buffer since.
    if (coding.kernels->encode(to, from, count, {.block = coding.block}) < count)
      throw std::domain_error("a number below zero, which its codec lacks: the buffer was changed meanwhile");
    if (accumulated != nullptr) {
      float* const decoded = values_.data() + part;
      coding.kernels->decode(decoded, to, count, coding.block);
      for (size_t i = 0; i < count; ++i) {
        const float rounding_error = values_[i] - decoded[i];
        put(accumulated + first + i,
            rounding_error - rounding_error == 0 ? rounding_error
                                                 : 0.0f);  // infinity and NaN would never leave the sum
      }
    }
    if (rounds) coding.kernels->decode(values + first, to, count, coding.block);
  }
}

// Copies the bytes of this memory that have not yet been sent.
void Executor::about_to_write(BufferExtent extent, const SegmentContext& context) {
  if (remote_ != nullptr) remote_->copy_unsent(extent.data, extent.numel * context.item);
}

void Executor::refuse(int peer, ChunkRef chunk, MessageView message, bool coded,
                      const SegmentContext& context) {
  if (coded)
    message.nbytes = context.task.coding.numel(message.nbytes) * context.item;  // the size of the values
  const size_t before = context.first * context.item, segment = segment_elements(context.task, context.item);
  const uint64_t total =
      (message.fingerprint - context.task.fingerprint) / 2;  // of elements, if it is the same call
  SizeMismatch sizes;
  sizes.tag = chunk.index;
  sizes.expected_form = sizes.sent_form = static_cast<uint32_t>(context.task.dtype);
  sizes.expected_nbytes = chunk_numel(chunk, context) * context.item;
  sizes.scratch = chunk.space == Space::kTmp;
  if (context.first_segment && context.task.program->equal_blocks() && total < kMostElements) {
    sizes.sent_nbytes = total * context.item - message.nbytes;
    context.waiter.refuse(peer, context.task.fingerprint, message.nbytes, sizes);
  }
  sizes.sent_nbytes = before;
  sizes.more = message.nbytes == segment * context.item ||
               message.nbytes == segments_ahead(segment, context.item) * segment * context.item;
  context.waiter.refuse(peer, message.fingerprint, message.nbytes, sizes);
}

// The next message of `peer`, or part of it. It has to belong to this operation and have this size.
// chunk: the chunk it carries, or goes into.
template <class Peek>
MessageView Executor::await(int peer, ChunkRef chunk, size_t nbytes, const SegmentContext& context, Peek peek,
                            bool coded) {
  Transport& transport = *transports_[static_cast<size_t>(peer)];
  MessageView message;
  context.waiter.until(peer, [&] {
    if (peek(transport, message)) return true;
    if (zero_copy_in_flight_) transport.progress_zero_copy();
    return false;
  });
  if (message.fingerprint != fingerprint(chunk, context) || message.nbytes != nbytes) [[unlikely]]
    refuse(peer, chunk, message, coded, context);
  if (message.mapped) {
    reads_mapped_ = true;
    mapped_messages_.store(mapped_messages_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  return message;
}

// Data read in place is valid only if its sender had not aborted before the read ended.
void Executor::check_mapped(const SegmentContext& context) {
  if (!std::exchange(reads_mapped_, false)) return;
  std::atomic_thread_fence(std::memory_order_acquire);  // R3: orders the reads before the check
  context.waiter.throw_if_aborted();
}

void Executor::receive(const Instruction& step, const SegmentContext& context) {
  if (step.coded) return reduce(step, context);  // with one input
  const BufferExtent piece = locate_message(step.dst, context);
  if (piece.numel == 0 && !context.first_segment) return;
  about_to_write(piece, context);
  const int peer = step.peers[0];
  const size_t nbytes = piece.numel * context.item;
  const MessageView message =
      await(peer, step.dst, nbytes, context, [&](Transport& transport, MessageView& found) {
        return transport.peek(peer, nbytes, piece.data, found);
      });
  if (message.zero_copy)
    fetch(peer, message, piece.data, context);
  else if (message.nbytes > 0 && message.data != piece.data)
    kernels().copy(piece.data, message.data, message.nbytes);
  check_mapped(context);
  transports_[static_cast<size_t>(peer)]->release(peer);
}

void Executor::fetch(int peer, const MessageView& message, void* into, const SegmentContext& context) {
  Transport& transport = *transports_[static_cast<size_t>(peer)];
  try {
    context.waiter.until(peer, [&] { return transport.copy_zero_copy(peer, message, into); });
  } catch (...) {
    if (!transport.cancel_zero_copy(peer)) has_open_transfers_ = true;
    throw;
  }
}

// The whole message of a rank of this host. input: its place among the inputs of the Reduce.
const void* Executor::local_input(int peer, size_t input, ChunkRef chunk, size_t nbytes,
                                  const SegmentContext& context) {
  const MessageView message = await(
      peer, chunk, nbytes, context,
      [&](Transport& transport, MessageView& found) { return transport.peek(peer, nbytes, nullptr, found); });
  if (!message.zero_copy) return message.data;
  if (fetched_inputs_.size() <= input) fetched_inputs_.resize(input + 1);
  if (fetched_inputs_[input].size() < nbytes) fetched_inputs_[input].resize(nbytes);
  fetch(peer, message, fetched_inputs_[input].data(), context);
  return fetched_inputs_[input].data();
}

// Finds the inputs of a Reduce and returns their number. Inputs that arrive in parts go into partial_inputs_.
size_t Executor::locate_inputs(const Instruction& step, size_t nbytes, const SegmentContext& context) {
  const CollectiveTask& task = context.task;
  partial_inputs_.clear();
  size_t k = 0;
  const auto add_own = [&] {
    if (static_cast<int32_t>(k) != step.own_input_index) return;
    const BufferExtent own = as_read(locate(step.own, context), step.own, step, context);
    inputs_[k++] = own.data;
    if (task.op != ReduceOp::kPremulSum || (step.flags & kRaw) == 0) return;
    unsigned char* const scaled =
        scratch_.data() + static_cast<size_t>(task.program->chunks(Space::kTmp)) * scratch_stride_;
    kernels().scale[static_cast<size_t>(task.dtype)](scaled, own.data, own.numel, task.factor);
    inputs_[k - 1] = scaled;
  };
  add_own();
  for (size_t i = 0; i < step.peers.size(); ++i) {
    const int peer = step.peers[i];
    if (transports_[static_cast<size_t>(peer)] == remote_ || step.codes_from(i))
      partial_inputs_.push_back({k, peer, step.codes_from(i), nullptr});
    else
      inputs_[k] = local_input(peer, k, step.dst, nbytes, context);
    ++k;
    add_own();
  }
  return k;
}

// The address of values [first, first + count), or of their codes, in a message of `numel` values.
const unsigned char* Executor::take_part(const PartialInput& input, ChunkRef chunk, size_t numel,
                                         size_t first, size_t count, const SegmentContext& context) {
  const size_t nbytes = wire_bytes(numel, input.coded, context), at = wire_bytes(first, input.coded, context);
  const size_t length = wire_bytes(first + count, input.coded, context) - at;
  const MessageView message = await(
      input.peer, chunk, nbytes, context,
      [&](Transport& transport, MessageView& found) {
        return transport.peek_part(input.peer, nbytes, at, length, found);
      },
      input.coded);
  return static_cast<const unsigned char*>(message.data);
}

// Values [at, at + count) of a part. into: where to decode codes; nullptr: into decoded_.
const void* Executor::values_of(const PartialInput& input, size_t at, size_t count, float* into,
                                const SegmentContext& context) {
  const unsigned char* const from = input.data + wire_bytes(at, input.coded, context);
  if (!input.coded) return from;
  if (into == nullptr) {
    if (decoded_.size() <= input.index) decoded_.resize(input.index + 1);
    std::vector<float>& decoded = decoded_[input.index];
    if (decoded.size() < count) decoded.resize(count);
    into = decoded.data();
  }
  context.task.coding.kernels->decode(into, from, count, context.task.coding.block);
  return into;
}

// Data from other hosts is reduced in parts, as it arrives. Codes are decoded in parts, so that the values
// are still in the cache when they are reduced.
void Executor::reduce(const Instruction& step, const SegmentContext& context) {
  const BufferExtent result = locate(step.dst, context);
  if (result.numel == 0 && !context.first_segment) return;
  about_to_write(result, context);
  const CollectiveTask& task = context.task;
  const size_t item = context.item, nbytes = result.numel * item, k = locate_inputs(step, nbytes, context);
  const EdgeCoding& coding = task.coding;
  const auto blocks = [&](size_t most) { return std::max(coding.whole_blocks(most), coding.block); };
  const size_t remote =
      step.coded ? blocks(kPartBytes / item * coding.times_shorter()) : task.whole_items(kPartBytes / item);
  const size_t part = partial_inputs_.empty() || remote_ == nullptr ? result.numel : remote;
  const size_t values_at_once = step.coded ? blocks(kCodedPartElements) : part;
  const bool averaged = task.op == ReduceOp::kAvg && (step.flags & kFinal) != 0;
  const bool only_decodes = step.opcode == Opcode::kRecv;  // decodes straight into the result
  auto* const values = reinterpret_cast<float*>(result.data);
  const PostOperation finish{averaged ? static_cast<double>(task.program->size()) : 1.0};
  for (size_t first = 0;;) {
    const size_t count = std::min(part, result.numel - first);
    for (PartialInput& input : partial_inputs_)
      input.data = take_part(input, step.dst, result.numel, first, count, context);
    for (size_t at = 0; at < count; at += values_at_once) {
      const size_t n = std::min(values_at_once, count - at);
      for (const PartialInput& input : partial_inputs_)
        inputs_[input.index] = values_of(input, at, n, only_decodes ? values + first + at : nullptr, context);
      if (task.combiner != nullptr) {
        if (!task.combiner->combine(result.data + (first + at) * item, inputs_.data(), k, n * item))
          context.waiter.fail_here(FaultKind::kInterrupted);
      } else if (!only_decodes) {
        kernels().reduce[static_cast<size_t>(task.dtype)][static_cast<size_t>(task.op)](
            result.data + (first + at) * item, inputs_.data(), k, n, finish);
      }
      for (size_t i = 0; i < k; ++i) inputs_[i] = static_cast<const unsigned char*>(inputs_[i]) + n * item;
    }
    if ((first += count) >= result.numel) break;
  }
  check_mapped(context);
  for (int peer : step.peers) transports_[static_cast<size_t>(peer)]->release(peer);
}

}  // namespace unisono
