#include "protocol/frames.hpp"

#include <cstring>
#include <type_traits>

#include "kernels/codec.hpp"
#include "kernels/dtype.hpp"
#include "kernels/reduce.hpp"

namespace unisono {
namespace {

constexpr const char* kWireNames[kConnectionKinds] = {"control", "data", "messages", "windows"};
constexpr const char* kFlawTexts[kFlaws] = {
#define X(enumerator, what) what,
    UNISONO_FLAWS(X)
#undef X
};

// Writes the fields of a frame to bytes, or reads them, one after another.
template <bool kWriting>
class FieldSerializer {
 public:
  using Bytes = std::conditional_t<kWriting, unsigned char*, const unsigned char*>;
  explicit FieldSerializer(Bytes at) : at_(at) {}

  template <class T>
  void operator()(T& field) {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_enum_v<Plain>) {
      auto number = static_cast<std::underlying_type_t<Plain>>(field);
      (*this)(number);
      if constexpr (!kWriting) field = static_cast<Plain>(number);
    } else {
      LittleEndian<Plain> little(field);
      if constexpr (kWriting)
        std::memcpy(at_, &little, sizeof little);
      else
        std::memcpy(static_cast<void*>(&little), at_, sizeof little);
      if constexpr (!kWriting) field = little;
      at_ += sizeof little;
    }
  }
  template <class Text>
  void text(Text& field) {
    if constexpr (kWriting)
      std::memcpy(at_, field, sizeof field);
    else
      std::memcpy(field, at_, sizeof field);
    at_ += sizeof field;
  }
  Bytes at() const { return at_; }

