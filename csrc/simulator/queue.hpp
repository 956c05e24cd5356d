// A priority queue of events: a heap with four children per node, which is the fastest one for small events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace unisono::simulator {

// After so many events a run asks whether to end.
inline constexpr uint64_t kPollEvents = 1 << 16;

// `Event` has `bool before(const Event&) const`. Equal insertions give equal sequences: a run is
// deterministic.
template <class Event>
class Queue {
 public:
  bool empty() const { return heap_.empty(); }
  size_t size() const { return heap_.size(); }
  const Event& top() const { return heap_.front(); }

  void push(const Event& event) {
    size_t place = heap_.size();
    heap_.push_back(event);
    while (place > 0) {
      const size_t above = (place - 1) / kChildren;
      if (!event.before(heap_[above])) break;
      heap_[place] = heap_[above];
      place = above;
    }
    heap_[place] = event;
  }

  Event pop() {
    const Event first = heap_.front();
    const Event last = heap_.back();
    heap_.pop_back();
    if (!heap_.empty()) sink(last);
    return first;
  }

 private:
  static constexpr size_t kChildren = 4;

  // Puts an event into the hole at the top.
  void sink(const Event& event) {
    const size_t count = heap_.size();
    size_t place = 0;
    for (;;) {
      const size_t first = place * kChildren + 1;
      if (first >= count) break;
      const size_t end = first + kChildren < count ? first + kChildren : count;
      size_t least = first;
      for (size_t child = first + 1; child < end; ++child)
        if (heap_[child].before(heap_[least])) least = child;
      if (!heap_[least].before(event)) break;
      heap_[place] = heap_[least];
      place = least;
    }
    heap_[place] = event;
  }

  std::vector<Event> heap_;
};

}  // namespace unisono::simulator
