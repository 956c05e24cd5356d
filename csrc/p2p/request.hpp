// A point-to-point message as its caller posts it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "protocol/frames.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

constexpr int kAnyRank = -1;
constexpr int kAnyTag = -1;
// The upper bits of a tag may number a context: the traffic of one communicator. A receive with the tag
// `any_tag_of(context)` matches all tags of that context, and no others.
constexpr int kTagBits = 20;
constexpr int any_tag_of(int context) { return kAnyTag - 1 - context; }

// Whether two ranges of memory share a byte.
inline bool overlap(const unsigned char* one, uint64_t nbytes, const unsigned char* other, uint64_t length) {
  return nbytes > 0 && length > 0 && one < other + length && other < one + nbytes;
}

// A send or a receive under way. Once `done` is set, the engine no longer uses the caller's memory.
struct Request {
  bool sending;
  int peer;  // receive: kAnyRank until matched
  int tag;
  uint32_t form;
  unsigned char* data;
  uint64_t nbytes;  // receive: the size of the buffer until matched, then that of the message
  Nanoseconds deadline = INT64_MAX;
  uint64_t moved = 0;  // bytes, the header not counted
  size_t header_moved = 0;
  bool zero_copy = false;  // the bytes are copied from memory to memory, not through the stream
  bool exact = false;      // receive: a shorter message is refused, too
  bool raw = false;          // receive: bytes of any form; a longer message goes into memory of its own
  bool synchronous = false;  // send: its bytes wait until a receive matches
  bool sized = false;      // receive: of any size, into memory that is made when a message matches
  std::unique_ptr<unsigned char[]> own;         // that memory
  bool cancelled = false;                       // set before `done`
  MessageFrame frame = MessageFrame::kMessage;  // send: what it writes next
  uint64_t number = 0;                          // of its offer
  // Receive: sends under way that read its buffer. It is held back until they are done.
  std::vector<std::shared_ptr<Request>> readers;
  std::atomic<bool> seen{false};  // the caller knows that it is done
  std::atomic<FaultKind> fault{FaultKind::kNone};
  std::atomic<bool> done{false};

  bool takes(const MessageHeader& header) const {
    return raw || (form == header.form() && (sized || (exact ? nbytes == header.nbytes : nbytes >= header.nbytes)));
  }
  // A message that it takes is its own now. Throws std::bad_alloc.
  void accept(const MessageHeader& header) {
    const bool fits = !sized && header.nbytes <= nbytes;
    nbytes = header.nbytes;
    if (fits) return;
    own.reset(new unsigned char[nbytes]);
    data = own.get();
  }
};

}  // namespace unisono