 private:
  Bytes at_;
};

// Counts the bytes of fields.
struct FieldCounter {
  size_t bytes = 0;
  template <class T>
  constexpr void operator()(const T&) {
    bytes += sizeof(T);
  }
  template <class Text>
  constexpr void text(const Text& field) {
    bytes += sizeof field;
  }
};

template <class Move, class... Fields>
constexpr void move_all(Move& move, Fields&... fields) {
  (move(fields), ...);
}

// The fields of a control frame in order. Encoding and parsing both use this list.
template <class Move, class Frame>
constexpr void move_frame(Move& move, Frame& frame) {
  auto& [kind, fault, status, proposal] = frame;
  move(kind);
  if (kind == ControlFrame::ControlKind::kProposal) {
    move(proposal.nbytes);
    return move.text(proposal.bytes);
  }
  auto& size_mismatch = fault.size_mismatch;
  move_all(move, fault.kind, fault.found_by, fault.rank, fault.signal, fault.exit_code, fault.seq);
  move_all(move, size_mismatch.tag, size_mismatch.expected_form, size_mismatch.sent_form,
           size_mismatch.expected_nbytes, size_mismatch.sent_nbytes);
  move_all(move, size_mismatch.seq, size_mismatch.more, size_mismatch.scratch);
  move_all(move, fault.frame.wire, fault.frame.kind, fault.frame.value, fault.window);
  move_all(move, status.started, status.finished);
  for (auto& call : status.history) {
    move_all(move, call.seq, call.fingerprint, call.numel, call.root);
    move_all(move, call.kind, call.dtype, call.op, call.algorithm, call.block, call.coding);
  }
  move_all(move, status.has_report, status.report_seq);
  move.text(status.report);
}

constexpr size_t frame_bytes(ControlFrame::ControlKind kind) {
  ControlFrame frame{};
  frame.kind = kind;
  FieldCounter counter;
  move_frame(counter, frame);
  return counter.bytes;
}
static_assert(frame_bytes(ControlFrame::ControlKind::kAbort) == kControlBytes);
static_assert(frame_bytes(ControlFrame::ControlKind::kProposal) <= kControlBytes);

FrameError bad(ConnectionKind wire, FrameErrorKind kind, uint64_t value) { return {wire, kind, value}; }
FrameError bad_control(FrameErrorKind kind, int64_t value) {
  return bad(ConnectionKind::kControl, kind, static_cast<uint64_t>(value));
}

FrameError check(const Fault& fault, int ranks) {
  const SizeMismatch& size_mismatch = fault.size_mismatch;
  if (fault.kind == FaultKind::kNone || fault.kind > FaultKind::kReplaced)
    return bad_control(FrameErrorKind::kFault, static_cast<int64_t>(fault.kind));
  if (fault.found_by < 0 || fault.found_by >= ranks)
    return bad_control(FrameErrorKind::kRank, fault.found_by);
  // A receive from any rank names no rank in its Timeout.
  const int32_t first = fault.kind == FaultKind::kTimeout ? -1 : 0;
  if (fault.rank < first || fault.rank >= ranks) return bad_control(FrameErrorKind::kRank, fault.rank);
  for (const uint32_t form : {size_mismatch.expected_form, size_mismatch.sent_form})
    if (!is_form(form)) return bad_control(FrameErrorKind::kDType, form);
  if (static_cast<size_t>(fault.frame.wire) >= kConnectionKinds)
    return bad_control(FrameErrorKind::kWire, static_cast<int64_t>(fault.frame.wire));
  if (static_cast<size_t>(fault.frame.kind) >= kFlaws)
    return bad_control(FrameErrorKind::kFault, static_cast<int64_t>(fault.frame.kind));
  if (fault.window > WindowWait::kAnswer)
    return bad_control(FrameErrorKind::kFault, static_cast<int64_t>(fault.window));
  return {};
}

FrameError check(const RankStatus& status) {
  if (status.finished > status.started)
    return bad(ConnectionKind::kControl, FrameErrorKind::kStatus, status.finished);
  for (const CallRecord& call : status.history) {
    if (call.seq > status.started) return bad(ConnectionKind::kControl, FrameErrorKind::kStatus, call.seq);
    if (call.seq == 0) continue;
    const bool coded = call.dtype >= kFirstCodec;
    if (call.dtype >= (coded ? kFirstCodec + kCodecCount : kDTypeCount))
      return bad_control(FrameErrorKind::kDType, call.dtype);
    if (call.block > (coded ? kMostBlock : 0) || call.coding >= (coded ? kCodings : 1))
      return bad_control(FrameErrorKind::kDType, call.block);
    if (call.op >= kReduceOpCount) return bad_control(FrameErrorKind::kOperation, call.op);
  }
  const bool ends = std::memchr(status.report, '\0', sizeof status.report) != nullptr;
  if (status.has_report > 1 || !ends) return bad_control(FrameErrorKind::kText, status.has_report);
  return {};
}

}  // namespace

bool is_form(uint32_t form) {
  const uint32_t kind = form >> 8 & 1u, codec = form >> kFormCodec & 15u, block = form >> kFormBlock;
  if (codec == 0) return dtype_of_form(form) < kDTypeCount && kind < kMessageKinds && block == 0;
  return dtype_of_form(form) == static_cast<uint32_t>(DType::kU8) && kind == 0 && codec <= kCodecCount &&
         block <= kMostBlock / 16;
}

FrameError check(const DataHeader& header) {
  if (header.nbytes > kMostBytes) return bad(ConnectionKind::kData, FrameErrorKind::kLength, header.nbytes);
  if ((header.fingerprint & 1) == 0)
    return bad(ConnectionKind::kData, FrameErrorKind::kFingerprint, header.fingerprint);
  return {};
}

FrameError check(const MessageHeader& header, bool zero_copy) {
  if (header.zero_copy() && !zero_copy)
    return bad(ConnectionKind::kMessages, FrameErrorKind::kZeroCopyFlag, header.word);
  if (static_cast<uint32_t>(header.frame()) >= kMessageFrames)
    return bad(ConnectionKind::kMessages, FrameErrorKind::kKind, static_cast<uint32_t>(header.frame()));
  if (!is_form(header.form())) return bad(ConnectionKind::kMessages, FrameErrorKind::kDType, header.form());
  if (!is_travelling_tag(header.tag))
    return bad(ConnectionKind::kMessages, FrameErrorKind::kTag, static_cast<uint32_t>(int32_t{header.tag}));
  const bool has_length = header.frame() == MessageFrame::kMessage ||
                          header.frame() == MessageFrame::kOffer ||
                          header.frame() == MessageFrame::kSynchronousOffer;
  const uint64_t item = has_length ? itemsize(static_cast<DType>(dtype_of_form(header.form()))) : 1;
  if (header.nbytes > kMostBytes || header.nbytes % item != 0)
    return bad(ConnectionKind::kMessages, FrameErrorKind::kLength, header.nbytes);
  return {};
}

