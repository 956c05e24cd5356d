// A plan as the executor runs it: one rank's steps, flattened by `unisono.plans.lowering`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace unisono {

enum class Opcode : int32_t { kSend, kRecv, kReduce, kCopy };
enum class Space : int32_t { kOut, kIn, kTmp };
constexpr size_t kSpaces = 3;

// Which messages of a plan can be sent with zero copy. kNot: only those with kLast. kSegments: every Send of
// every rank. kAhead: as kSegments, and messages may run ahead of their segments.
enum class ZeroCopyMode : int32_t { kNot, kSegments, kAhead };

constexpr int32_t kFinal = 1;  // Reduce: the result holds every rank's contribution
constexpr int32_t kRaw = 2;    // Send, Reduce: the own chunk is this rank's untouched contribution
constexpr int32_t kLast = 4;   // Send: no later step of the segment writes to this chunk
constexpr int32_t kMappable =
    8;  // Send: the chunk does not change until all receivers have released the message
constexpr int32_t kRounds = 16;  // Send of codes: the sender keeps what its receivers will decode

struct ChunkRef {
  Space space;
  int32_t index;
};

struct Instruction {
  Opcode opcode;
  int32_t flags;
  ChunkRef dst;                // Send: the chunk sent; Copy, Recv, Reduce: where the result goes
  ChunkRef own;                // Copy: the source; Reduce: the own contribution
  int32_t own_input_index;     // Reduce: the own chunk's place among the inputs; -1: it takes no part
  std::vector<int> peers;      // Send: receivers; Recv: the sender; Reduce: senders in order, own left out
  size_t local_receivers = 0;  // Send: the first `local_receivers` peers are on this host
  bool coded = false;          // the messages are codes; Reduce: at least one is
  std::vector<bool> coded_peers = {};  // Reduce: which of them

  bool codes_from(size_t peer) const { return coded && coded_peers[peer]; }
};

class Program {
 public:
  // `code`: see lowering.py. Checks every number in it: throws std::invalid_argument.
  // plan: a number that identifies the plan when ranks compare calls; 0 where `algorithm` identifies it.
  Program(std::span<const int32_t> code, int rank, int size, uint64_t plan = 0);

  // Puts the receivers on this host before the others: one copy in shared memory serves all of them.
  void sort_receivers(const std::function<bool(int)>& on_this_host);

  const std::vector<Instruction>& instructions() const { return instructions_; }
  int32_t chunks(Space space) const { return chunks_[static_cast<size_t>(space)]; }
  bool equal_blocks() const { return equal_blocks_; }
  bool writes_out() const { return writes_out_; }
  bool can_zero_copy() const { return zero_copy_ != ZeroCopyMode::kNot; }
  bool runs_ahead() const { return zero_copy_ == ZeroCopyMode::kAhead; }
  int32_t in_flight() const { return in_flight_; }
  int32_t algorithm() const { return algorithm_; }
  uint64_t plan() const { return plan_; }
  int size() const { return size_; }
  size_t widest_reduce() const { return widest_reduce_; }
  // The ranks whose messages this rank waits for.
  const std::vector<int>& sources() const { return sources_; }
  // Whether some edges carry codes.
  bool coded() const { return coded_; }

 private:
  std::vector<Instruction> instructions_;
  int32_t chunks_[kSpaces];
  bool equal_blocks_;  // chunks are whole blocks (all_gather ...), not an even cut of one buffer
  ZeroCopyMode zero_copy_;
  bool writes_out_ = false;  // this rank's steps write the output
  int32_t in_flight_;        // messages a sender must be able to have outstanding
  int32_t algorithm_;
  int size_;
  uint64_t plan_;
  size_t widest_reduce_ = 1;
  std::vector<int> sources_;
  bool coded_ = false;
};

}  // namespace unisono
