// Runs programs: segment by segment, step by step, over the transport of each edge.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/program.hpp"
#include "kernels/dtype.hpp"
#include "kernels/reduce.hpp"
#include "protocol/shared_copy.hpp"
#include "protocol/waiter.hpp"
#include "transport/transport.hpp"

namespace unisono {

// A piece of the caller's memory.
struct BufferExtent {
  unsigned char* data;
  size_t numel;
};

// The chunks of one space: an even cut of one buffer, or a list of buffers.
class ChunkList {
 public:
  ChunkList() = default;
  // least: chunks of an even cut are a multiple of it; 0: of a cache line.
  ChunkList(unsigned char* data, size_t numel, int32_t count, size_t item, bool equal_blocks,
            size_t least = 0);
  explicit ChunkList(std::vector<BufferExtent> list) : list_(std::move(list)) {}

  // Elements [first, first + at_most) of chunk `index`, cut at its end.
  BufferExtent slice(int32_t index, size_t first, size_t at_most, size_t item) const;
  size_t longest() const;
  template <class Visit>
  void each(Visit visit) const {
    if (list_.empty()) visit(BufferExtent{data_, numel_});
    for (const BufferExtent& extent : list_) visit(extent);
  }
  size_t numel(int32_t index) const;
  // The first element of chunk `index` of one buffer that is cut.
  size_t start(int32_t index) const { return static_cast<size_t>(index) * chunk_numel_; }
  bool holds(int32_t index) const {
    return !list_.empty() ? static_cast<size_t>(index) < list_.size() : chunk_numel_ > 0;
  }

 private:
  std::vector<BufferExtent> list_;
  unsigned char* data_ = nullptr;
  size_t numel_ = 0;
  size_t chunk_numel_ = 0;
};

struct BufferBinding {
  ChunkList out, in;
  // Of a call in place that has an input as well: how far behind `out` in memory its input is. Untouched
  // chunks of Out are read there.
  ptrdiff_t untouched = 0;
  const ChunkList& of(Space space) const { return space == Space::kOut ? out : in; }  // not scratch memory
};

// How values are encoded where the program's edges carry codes. The values are f32 then.
struct EdgeCoding {
  const CodecKernels* kernels = nullptr;  // nullptr: no edge carries codes
  CodecFormat codec{};
  size_t block = 0;
  uint32_t coding_bits = 0;  // CodingBits, for error texts
  // The accumulated encoding error, one float for each element of the buffer; nullptr: errors are dropped.
  float* feedback = nullptr;

  size_t nbytes(size_t numel) const { return code_bytes(codec, block, numel); }
  // The number of values whose codes take `nbytes`.
  size_t numel(size_t nbytes) const;
  // The compression ratio: bytes of values per byte of codes, rounded down.
  size_t times_shorter() const { return sizeof(float) * kMostBlock / nbytes(kMostBlock); }
  // The largest number of whole blocks within `numel` elements; `numel` itself if it is below one block.
  size_t whole_blocks(size_t numel) const {
    return block == 0 || numel < block ? numel : numel / block * block;
  }
};

struct CollectiveTask {
  const Program* program;
  BufferBinding binding;
  DType dtype;
  ReduceOp op;
  double factor;  // PREMUL_SUM
  uint64_t fingerprint;
  size_t numel = 0;  // of the call, equal on every rank; 0: ranks may differ
  EdgeCoding coding{};
  const Combiner* combiner = nullptr;

  // The largest number of elements within `numel` that may be cut off: whole items of the function.
  size_t whole_items(size_t numel) const {
    return combiner == nullptr ? numel : combiner->whole_items(numel);
  }
};

// Equal on every rank of a group: all ranks must cut buffers into the same segments.
struct ExecutorLimits {
  size_t segment_bytes;            // of all chunks together in one segment
  size_t capacity;                 // limit of all outstanding messages of one sender
  size_t zero_copy_segment_bytes;  // segment_bytes when all messages are sent with zero copy; 0: they are not
  bool zero_copy;                  // any message may be sent with zero copy, whatever the size of its chunk
  size_t ahead_bytes;              // size of a zero-copy message that runs ahead of its segment; 0: none does
  bool one_rank_per_host = false;  // no two ranks share a host
};

class Executor {
 public:
  // transports[peer]: the transport of the edges to and from that peer; nullptr for this rank itself. remote:
  // the transport to other hosts, if there are any.
  Executor(std::vector<Transport*> transports, Transport* remote, ExecutorLimits limits);

  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Whether a peer that was stopped during a copy may still write to the buffers of a failed call.
  bool has_open_transfers() const { return has_open_transfers_; }

  size_t message_limit(const Program& program) const;  // the largest size of one outstanding message