bool updates(uint32_t dtype, uint32_t op) {
  if (dtype >= kDTypeCount || op >= kWindowOps) return false;
  const auto reduction = static_cast<ReduceOp>(op);
  if (op >= kReduceOpCount) return true;
  return reduction != ReduceOp::kAvg && reduction != ReduceOp::kPremulSum &&
         reducible(static_cast<DType>(dtype), reduction);
}

FrameError check(const WindowRequest& request) {
  const auto wrong = [](FrameErrorKind kind, uint64_t value) {
    return bad(ConnectionKind::kWindows, kind, value);
  };
  if (request.call >= kWindowCalls) return wrong(FrameErrorKind::kKind, request.call);
  const auto call = static_cast<WindowCall>(uint32_t{request.call});
  if (request.nbytes > kMostBytes) return wrong(FrameErrorKind::kLength, request.nbytes);
  if (request.detail >= (call == WindowCall::kSignal ? kWindowSignals : 2))
    return wrong(FrameErrorKind::kKind, request.detail);
  if (call == WindowCall::kSwap && (request.nbytes == 0 || request.nbytes > kMostSwapped))
    return wrong(FrameErrorKind::kLength, request.nbytes);
  if (call != WindowCall::kUpdate) return {};
  if (!updates(request.dtype, request.op)) return wrong(FrameErrorKind::kOperation, request.op);
  const size_t item = itemsize(static_cast<DType>(uint32_t{request.dtype}));
  if (request.nbytes > kUpdateBytes || request.nbytes % item != 0)
    return wrong(FrameErrorKind::kLength, request.nbytes);
  return {};
}

FrameError check(const WindowReply& reply, int ranks) {
  if (reply.status > static_cast<uint32_t>(WindowStatus::kLate))
    return bad(ConnectionKind::kWindows, FrameErrorKind::kKind, reply.status);
  if (reply.rank < -1 || reply.rank >= ranks)
    return bad(ConnectionKind::kWindows, FrameErrorKind::kRank, static_cast<uint32_t>(int32_t{reply.rank}));
  return {};
}

ControlBytes encode(const ControlFrame& frame) {
  ControlBytes bytes{};
  FieldSerializer<true> mover(bytes.data());
  move_frame(mover, frame);
  return bytes;
}

FrameError parse(const ControlBytes& bytes, int ranks, ControlFrame& frame) {
  FieldSerializer<false> mover(bytes.data());
  move_frame(mover, frame);
  using ControlKind = ControlFrame::ControlKind;
  if (frame.kind < ControlKind::kAsk || frame.kind > ControlKind::kNext)
    return bad_control(FrameErrorKind::kKind, static_cast<int64_t>(frame.kind));
  if (frame.kind == ControlKind::kProposal)
    return frame.proposal.nbytes <= kProposalBytes
               ? FrameError{}
               : bad_control(FrameErrorKind::kLength, frame.proposal.nbytes);
  if (frame.kind == ControlKind::kAbort)
    if (const FrameError found = check(frame.fault, ranks); found.kind != FrameErrorKind::kNone) return found;
  return check(frame.status);
}

std::string describe(const FrameError& bad) {
  return std::string("its ") + kWireNames[static_cast<size_t>(bad.wire)] + " connection sent " +
         kFlawTexts[static_cast<size_t>(bad.kind)] + " (" + std::to_string(bad.value) + ")";
}

}  // namespace unisono
