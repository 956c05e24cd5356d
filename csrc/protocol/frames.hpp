// The frames that ranks of different hosts send each other: their bytes, in little-endian order, and what
// each has to keep to. Everything a peer says is checked here, before it is used as an index, a size or a
// kind. Knows no sockets, threads or Python: a function of bytes.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "kernels/dtype.hpp"
#include "protocol/flaw.hpp"
#include "protocol/world.hpp"

namespace unisono {

// A number as it stands in a frame.
template <class T>
class Little {
 public:
  Little() = default;
  Little(T value) : raw_(turned(value)) {}
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

// No message is longer: what a processor can address.
constexpr uint64_t kMostBytes = uint64_t{1} << 48;

// ---- `data`: before the bytes of a chunk -------------------------------------------------------------

struct DataHeader {
  Little<uint64_t> nbytes, fingerprint;
};
static_assert(sizeof(DataHeader) == 16);

BadFrame check(const DataHeader& header);

// What a message is to its two ends, which must agree in it.
enum class MessageKind : uint8_t { kArray, kObject };
constexpr uint32_t kMessageKinds = 2;

// The elements and the kind of a message in one word, as headers and errors have it.
constexpr uint32_t form_of(DType dtype, MessageKind kind) {
  return static_cast<uint32_t>(dtype) | static_cast<uint32_t>(kind) << 8;
}
constexpr uint32_t dtype_of_form(uint32_t form) { return form & 0xff; }
// Of bytes that are codes of f32: above the kind the number of the codec, from 1 on, and 16ths of its block.
constexpr int kFormCodec = 9, kFormBlock = 13;
bool is_form(uint32_t form);

// ---- `messages`, and a host's rings: before the bytes of a message, or instead of those that are lent -----

struct MessageHeader {
  Little<uint64_t> nbytes;
  Little<int32_t> tag;
  Little<uint32_t> word;  // the form, and kLent

  static constexpr uint32_t kLent = 1u << 31;
  bool lent() const { return (word & kLent) != 0; }
  uint32_t form() const { return word & ~kLent; }
};
static_assert(sizeof(MessageHeader) == 16);

// lending: the two ranks can read each other's memory.
BadFrame check(const MessageHeader& header, bool lending);

// ---- `control` ---------------------------------------------------------------------------------------

// Every frame has one size and tells where its sender stands, whatever else it is for.
struct ControlFrame {
  enum class Kind : uint32_t { kAsk = 1, kAnswer, kAbort, kLeft };
  Kind kind;
  Fault fault;  // kAbort
  RankStatus standing;
};
constexpr size_t kControlBytes = 872;
using ControlBytes = std::array<unsigned char, kControlBytes>;

ControlBytes encode(const ControlFrame& frame);
// Reads a frame of a group of `ranks`; what is wrong with it.
BadFrame parse(const ControlBytes& bytes, int ranks, ControlFrame& frame);

// For people: "its messages connection sent an impossible length (9223372036854775813)".
std::string describe(const BadFrame& bad);

}  // namespace unisono