  // How many messages were read in place, in the memory of their senders.
  uint64_t mapped_messages() const { return mapped_messages_.load(std::memory_order_relaxed); }

  // Runs one collective. Throws Fault (through the waiter).
  void run(const CollectiveTask& task, Waiter& waiter);

 private:
  struct SegmentContext;  // one segment of one task
  void step(const Instruction& step, const SegmentContext& context);
  void send(const Instruction& step, const SegmentContext& context);
  bool send_zero_copy(Transport& transport, const Instruction& step, std::span<const int> peers,
                      BufferExtent piece, const SegmentContext& context);
  bool worth_mapping(size_t nbytes, const SegmentContext& context) const;
  void check_mapped(const SegmentContext& context);
  void fetch(int peer, const MessageView& message, void* into, const SegmentContext& context);
  void complete_zero_copy(const CollectiveTask& task, Waiter& waiter);
  void receive(const Instruction& step, const SegmentContext& context);
  void reduce(const Instruction& step, const SegmentContext& context);
  template <class Fill>
  void send_over(Transport& transport, std::span<const int> peers, size_t nbytes,
                 uint64_t message_fingerprint, Fill fill, const SegmentContext& context);
  void encode(const Instruction& step, BufferExtent piece, bool scaled, void* codes,
              const SegmentContext& context);
  float* feedback(ChunkRef ref, const SegmentContext& context) const;
  size_t wire_bytes(size_t numel, bool coded, const SegmentContext& context) const;
  template <class Peek>
  MessageView await(int peer, ChunkRef chunk, size_t nbytes, const SegmentContext& context, Peek peek,
                    bool coded = false);
  [[noreturn]] void refuse(int peer, ChunkRef chunk, MessageView message, bool coded,
                           const SegmentContext& context);
  const void* local_input(int peer, size_t input, ChunkRef chunk, size_t nbytes,
                          const SegmentContext& context);
  size_t locate_inputs(const Instruction& step, size_t nbytes, const SegmentContext& context);
  void about_to_write(BufferExtent extent, const SegmentContext& context);
  uint64_t fingerprint(ChunkRef chunk, const SegmentContext& context) const;
  size_t chunk_numel(ChunkRef chunk, const SegmentContext& context) const;
  BufferExtent locate(ChunkRef ref, const SegmentContext& context);
  BufferExtent locate_message(ChunkRef ref, const SegmentContext& context);
  static BufferExtent as_read(BufferExtent piece, ChunkRef ref, const Instruction& step,
                              const SegmentContext& context);
  bool runs_ahead(ChunkRef ref, const SegmentContext& context) const;
  size_t segments_ahead(size_t segment, size_t item) const;
  // Fails where a buffer of the caller is not there, before anything moves.
  void check_memory(const CollectiveTask& task, size_t item, Waiter& waiter);
  bool stages(const CollectiveTask& task, size_t item) const;
  size_t segment_elements(const CollectiveTask& task, size_t item) const;
  void prepare_scratch(const CollectiveTask& task, size_t segment, size_t item);

  std::vector<Transport*> transports_;
  Transport* const remote_;
  const ExecutorLimits limits_;
  struct PartialInput {
    size_t index;
    int peer;
    bool coded;
    const unsigned char* data;  // of the part that has come
  };
  const unsigned char* take_part(const PartialInput& input, ChunkRef chunk, size_t numel, size_t first,
                                 size_t count, const SegmentContext& context);
  const void* values_of(const PartialInput& input, size_t at, size_t count, float* into,
                        const SegmentContext& context);
  std::vector<const void*> inputs_;  // of a Reduce
  std::vector<PartialInput>
      partial_inputs_;                       // the inputs that arrive in parts: from other hosts, or as codes
  std::vector<std::vector<float>> decoded_;  // decoded parts of coded inputs
  std::vector<float> values_;                // the part to be encoded next
  std::vector<unsigned char> codes_;         // of a message that goes to this host and to others
  std::vector<std::vector<unsigned char>> copies_;  // sent in place of memory that other ranks cannot read
  std::atomic<bool> has_open_transfers_{false};     // read by other threads, like mapped_messages_
  std::atomic<uint64_t> mapped_messages_{0};
  SharedCopy shared_copy_;            // into this rank's ring
  bool zero_copy_in_flight_ = false;  // this task has sent a message with zero copy
  bool reads_mapped_ = false;         // this step reads a message in place
  std::vector<std::vector<unsigned char>>
      fetched_inputs_;                  // copies of zero-copy messages that are inputs of a Reduce
  std::vector<unsigned char> scratch_;  // Tmp chunks, and the scaled own chunk at the end
  size_t scratch_stride_ = 0;
};

}  // namespace unisono
