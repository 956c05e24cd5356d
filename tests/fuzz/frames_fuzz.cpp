// A libFuzzer target: the frames that ranks of different hosts send each other, byte by byte. `make fuzz`
// runs it.
//
// Input: one byte that chooses the kind of frame, one byte for the group (its size, or whether it uses zero
// copy), then the frame, zeros where the input is too short. What is accepted must be within what the engine
// indexes with.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/codec.hpp"
#include "protocol/frames.hpp"

namespace {

using namespace unisono;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "an accepted frame breaks a rule: %s\n", what);
  std::abort();
}

template <class Frame>
Frame filled(const uint8_t* data, size_t size) {
  Frame frame;
  auto* const bytes = reinterpret_cast<unsigned char*>(&frame);
  std::memset(bytes, 0, sizeof frame);
  std::memcpy(bytes, data, std::min(size, sizeof frame));
  return frame;
}

bool refused(const FrameError& found) {
  if (found.kind == FrameErrorKind::kNone) return false;
  require(!describe(found).empty(), "a refusal has a text");
  return true;
}

void check_fault(const Fault& fault, int ranks) {
  require(fault.found_by >= 0 && fault.found_by < ranks, "fault.found_by is a rank");
  require(fault.rank >= -1 && fault.rank < ranks, "fault.rank is a rank or none");
  require(fault.kind <= FaultKind::kReplaced, "fault.kind is known");
  require(dtype_of_form(fault.size_mismatch.expected_form) < kDTypeCount, "expected_form has a dtype");
  require(dtype_of_form(fault.size_mismatch.sent_form) < kDTypeCount, "sent_form has a dtype");
  require(!describe(fault.frame).empty(), "fault.frame has a text");
}

void control(const ControlBytes& bytes, int ranks) {
  ControlFrame frame;
  if (refused(parse(bytes, ranks, frame))) return;
  if (frame.kind == ControlFrame::ControlKind::kProposal) {  // it has nothing else
    require(frame.proposal.nbytes <= sizeof frame.proposal.bytes, "the proposal's length is within it");
    const ControlBytes again = encode(frame);
    const size_t used = sizeof(uint32_t) + sizeof frame.proposal.nbytes + sizeof frame.proposal.bytes;
    require(std::memcmp(again.data(), bytes.data(), std::min(used, again.size())) == 0,
            "encode gives the proposal that parse has read");
    return;
  }
  if (frame.kind == ControlFrame::ControlKind::kAbort) check_fault(frame.fault, ranks);
  require(frame.status.finished <= frame.status.started, "no call ends before it begins");
  for (const CallRecord& call : frame.status.history) {
    const bool typed = call.dtype < kDTypeCount;
    const bool coded = call.dtype >= kFirstCodec && call.dtype < kFirstCodec + kCodecCount;
    if (call.seq != 0)
      require(call.seq <= frame.status.started && (typed || coded) && call.op < kReduceOpCount,
              "a remembered call is one");
  }
  require(std::memchr(frame.status.report, 0, sizeof frame.status.report) != nullptr, "the text ends");
  require(encode(frame) == bytes, "encode gives the bytes that parse has read");
}

void message(const MessageHeader& header, bool zero_copy) {
  if (refused(check(header, zero_copy))) return;
  require(header.tag >= 0 && header.nbytes <= kMostBytes, "tag and length");
  require(dtype_of_form(header.form()) < kDTypeCount, "the form has a dtype");
  require(zero_copy || !header.zero_copy(), "only ranks of one host use zero copy");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint8_t kind = data[0] % 3, group = data[1];
  data += 2;
  size -= 2;
  if (kind == 0) control(filled<ControlBytes>(data, size), group % 64 + 1);
  if (kind == 1 && !refused(check(filled<DataHeader>(data, size))))
    require(filled<DataHeader>(data, size).nbytes <= kMostBytes, "the length of a chunk");
  if (kind == 2) message(filled<MessageHeader>(data, size), (group & 1) != 0);
  return 0;
}
