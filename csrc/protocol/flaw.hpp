// How a frame from another rank breaks the protocol.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// The connections between two hosts, in the order in which Python names them.
enum class Wire : uint32_t { kControl, kData, kMessages };
constexpr size_t kWires = 3;

// X(enumerator, what the value is)
#define UNISONO_FLAWS(X)                                 \
  X(kNone, "nothing")                                    \
  X(kKind, "an unknown kind of frame")                   \
  X(kRank, "a rank outside the group")                   \
  X(kFault, "an unknown kind of fault")                  \
  X(kDType, "an unknown element type")                   \
  X(kOperation, "an unknown reduction")                  \
  X(kLength, "an impossible length")                     \
  X(kTag, "a negative tag")                              \
  X(kLoan, "a message lent where nothing can be lent")   \
  X(kFingerprint, "a fingerprint that no operation has") \
  X(kStanding, "a call counted that was never begun")    \
  X(kText, "a text without an end")                      \
  X(kWire, "an unknown kind of connection")              \
  X(kAfterEnd, "a frame behind the last one")

enum class Flaw : uint32_t {
#define X(enumerator, what) enumerator,
  UNISONO_FLAWS(X)
#undef X
};
constexpr size_t kFlaws = static_cast<size_t>(Flaw::kAfterEnd) + 1;

// A frame that breaks a rule of the protocol. `value`: the field that breaks it.
struct BadFrame {
  Wire wire = Wire::kControl;
  Flaw flaw = Flaw::kNone;
  uint64_t value = 0;
};

}  // namespace unisono
