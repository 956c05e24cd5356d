// How a frame from another rank breaks the protocol.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// The connections between two hosts, in the order in which Python names them.
enum class ConnectionKind : uint32_t { kControl, kData, kMessages, kWindows };
constexpr size_t kConnectionKinds = 4;

// X(enumerator, what the value is)
#define UNISONO_FLAWS(X)                                                  \
  X(kNone, "nothing")                                                     \
  X(kKind, "an unknown kind of frame")                                    \
  X(kRank, "a rank outside the group")                                    \
  X(kFault, "an unknown kind of fault")                                   \
  X(kDType, "an unknown element type")                                    \
  X(kOperation, "an unknown reduction")                                   \
  X(kLength, "an impossible length")                                      \
  X(kTag, "a negative tag")                                               \
  X(kZeroCopyFlag, "a zero-copy message between ranks without zero copy") \
  X(kFingerprint, "a fingerprint that no operation has")                  \
  X(kStatus, "the number of an operation that has not started")           \
  X(kText, "an unterminated text")                                        \
  X(kWire, "an unknown kind of connection")                               \
  X(kOffer, "the number of a message that was not offered or asked for")  \
  X(kAfterEnd, "a frame after the close message")

enum class FrameErrorKind : uint32_t {
#define X(enumerator, what) enumerator,
  UNISONO_FLAWS(X)
#undef X
};
constexpr size_t kFlaws = static_cast<size_t>(FrameErrorKind::kAfterEnd) + 1;

// A frame that breaks a rule of the protocol. `value`: the field that breaks it.
struct FrameError {
  ConnectionKind wire = ConnectionKind::kControl;
  FrameErrorKind kind = FrameErrorKind::kNone;
  uint64_t value = 0;
};

}  // namespace unisono
