#include "engine/program.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace unisono {
namespace {

class ProgramReader {
 public:
  explicit ProgramReader(std::span<const int32_t> code) : code_(code) {}
  bool at_end() const { return next_ == code_.size(); }
  int32_t take(int32_t low, int32_t high, const char* what) {
    if (next_ == code_.size()) throw std::invalid_argument(std::string("lowered plan ends before ") + what);
    const int32_t value = code_[next_++];
    if (value < low || value > high)
      throw std::invalid_argument("lowered plan, word " + std::to_string(next_ - 1) + ": " + what + " is " +
                                  std::to_string(value) + ", expected " + std::to_string(low) + ".." +
                                  std::to_string(high));
    return value;
  }

 private:
  std::span<const int32_t> code_;
  size_t next_ = 0;
};

}  // namespace

Program::Program(std::span<const int32_t> code, int rank, int size, uint64_t plan)
    : size_(size), plan_(plan) {
  ProgramReader reader(code);
  const auto take_chunk = [&](const char* what) {
    const auto space = reader.take(0, kSpaces - 1, what);
    const int32_t count = chunks_[space];
    return ChunkRef{static_cast<Space>(space), reader.take(0, count > 0 ? count - 1 : 0, what)};
  };
  constexpr int32_t kMany = 1 << 24;
  for (int32_t& count : chunks_) count = reader.take(0, kMany, "number of chunks");
  equal_blocks_ = reader.take(0, 1, "equal blocks") != 0;
  zero_copy_ = static_cast<ZeroCopyMode>(reader.take(0, 2, "zero copy"));
  in_flight_ = reader.take(1, kMany, "messages in flight");
  algorithm_ = reader.take(0, 255, "algorithm");
  while (!reader.at_end()) {
    Instruction step;
    step.opcode = static_cast<Opcode>(reader.take(0, 3, "opcode"));
    step.flags = reader.take(0, kFinal | kRaw | kLast | kMappable | kRounds, "flags");
    step.dst = take_chunk("chunk");
    step.own = take_chunk("own chunk");
    step.own_input_index = reader.take(-1, size, "own place");
    const int32_t peers = reader.take(0, size, "number of peers");
    for (int32_t i = 0; i < peers; ++i) {
      const int32_t peer = reader.take(0, 2 * size - 1, "peer");  // from `size` on: its messages are codes
      step.peers.push_back(peer % size);
      step.coded_peers.push_back(peer >= size);
      step.coded |= peer >= size;
      if (step.peers.back() == rank) throw std::invalid_argument("lowered plan: a rank is its own peer");
    }
    coded_ |= step.coded;
    const bool mixed = step.coded && std::ranges::find(step.coded_peers, false) != step.coded_peers.end();
    if ((step.opcode == Opcode::kSend && mixed) || (step.coded && zero_copy_ != ZeroCopyMode::kNot) ||
        (step.coded && (step.flags & (kLast | kMappable)) != 0) ||
        (!step.coded && (step.flags & kRounds) != 0))
      throw std::invalid_argument("lowered plan: codes in a message that cannot have them");
    const size_t inputs = step.peers.size() + (step.own_input_index >= 0 ? 1 : 0);
    if (step.opcode == Opcode::kReduce && (inputs == 0 || step.own_input_index > peers))
      throw std::invalid_argument("lowered plan: a Reduce of nothing, or an own place beyond its inputs");
    const bool scratch = step.opcode == Opcode::kRecv && step.dst.space == Space::kTmp;
    const bool stays = step.opcode != Opcode::kSend || (step.flags & kLast) != 0;
    if ((zero_copy_ == ZeroCopyMode::kAhead && scratch) || (zero_copy_ != ZeroCopyMode::kNot && !stays))
      throw std::invalid_argument("lowered plan: a message that cannot be sent with zero copy");
    if (step.opcode == Opcode::kRecv && peers != 1)
      throw std::invalid_argument("lowered plan: a Recv has one sender");
    if (step.opcode == Opcode::kReduce || step.opcode == Opcode::kRecv)
      for (const int peer : step.peers)
        if (std::ranges::find(sources_, peer) == sources_.end()) sources_.push_back(peer);
    widest_reduce_ = inputs > widest_reduce_ ? inputs : widest_reduce_;
    const bool writes = step.opcode != Opcode::kSend || (step.flags & kRounds) != 0;
    writes_out_ |= writes && step.dst.space == Space::kOut;
    instructions_.push_back(std::move(step));
  }
}

void Program::sort_receivers(const std::function<bool(int)>& on_this_host) {
  for (Instruction& step : instructions_) {
    if (step.opcode != Opcode::kSend) continue;
    const auto first_remote = std::stable_partition(step.peers.begin(), step.peers.end(), on_this_host);
    step.local_receivers = static_cast<size_t>(first_remote - step.peers.begin());
  }
}

}  // namespace unisono
