// One number that identifies the layout of shared memory and frames. Ranks compare it, and report a
// difference before they connect.
//
// The table below lists each struct in shared memory and on the wire, field by field, each value of an enum,
// and each constant. A field that moves, or another value, changes the number. A change that no size, offset
// or value shows needs another kMeaning: the meaning of a field, the order of the parts of a region, the
// computation of a fingerprint, the division of a zero-copy transfer into units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "kernels/codec.hpp"
#include "protocol/frames.hpp"
#include "protocol/region.hpp"

namespace unisono {

constexpr uint32_t kMeaning = 16;

// A name, its offset or value, and its size.
struct LayoutField {
  std::string_view name;
  uint64_t value, bytes;
};

// FNV-1a over names and numbers.
constexpr uint32_t digest(std::initializer_list<LayoutField> facts) {
  uint32_t sum = 2166136261;
  const auto mix = [&sum](uint64_t byte) { sum = (sum ^ static_cast<uint32_t>(byte & 0xff)) * 16777619; };
  for (const LayoutField& fact : facts) {
    for (const char letter : fact.name) mix(static_cast<unsigned char>(letter));
    for (int shift = 0; shift < 64; shift += 8) mix(fact.value >> shift), mix(fact.bytes >> shift);
  }
  return sum;
}

#define FIELD(type, field) \
  LayoutField { #type "." #field, offsetof(type, field), sizeof(type::field) }
#define WHOLE(type) \
  LayoutField { #type, alignof(type), sizeof(type) }
#define VALUE(constant) LayoutField{#constant, static_cast<uint64_t>(constant), 0}

constexpr uint32_t kFacts = digest(
    {VALUE(kLineBytes), VALUE(kPageBytes), VALUE(kHistory), VALUE(kFifoSlots), VALUE(kInlineBytes),
     VALUE(kLeastChannelBytes), VALUE(kMostChannelBytes), VALUE(kChannelsBytes), VALUE(kEagerRanks), VALUE(kReportBytes), VALUE(kProposalBytes),
     VALUE(kAccessProbe), VALUE(kUnitBytes), VALUE(kMostUnits), VALUE(kClosed), VALUE(kMostBytes),
     VALUE(kControlBytes), VALUE(kLeaving), VALUE(kLocated),
     // Shared memory.
     WHOLE(RegionHeader), FIELD(RegionHeader, magic), FIELD(RegionHeader, ranks),
     FIELD(RegionHeader, staging_bytes), FIELD(RegionHeader, abort), WHOLE(AbortCell),
     FIELD(AbortCell, state), WHOLE(RankCell), FIELD(RankCell, pid), FIELD(RankCell, left),
     FIELD(RankCell, started), FIELD(RankCell, finished), FIELD(RankCell, token_address),
     FIELD(RankCell, token), FIELD(RankCell, stack_fd), FIELD(RankCell, thread), FIELD(RankCell, moved_ns),
     FIELD(RankCell, core), FIELD(RankCell, arena_fd), FIELD(RankCell, arena_base),
     FIELD(RankCell, arena_bytes), FIELD(RankCell, collective_event), FIELD(RankCell, message_event),
     FIELD(RankCell, membership_event), FIELD(RankCell, window_event), FIELD(RankCell, history),
     FIELD(RankCell, report), FIELD(RankCell, fault), FIELD(RankCell, fate), FIELD(RankCell, proposal),
     WHOLE(ProposalSlots), FIELD(ProposalSlots, version), FIELD(ProposalSlots, nbytes),
     FIELD(ProposalSlots, words), VALUE(Fate::kOpen), VALUE(Fate::kDecided), VALUE(Fate::kEvicted),
     WHOLE(CallRecord), FIELD(CallRecord, seq), FIELD(CallRecord, fingerprint), FIELD(CallRecord, numel),
     FIELD(CallRecord, root), FIELD(CallRecord, kind), FIELD(CallRecord, dtype), FIELD(CallRecord, op),
     FIELD(CallRecord, algorithm), FIELD(CallRecord, block), FIELD(CallRecord, coding), WHOLE(EventCount),
     FIELD(EventCount, epoch), FIELD(EventCount, sleepers), WHOLE(RankReport), FIELD(RankReport, state),
     FIELD(RankReport, seq), FIELD(RankReport, text), WHOLE(FifoSlot), FIELD(FifoSlot, number),
     FIELD(FifoSlot, location), FIELD(FifoSlot, fingerprint), FIELD(FifoSlot, nbytes),
     FIELD(FifoSlot, transfer), FIELD(FifoSlot, offset), FIELD(FifoSlot, payload), WHOLE(Fifo),
     FIELD(Fifo, slots), FIELD(Fifo, acked), WHOLE(Channel), FIELD(Channel, written),
     FIELD(Channel, consumed), FIELD(Channel, transfer), FIELD(Channel, completed_transfers),
     WHOLE(ZeroCopyTransfer), FIELD(ZeroCopyTransfer, source), FIELD(ZeroCopyTransfer, target),
     FIELD(ZeroCopyTransfer, claimed), FIELD(ZeroCopyTransfer, completed), FIELD(ZeroCopyTransfer, broken),
     VALUE(PayloadLocation::kStaged), VALUE(PayloadLocation::kZeroCopy), VALUE(PayloadLocation::kMapped),
     // Shared memory and the wire.
     WHOLE(Fault), FIELD(Fault, kind), FIELD(Fault, found_by), FIELD(Fault, rank), FIELD(Fault, signal),
     FIELD(Fault, exit_code), FIELD(Fault, seq), FIELD(Fault, size_mismatch), FIELD(Fault, frame),
     FIELD(Fault, window), VALUE(WindowWait::kNone), VALUE(WindowWait::kLock), VALUE(WindowWait::kUpdate),
     VALUE(WindowWait::kFence), VALUE(WindowWait::kPost), VALUE(WindowWait::kComplete),
     VALUE(WindowWait::kAnswer), WHOLE(SizeMismatch), FIELD(SizeMismatch, tag),
     FIELD(SizeMismatch, expected_form), FIELD(SizeMismatch, sent_form), FIELD(SizeMismatch, expected_nbytes),
     FIELD(SizeMismatch, sent_nbytes), FIELD(SizeMismatch, seq), FIELD(SizeMismatch, more),
     FIELD(SizeMismatch, scratch), WHOLE(FrameError), FIELD(FrameError, wire), FIELD(FrameError, kind),
     FIELD(FrameError, value), WHOLE(DataHeader), FIELD(DataHeader, nbytes), FIELD(DataHeader, fingerprint),
     WHOLE(MessageHeader), FIELD(MessageHeader, nbytes), FIELD(MessageHeader, tag),
     FIELD(MessageHeader, word), VALUE(MessageHeader::kZeroCopy), VALUE(MessageHeader::kFrameShift),
     VALUE(kMessageFrames), VALUE(MessageKind::kArray), VALUE(MessageKind::kObject), WHOLE(RankStatus),
     FIELD(RankStatus, started), FIELD(RankStatus, finished), FIELD(RankStatus, history),
     FIELD(RankStatus, has_report), FIELD(RankStatus, report_seq), FIELD(RankStatus, report),
     VALUE(ControlFrame::ControlKind::kAsk), VALUE(ControlFrame::ControlKind::kAnswer),
     VALUE(ControlFrame::ControlKind::kAbort), VALUE(ControlFrame::ControlKind::kLeft),
     VALUE(ControlFrame::ControlKind::kProposal), VALUE(ControlFrame::ControlKind::kNext),
     VALUE(FaultKind::kNone), VALUE(FaultKind::kTimeout), VALUE(FaultKind::kPeerLost),
     VALUE(FaultKind::kPeerLeft), VALUE(FaultKind::kMismatch), VALUE(FaultKind::kInterrupted),
     VALUE(FaultKind::kAborted), VALUE(FaultKind::kNoMemory), VALUE(FaultKind::kBadFrame),
     VALUE(FaultKind::kHostSilent), VALUE(FaultKind::kStopped), VALUE(FaultKind::kUnreadable),
     VALUE(FaultKind::kUnwritable), VALUE(FaultKind::kNoAccess), VALUE(FaultKind::kReplaced),
     VALUE(ConnectionKind::kControl), VALUE(ConnectionKind::kData), VALUE(ConnectionKind::kMessages),
     VALUE(ConnectionKind::kWindows), WHOLE(WindowRequest), FIELD(WindowRequest, call),
     FIELD(WindowRequest, dtype), FIELD(WindowRequest, op), FIELD(WindowRequest, detail),
     FIELD(WindowRequest, address), FIELD(WindowRequest, nbytes), FIELD(WindowRequest, timeout_ns),
     WHOLE(WindowReply), FIELD(WindowReply, status), FIELD(WindowReply, rank), VALUE(kWindowCalls),
     VALUE(kUpdateBytes), VALUE(kWindowSignals), VALUE(kWindowOps), VALUE(kConnectionKinds),
#define X(enumerator, what) VALUE(FrameErrorKind::enumerator),
     UNISONO_FLAWS(X)
#undef X
#define X(enumerator, name, bytes) LayoutField{name, static_cast<uint64_t>(DType::enumerator), bytes},
         UNISONO_DTYPES(X)
#undef X
#define X(enumerator, name) LayoutField{name, static_cast<uint64_t>(ReduceOp::enumerator), 0},
             UNISONO_REDUCE_OPS(X)
#undef X
#define X(enumerator, name, bits, blocks) \
  LayoutField{name, static_cast<uint64_t>(CodecFormat::enumerator), bits + 256 * blocks},
                 UNISONO_CODECS(X)
#undef X
    });

#undef FIELD
#undef WHOLE
#undef VALUE

// 24 bits: the number has to fit into a region's first word. It is also in each rank's peer info in the
// store.
constexpr uint32_t kLayout = kMeaning << 16 | (kFacts & 0xffff);
constexpr uint64_t kMagic = 0x6f6e696e55 | uint64_t{kLayout} << 40;  // "Unino" and the number
static_assert(kMeaning < 1 << 8);

// The digest changes when a field moves, grows, changes places with another one, or is renamed.
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"a", 0, 4}, {"b", 8, 4}}));
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"a", 0, 4}, {"b", 4, 8}}));
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"b", 0, 4}, {"a", 4, 4}}));
static_assert(digest({{"a", 0, 4}}) != digest({{"b", 0, 4}}));

}  // namespace unisono
