// What programs consist of. Each code is followed by its arguments; a double is two of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace unisono::simulator {

enum class Code : int32_t {
  kSend,         // chunks, number of receivers, receivers
  kRecv,         // chunks, sender
  kReduce,       // chunks, additions per chunk, number of senders, senders
  kCopy,         // chunks
  kChunk,        // a double: the bytes of a chunk from here on
  kCompute,      // a double: seconds
  kSignal,       // event: happens on this rank now
  kAwait,        // event: waits until it has happened on this rank
  kSegment,      // the steps of the plan begin again, with the next segment
  kUntil,        // a double: the next step does not begin before this second
  kSendInPlace,  // as kSend; ranks of this host copy the bytes from this rank's memory
  kRelease,      // waits until all such messages of this rank are copied
};

// The double that follows a code.
inline double as_double(const int32_t* halves) {
  double value;
  std::memcpy(&value, halves, sizeof value);
  return value;
}

inline bool is_send(Code code) { return code == Code::kSend || code == Code::kSendInPlace; }

// How many numbers a code has, itself included.
inline size_t length_of(const int32_t* codes) {
  switch (static_cast<Code>(codes[0])) {
    case Code::kSend:
    case Code::kSendInPlace:
      return 3 + static_cast<size_t>(codes[2]);
    case Code::kReduce:
      return 4 + static_cast<size_t>(codes[3]);
    case Code::kRecv:
    case Code::kChunk:
    case Code::kCompute:
    case Code::kUntil:
      return 3;
    case Code::kSegment:
    case Code::kRelease:
      return 1;
    default:
      return 2;
  }
}

// Checks a program; calls `name(peer, whether this rank sends to it)`, which may replace it.
template <class Name>
void check_codes(std::vector<int32_t>& codes, Name name) {
  for (size_t at = 0; at < codes.size();) {
    const auto code = static_cast<Code>(codes[at]);
    const bool sends = is_send(code), reduces = code == Code::kReduce;
    if (codes[at] < 0 || code > Code::kRelease) throw std::invalid_argument("a program has an unknown step");
    const size_t left = codes.size() - at, head = sends ? 3 : reduces ? 4 : 1;
    if (left < head || ((sends || reduces) && codes[at + head - 1] < 0) || left < length_of(&codes[at]))
      throw std::invalid_argument("a program ends within a step");
    if ((code <= Code::kCopy || sends) && codes[at + 1] < 0)
      throw std::invalid_argument("a program has a negative number of chunks");
    if (reduces && codes[at + 2] < 0)
      throw std::invalid_argument("a program has a negative number of additions");
    if (code == Code::kChunk || code == Code::kCompute || code == Code::kUntil)
      if (const double value = as_double(&codes[at + 1]); !(value >= 0) || std::isinf(value))
        throw std::invalid_argument("a program has a size or a time that is negative or not finite");
    const size_t length = length_of(&codes[at]);
    if (sends || reduces)
      for (size_t peer = at + head; peer < at + length; ++peer) name(codes[peer], sends);
    if (code == Code::kRecv) name(codes[at + 2], false);
    at += length;
  }
}

}  // namespace unisono::simulator
