// One number that identifies the layout of shared memory and frames. Ranks compare it, and report a
// difference before they connect.
//
// The table below lists each struct in shared memory and on the wire, field by field, each value of an enum,
// and each constant. A field that moves, or another value, changes the number. A change that no size, offset
// or value shows needs another kMeaning: the meaning of a field, the order of the parts of a region, the
// computation of a fingerprint, the division of a loan into units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "protocol/frames.hpp"
#include "protocol/region.hpp"

namespace unisono {

constexpr uint32_t kMeaning = 14;

// A name, its offset or value, and its size.
struct Fact {
  std::string_view name;
  uint64_t value, bytes;
};

// FNV-1a over names and numbers.
constexpr uint32_t digest(std::initializer_list<Fact> facts) {
  uint32_t sum = 2166136261;
  const auto mix = [&sum](uint64_t byte) { sum = (sum ^ static_cast<uint32_t>(byte & 0xff)) * 16777619; };
  for (const Fact& fact : facts) {
    for (const char letter : fact.name) mix(static_cast<unsigned char>(letter));
    for (int shift = 0; shift < 64; shift += 8) mix(fact.value >> shift), mix(fact.bytes >> shift);
  }
  return sum;
}

#define FIELD(type, field) \
  Fact { #type "." #field, offsetof(type, field), sizeof(type::field) }
#define WHOLE(type) \
  Fact { #type, alignof(type), sizeof(type) }
#define VALUE(constant) Fact{#constant, static_cast<uint64_t>(constant), 0}

constexpr uint32_t kFacts = digest(
    {VALUE(kLineBytes), VALUE(kPageBytes), VALUE(kHistory), VALUE(kLaneEntries), VALUE(kInlineBytes),
     VALUE(kChannelBytes), VALUE(kRemarkBytes), VALUE(kProposalBytes), VALUE(kLandmark), VALUE(kUnitBytes),
     VALUE(kMostUnits), VALUE(kClosed), VALUE(kMostBytes), VALUE(kControlBytes), VALUE(kLeaving),
     // Shared memory.
     WHOLE(RegionHeader), FIELD(RegionHeader, magic), FIELD(RegionHeader, ranks),
     FIELD(RegionHeader, staging_bytes), FIELD(RegionHeader, abort), WHOLE(AbortCell),
     FIELD(AbortCell, state), WHOLE(RankCell), FIELD(RankCell, pid), FIELD(RankCell, left),
     FIELD(RankCell, started), FIELD(RankCell, finished), FIELD(RankCell, token_address),
     FIELD(RankCell, token), FIELD(RankCell, moved_ns), FIELD(RankCell, core), FIELD(RankCell, arena_fd),
     FIELD(RankCell, arena_base), FIELD(RankCell, arena_bytes), FIELD(RankCell, collective_event),
     FIELD(RankCell, message_event), FIELD(RankCell, membership_event), FIELD(RankCell, history),
     FIELD(RankCell, remark), FIELD(RankCell, fault), FIELD(RankCell, fate), FIELD(RankCell, proposal),
     WHOLE(Proposal), FIELD(Proposal, version), FIELD(Proposal, nbytes), FIELD(Proposal, words),
     VALUE(Fate::kOpen), VALUE(Fate::kDecided), VALUE(Fate::kEvicted), WHOLE(CallRecord),
     FIELD(CallRecord, seq), FIELD(CallRecord, fingerprint), FIELD(CallRecord, numel),
     FIELD(CallRecord, root), FIELD(CallRecord, kind), FIELD(CallRecord, dtype), FIELD(CallRecord, op),
     FIELD(CallRecord, algorithm), FIELD(CallRecord, block), FIELD(CallRecord, coding), WHOLE(EventCount),
     FIELD(EventCount, epoch), FIELD(EventCount, sleepers), WHOLE(Remark), FIELD(Remark, state),
     FIELD(Remark, seq), FIELD(Remark, text), WHOLE(LaneEntry), FIELD(LaneEntry, number),
     FIELD(LaneEntry, place), FIELD(LaneEntry, fingerprint), FIELD(LaneEntry, nbytes), FIELD(LaneEntry, loan),
     FIELD(LaneEntry, offset), FIELD(LaneEntry, payload), WHOLE(Lane), FIELD(Lane, entries),
     FIELD(Lane, acked), WHOLE(Channel), FIELD(Channel, written), FIELD(Channel, consumed),
     FIELD(Channel, loan), FIELD(Channel, returned), WHOLE(Loan), FIELD(Loan, source), FIELD(Loan, target),
     FIELD(Loan, claimed), FIELD(Loan, settled), FIELD(Loan, broken), VALUE(Place::kStaged),
     VALUE(Place::kLent), VALUE(Place::kOpen),
     // Shared memory and the wire.
     WHOLE(Fault), FIELD(Fault, kind), FIELD(Fault, by), FIELD(Fault, about), FIELD(Fault, signal),
     FIELD(Fault, exit_code), FIELD(Fault, seq), FIELD(Fault, misfit), FIELD(Fault, frame),
     WHOLE(SizeMismatch), FIELD(SizeMismatch, tag), FIELD(SizeMismatch, wanted_form),
     FIELD(SizeMismatch, got_form), FIELD(SizeMismatch, wanted_nbytes), FIELD(SizeMismatch, got_nbytes),
     FIELD(SizeMismatch, seq), FIELD(SizeMismatch, more), FIELD(SizeMismatch, scratch), WHOLE(BadFrame),
     FIELD(BadFrame, wire), FIELD(BadFrame, flaw), FIELD(BadFrame, value), WHOLE(DataHeader),
     FIELD(DataHeader, nbytes), FIELD(DataHeader, fingerprint), WHOLE(MessageHeader),
     FIELD(MessageHeader, nbytes), FIELD(MessageHeader, tag), FIELD(MessageHeader, word),
     VALUE(MessageHeader::kLent), VALUE(MessageKind::kArray), VALUE(MessageKind::kObject), WHOLE(RankStatus),
     FIELD(RankStatus, started), FIELD(RankStatus, finished), FIELD(RankStatus, history),
     FIELD(RankStatus, remarked), FIELD(RankStatus, remark_seq), FIELD(RankStatus, remark),
     VALUE(ControlFrame::Kind::kAsk), VALUE(ControlFrame::Kind::kAnswer), VALUE(ControlFrame::Kind::kAbort),
     VALUE(ControlFrame::Kind::kLeft), VALUE(ControlFrame::Kind::kProposal), VALUE(ControlFrame::Kind::kNext),
     VALUE(FaultKind::kNone), VALUE(FaultKind::kTimeout), VALUE(FaultKind::kPeerLost),
     VALUE(FaultKind::kPeerLeft), VALUE(FaultKind::kMismatch), VALUE(FaultKind::kInterrupted),
     VALUE(FaultKind::kAborted), VALUE(FaultKind::kNoMemory), VALUE(FaultKind::kBadFrame),
     VALUE(FaultKind::kHostSilent), VALUE(FaultKind::kStopped), VALUE(Wire::kControl), VALUE(Wire::kData),
     VALUE(Wire::kMessages), VALUE(kWires),
#define X(enumerator, what) VALUE(Flaw::enumerator),
     UNISONO_FLAWS(X)
#undef X
#define X(enumerator, name, bytes) Fact{name, static_cast<uint64_t>(DType::enumerator), bytes},
         UNISONO_DTYPES(X)
#undef X
#define X(enumerator, name) Fact{name, static_cast<uint64_t>(ReduceOp::enumerator), 0},
             UNISONO_REDUCE_OPS(X)
#undef X
    });

#undef FIELD
#undef WHOLE
#undef VALUE

// 24 bits: the number has to fit into a region's first word. It also stands in each rank's card in the store.
constexpr uint32_t kLayout = kMeaning << 16 | (kFacts & 0xffff);
constexpr uint64_t kMagic = 0x6f6e696e55 | uint64_t{kLayout} << 40;  // "Unino" and the number
static_assert(kMeaning < 1 << 8);

// The digest changes when a field moves, grows, changes places with another one, or is renamed.
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"a", 0, 4}, {"b", 8, 4}}));
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"a", 0, 4}, {"b", 4, 8}}));
static_assert(digest({{"a", 0, 4}, {"b", 4, 4}}) != digest({{"b", 0, 4}, {"a", 4, 4}}));
static_assert(digest({{"a", 0, 4}}) != digest({{"b", 0, 4}}));

}  // namespace unisono
