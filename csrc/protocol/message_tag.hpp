// The tags of messages as they travel. Several groups can share the messages of one engine: a group and its
// duplicates. Each duplicate has a number, its context, and a message matches receives of its context only.
//
// A tag of context 0, the group's own, travels as it is. That of a duplicate travels as a negative number, which
// holds the context and the tag. The numbers from -1 down are the wildcards of the contexts.
#pragma once

#include <cstdint>

namespace unisono {

constexpr int kAnyTag = -1;
constexpr int kContextTagBits = 19;
constexpr int kMostContexts = 4095;  // without the group's own
constexpr int kMostContextTag = (1 << kContextTagBits) - 1;

constexpr int32_t tag_in_context(int context, int tag) {
  if (context == 0) return tag;
  if (tag == kAnyTag) return kAnyTag - context;
  const auto number = static_cast<uint32_t>(context - 1) << kContextTagBits | static_cast<uint32_t>(tag);
  return static_cast<int32_t>(number | uint32_t{1} << 31);
}
constexpr bool is_any_tag(int32_t travelling) {
  return travelling < 0 && travelling >= kAnyTag - kMostContexts;
}
// Whether a message can have it.
constexpr bool is_travelling_tag(int32_t travelling) {
  return travelling >= 0 || travelling < -(1 << kContextTagBits);
}
constexpr int context_of_tag(int32_t travelling) {
  if (travelling >= 0) return 0;
  if (is_any_tag(travelling)) return kAnyTag - travelling;
  return static_cast<int>((static_cast<uint32_t>(travelling) & ~(uint32_t{1} << 31)) >> kContextTagBits) + 1;
}
// The wildcard of its context.
constexpr int32_t any_tag_like(int32_t travelling) { return kAnyTag - context_of_tag(travelling); }
// The tag as the caller knows it.
constexpr int plain_tag(int32_t travelling) {
  if (travelling >= 0) return travelling;
  return is_any_tag(travelling) ? kAnyTag
                                : static_cast<int>(static_cast<uint32_t>(travelling) & kMostContextTag);
}
static_assert(plain_tag(tag_in_context(kMostContexts, kMostContextTag)) == kMostContextTag);
static_assert(context_of_tag(tag_in_context(kMostContexts, kMostContextTag)) == kMostContexts);
static_assert(is_travelling_tag(tag_in_context(kMostContexts, kMostContextTag)));
static_assert(context_of_tag(tag_in_context(1, 0)) == 1 && context_of_tag(tag_in_context(7, kAnyTag)) == 7);

}  // namespace unisono
