// The frames between ranks of different hosts: their bytes, in little-endian order, and their rules. Every
// field from a peer is checked here, before it is used as an index, a size or a kind. The functions depend on
// the bytes alone: no sockets, threads or Python.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/dtype.hpp"
#include "protocol/frame_error.hpp"
#include "protocol/group_state.hpp"
#include "protocol/message_tag.hpp"

namespace unisono {

// A number in little-endian byte order, as in a frame.
template <class T>
class LittleEndian {
 public:
  LittleEndian() = default;
  LittleEndian(T value) : raw_(turned(value)) {}
  operator T() const { return turned(raw_); }

 private:
  static T turned(T value) {
    if constexpr (std::endian::native == std::endian::little) return value;
    auto bytes = std::bit_cast<std::array<unsigned char, sizeof(T)>>(value);
    for (size_t i = 0; i < sizeof(T) / 2; ++i) std::swap(bytes[i], bytes[sizeof(T) - 1 - i]);
    return std::bit_cast<T>(bytes);
  }
  T raw_;
};

// The largest message: the address space of a processor.
constexpr uint64_t kMostBytes = uint64_t{1} << 48;

// ---- `data`: before the bytes of a chunk -------------------------------------------------------------

struct DataHeader {
  LittleEndian<uint64_t> nbytes, fingerprint;
};
static_assert(sizeof(DataHeader) == 16);

FrameError check(const DataHeader& header);

// What a message carries. Sender and receiver must agree in it.
enum class MessageKind : uint8_t { kArray, kObject };
constexpr uint32_t kMessageKinds = 2;

// The dtype and the kind of a message in one word, as in headers and errors.
constexpr uint32_t form_of(DType dtype, MessageKind kind) {
  return static_cast<uint32_t>(dtype) | static_cast<uint32_t>(kind) << 8;
}
constexpr uint32_t dtype_of_form(uint32_t form) { return form & 0xff; }
// For codes of f32, above the kind: the number of the codec, from 1 on, and a 16th of its block size.
constexpr int kFormCodec = 9, kFormBlock = 13;
bool is_form(uint32_t form);

// ---- `messages`, and the rings of a host: before the bytes of a message; a zero-copy one has only the
// header
// ----

// kMessage: the bytes of a message follow. kOffer: a message whose bytes wait in the sender. kGrant: its
// receiver asks for them. kGranted: they follow. kFull: offer all further messages, until kRoom.
// kSynchronousOffer: an offer whose bytes a receive alone asks for, however much room there is. Offers are
// counted from 1 on; kGrant and kGranted carry that number as `nbytes`.
enum class MessageFrame : uint32_t { kMessage, kOffer, kGrant, kGranted, kFull, kRoom, kSynchronousOffer };
constexpr uint32_t kMessageFrames = 7;

struct MessageHeader {
  LittleEndian<uint64_t> nbytes;
  LittleEndian<int32_t> tag;
  LittleEndian<uint32_t> word;  // the form, the frame and kZeroCopy

  static constexpr uint32_t kZeroCopy = 1u << 31, kFrameShift = 28;
  static constexpr uint32_t of(uint32_t form, MessageFrame frame, bool zero_copy = false) {
    return form | static_cast<uint32_t>(frame) << kFrameShift | (zero_copy ? kZeroCopy : 0);
  }
  bool zero_copy() const { return (word & kZeroCopy) != 0; }
  MessageFrame frame() const { return static_cast<MessageFrame>(word >> kFrameShift & 7); }
  uint32_t form() const { return word & ((1u << kFrameShift) - 1); }
};
static_assert(sizeof(MessageHeader) == 16);

// zero copy: the two ranks can read each other's memory.
FrameError check(const MessageHeader& header, bool zero_copy);

// ---- `windows`: one-sided calls to a rank whose memory the caller cannot reach -------------------------

// kPut: bytes follow. kUpdate: operands follow. kSwap: the expected and the new element follow. Each call
// gets one reply; that of kGet, kUpdate (where the former values are wanted) and kSwap is followed by bytes.
enum class WindowCall : uint32_t { kPut, kGet, kUpdate, kSwap, kLock, kUnlock, kHold, kRelease, kSignal };
constexpr uint32_t kWindowCalls = 9;
// An update is a ReduceOp, or one of these.
constexpr uint32_t kReplaceOp = kReduceOpCount, kNoOp = kReduceOpCount + 1, kWindowOps = kReduceOpCount + 2;
constexpr size_t kUpdateBytes = 256 * 1024;  // of one frame
constexpr size_t kMostSwapped = 32;          // bytes of an element that is compared and swapped
// What a rank signals to another: a post, a completion, or its arrival in a round of a fence.
constexpr uint32_t kPosted = 0, kCompleted = 1, kFirstRound = 2, kWindowSignals = 34;

struct WindowRequest {
  LittleEndian<uint32_t> call, dtype, op;
  LittleEndian<uint32_t> detail;  // kLock: whether shared; kUpdate: whether it fetches; kSignal: which
  LittleEndian<uint64_t> address, nbytes;
  LittleEndian<int64_t> timeout_ns;  // kLock, kHold
};
static_assert(sizeof(WindowRequest) == 40);

// kOutside: not in the window. kLate: `rank` (-1: unknown) held the lock until the timeout.
enum class WindowStatus : uint32_t { kDone, kOutside, kLate };
struct WindowReply {
  LittleEndian<uint32_t> status;
  LittleEndian<int32_t> rank;
};
static_assert(sizeof(WindowReply) == 8);

FrameError check(const WindowRequest& request);
FrameError check(const WindowReply& reply, int ranks);
// Whether windows combine elements of this type so.
bool updates(uint32_t dtype, uint32_t op);

// ---- `control` ---------------------------------------------------------------------------------------

// The bytes of a proposal; see region.hpp.
struct ProposalBytes {
  uint32_t nbytes;
  unsigned char bytes[kProposalBytes];
};

// All frames have the same size. kProposal carries a proposal, kNext says that what follows belongs to the
// next membership, and all others carry the status of their sender.
struct ControlFrame {
  enum class ControlKind : uint32_t { kAsk = 1, kAnswer, kAbort, kLeft, kProposal, kNext };
  ControlKind kind;
  Fault fault;  // kAbort
  RankStatus status;
  ProposalBytes proposal{};
};
constexpr size_t kControlBytes = 1004;  // of the longest one; frames.cpp counts its fields
using ControlBytes = std::array<unsigned char, kControlBytes>;

ControlBytes encode(const ControlFrame& frame);
// Reads a frame of a group of `ranks`. Returns how it breaks the protocol; FrameErrorKind::kNone: it does
// not.
FrameError parse(const ControlBytes& bytes, int ranks, ControlFrame& frame);

// The text for an error: "its messages connection sent an impossible length (9223372036854775813)".
std::string describe(const FrameError& bad);

}  // namespace unisono
