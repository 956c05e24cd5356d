// A point-to-point message as its caller posts it.
#pragma once

#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "p2p/match_table.hpp"
#include "protocol/frames.hpp"
#include "protocol/message_tag.hpp"
#include "protocol/waiter.hpp"

namespace unisono {

constexpr int kAnyRank = -1;
constexpr uint32_t kAnyForm = UINT32_MAX;  // no message has it

// Whether two ranges of memory share a byte.
inline bool overlap(const unsigned char* one, uint64_t nbytes, const unsigned char* other, uint64_t length) {
  return nbytes > 0 && length > 0 && one < other + length && other < one + nbytes;
}

// A message as its caller asks for it.
struct Transfer {
  bool sending;
  bool exact = false;  // receive: a shorter message is refused, too
  bool raw = false;    // receive: of any form; the bytes of a longer message go into memory of its own
  bool sized = false;  // receive: of any size, into memory that is made when a message matches
  int peer;            // receive: kAnyRank until matched
  int tag;             // as it travels, see message_tag.hpp
  uint32_t form;       // receive: kAnyForm until matched
  unsigned char* data;
  uint64_t nbytes;  // receive: the size of the buffer until matched, then that of the message
  std::unique_ptr<unsigned char[]> own;  // memory that is made

  bool takes(const MessageHeader& header) const {
    if (raw) return true;
    if (form != header.form() && form != kAnyForm) return false;
    return sized || (exact ? nbytes == header.nbytes : nbytes >= header.nbytes);
  }
  // A message that it takes is its own now; `kept`: its bytes, if they have come. Throws std::bad_alloc.
  void accept(const MessageHeader& header, std::unique_ptr<unsigned char[]>&& kept = nullptr) {
    const bool fits = !sized && nbytes >= header.nbytes;
    nbytes = header.nbytes;
    form = header.form();
    if (!fits) {
      own = kept ? std::move(kept) : std::unique_ptr<unsigned char[]>(new unsigned char[nbytes]);
      data = own.get();
    } else if (kept && nbytes > 0) {
      std::memcpy(data, kept.get(), nbytes);
    }
  }
};

// A send or a receive under way. Once `done` is set, the engine no longer uses the caller's memory.
struct Request : Transfer {
  Nanoseconds deadline = INT64_MAX;
  uint64_t moved = 0;  // bytes, the header not counted
  size_t header_moved = 0;
  bool zero_copy = false;    // the bytes are copied from memory to memory, not through the stream
  bool synchronous = false;  // send: done only when a receive has matched it
  bool outlives = false;     // its call returns before it is done
  bool cancelled = false;    // set before `done`
  MessageFrame frame = MessageFrame::kMessage;  // send: what it writes next
  uint64_t number = 0;                          // of its offer
  // Receive, until matched: its place in the order of receives, and among those with its source and tag.
  std::list<std::shared_ptr<Request>>::iterator place;
  uint64_t order = 0;
  MatchTable<Request>::ChainLink link;
  // Receive: sends under way that read its buffer. It is held back until they are done.
  std::vector<std::shared_ptr<Request>> readers;
  std::atomic<bool> seen{false};  // the caller knows that it is done
  std::atomic<FaultKind> fault{FaultKind::kNone};
  std::atomic<bool> done{false};
};

}  // namespace unisono
