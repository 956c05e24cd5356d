// Runs programs: segment by segment, step by step, over the transport of each edge.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "engine/program.hpp"
#include "kernels/dtype.hpp"
#include "kernels/reduce.hpp"
#include "protocol/waiting.hpp"
#include "transport/transport.hpp"

namespace unisono {

// A piece of the caller's memory.
struct Extent {
  unsigned char* data;
  size_t numel;
};

// The chunks of one space: an even cut of one buffer, or a list of buffers.
class Chunks {
 public:
  Chunks() = default;
  Chunks(unsigned char* data, size_t numel, int32_t count, size_t item, bool equal_blocks);
  explicit Chunks(std::vector<Extent> list) : list_(std::move(list)) {}

  // Elements [first, first + at_most) of chunk `index`, cut at its end.
  Extent slice(int32_t index, size_t first, size_t at_most, size_t item) const;
  size_t longest() const;
  size_t numel(int32_t index) const;
  // The first element of chunk `index` of one buffer that is cut.
  size_t start(int32_t index) const { return static_cast<size_t>(index) * per_; }
  bool holds(int32_t index) const {
    return !list_.empty() ? static_cast<size_t>(index) < list_.size() : per_ > 0;
  }

 private:
  std::vector<Extent> list_;
  unsigned char* data_ = nullptr;
  size_t numel_ = 0;
  size_t per_ = 0;
};

struct Binding {
  Chunks out, in;
  const Chunks& of(Space space) const { return space == Space::kOut ? out : in; }  // not scratch memory
};

// How values are encoded where the program's edges carry codes. The values are f32 then.
struct Coder {
  const CodecKernels* kernels = nullptr;  // nullptr: no edge carries codes
  Codec codec{};
  size_t block = 0;
  uint32_t coding = 0;  // CodingBits, for error texts
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

struct Job {
  const Program* program;
  Binding binding;
  DType dtype;
  ReduceOp op;
  double factor;  // PREMUL_SUM
  uint64_t fingerprint;
  Coder coder{};
};

// Equal on every rank of a group: all ranks must cut buffers into the same segments.
struct Limits {
  size_t segment_bytes;  // of all chunks together in one segment
  size_t capacity;       // limit of all outstanding messages of one sender
  size_t lent_bytes;     // segment_bytes when all messages are lent; 0: they are not
  bool lending;          // any message may be lent, whatever the size of its chunk
  size_t ahead_bytes;    // size of a lent message that runs ahead of its segment; 0: none does
  bool apart = false;    // no two ranks share a host
};

class Executor {
 public:
  // transports[peer]: the transport of the edges to and from that peer; nullptr for this rank itself. far:
  // the transport to other hosts, if there are any.
  Executor(std::vector<Transport*> transports, Transport* far, Limits limits);

  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Whether a peer that was stopped during a copy may still write to the buffers of a failed job.
  bool unsettled() const { return unsettled_; }

  // How many messages were read in place, in the memory of their senders.
  uint64_t opened() const { return opened_.load(std::memory_order_relaxed); }

  // Runs one collective. Throws Fault (through the waiter).
  void run(const Job& job, Waiter& waiter);

 private:
  struct Frame;  // one segment of one job
  void step(const Instruction& step, const Frame& frame);
  void send(const Instruction& step, const Frame& frame);
  bool lend(Transport& transport, const Instruction& step, std::span<const int> peers, Extent piece,
            const Frame& frame);
  bool worth_opening(size_t nbytes, const Frame& frame) const;
  void check_open(const Frame& frame);
  void fetch(int peer, const Message& message, void* into, const Frame& frame);
  void settle(const Job& job, Waiter& waiter);
  void receive(const Instruction& step, const Frame& frame);
  void reduce(const Instruction& step, const Frame& frame);
  template <class Fill>
  void send_over(Transport& transport, std::span<const int> peers, size_t nbytes, uint64_t print, Fill fill,
                 const Frame& frame);
  void encode(const Instruction& step, Extent piece, bool scaled, void* codes, const Frame& frame);
  float* feedback(ChunkRef ref, const Frame& frame) const;
  size_t wire_bytes(size_t numel, bool coded, const Frame& frame) const;
  template <class Peek>
  Message await(int peer, ChunkRef chunk, size_t nbytes, const Frame& frame, Peek peek, bool coded = false);
  [[noreturn]] void refuse(int peer, ChunkRef chunk, Message message, bool coded, const Frame& frame);
  const void* near_input(int peer, size_t input, ChunkRef chunk, size_t nbytes, const Frame& frame);
  size_t find_inputs(const Instruction& step, size_t nbytes, const Frame& frame);
  void about_to_write(Extent extent, const Frame& frame);
  uint64_t fingerprint(ChunkRef chunk, const Frame& frame) const;
  size_t whole(ChunkRef chunk, const Frame& frame) const;
  Extent find(ChunkRef ref, const Frame& frame);
  Extent find_message(ChunkRef ref, const Frame& frame);
  bool runs_ahead(ChunkRef ref, const Frame& frame) const;
  size_t segments_ahead(size_t segment, size_t item) const;
  size_t room_for(const Program& program) const;  // the largest size of one outstanding message
  size_t segment_elements(const Job& job, size_t item) const;
  void prepare_scratch(const Job& job, size_t segment, size_t item);

  std::vector<Transport*> transports_;
  Transport* const far_;
  const Limits limits_;
  struct PartInput {
    size_t place;
    int peer;
    bool coded;
    const unsigned char* data;  // of the part that has come
  };
  const unsigned char* take_part(const PartInput& input, ChunkRef chunk, size_t numel, size_t first,
                                 size_t count, const Frame& frame);
  const void* values_of(const PartInput& input, size_t at, size_t count, float* into, const Frame& frame);
  std::vector<const void*> inputs_;          // of a Reduce
  std::vector<PartInput> part_inputs_;       // the inputs that arrive in parts: from other hosts, or as codes
  std::vector<std::vector<float>> decoded_;  // decoded parts of coded inputs
  std::vector<float> values_;                // the part to be encoded next
  std::vector<unsigned char> codes_;         // of a message that goes to this host and to others
  std::vector<std::vector<unsigned char>> copies_;  // lent in place of memory that other ranks cannot read
  std::atomic<bool> unsettled_{false};              // read by other threads, like opened_
  std::atomic<uint64_t> opened_{0};
  bool lent_ = false;                                // this job has lent a message
  bool open_ = false;                                // this step reads a message in place
  std::vector<std::vector<unsigned char>> fetched_;  // copies of lent messages that are inputs of a Reduce
  std::vector<unsigned char> scratch_;               // Tmp chunks, and the scaled own chunk at the end
  size_t scratch_stride_ = 0;
};

}  // namespace unisono
