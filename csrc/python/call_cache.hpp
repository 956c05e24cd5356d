// Calls that were checked once. Such a call needs no check if it comes again with the same options, dtypes
// and sizes, and its buffers share memory as before, or not at all.
#pragma once

#include <algorithm>

#include "python/calls.hpp"

namespace call_cache {

namespace nb = nanobind;
using namespace unisono;

inline bool overlap(const BufferExtent& a, const BufferExtent& b, size_t item) {
  return a.numel > 0 && b.numel > 0 && a.data < b.data + b.numel * item && b.data < a.data + a.numel * item;
}

// Whether nothing that is written shares memory with anything else.
inline bool disjoint(const CallBuffers& out, const CallBuffers& given) {
  if (out.count == 0) return true;
  const size_t item = itemsize(static_cast<DType>(out.dtype));
  for (size_t i = 0; i < out.count; ++i) {
    for (size_t j = 0; j < i; ++j)
      if (overlap(out.extents[i], out.extents[j], item)) return false;
    for (size_t j = 0; j < given.count; ++j)
      if (overlap(out.extents[i], given.extents[j], item)) return false;
  }
  return true;
}

inline bool same(const BufferExtent& a, const BufferExtent& b) {
  return a.data == b.data && a.numel == b.numel;
}

// Whether these are the buffers that were checked.
inline bool same_buffers(const std::vector<BufferExtent>& checked, const CallBuffers& seen) {
  return std::ranges::equal(checked, seen.all(), same);
}
// The same for some of the buffers of a coalesced call.
inline bool same_buffers(const std::vector<BufferExtent>& checked, const BufferList& seen,
                         const std::vector<uint32_t>& pieces) {
  const auto& all = seen.all();
  return all.empty() ? checked.empty()
                     : std::ranges::equal(checked, pieces, [&](const BufferExtent& extent, uint32_t piece) {
                         return piece < all.size() && same(extent, all[piece].extent);
                       });
}

// The arguments of a call without its buffers. Objects are compared by identity: names, operations and flags
// are usually the same objects in every call. A call with another object counts as a new call.
struct CallKey {
  PyObject *collective, *op, *algorithm, *reproducible, *codec, *between_hosts, *max_error;
  int64_t root;
  bool operator==(const CallKey&) const = default;
  // References, so that no other object gets their addresses.
  std::array<nb::object, 7> owned() const {
    return {nb::borrow(collective),   nb::borrow(op),    nb::borrow(algorithm),
            nb::borrow(reproducible), nb::borrow(codec), nb::borrow(between_hosts),
            nb::borrow(max_error)};
  }
};

// A call that was checked once. Another call needs no check if it has the same options, dtypes and sizes, and
// either the same distances between its buffers, or buffers that share no memory.
struct CachedCall {
  std::array<nb::object, 7> kept;  // the options
  CallKey options{};
  int out_dtype = -1, given_dtype = -1;
  size_t feedback_numel = 0;
  std::vector<size_t> out_numel, given_numel;
  std::vector<ptrdiff_t> distances;  // from the first buffer
  nb::object note;                   // see BoundCall
  bool writes = false, number = false, out_several = false, given_several = false;
  OperationDescriptor operation{};
  size_t numel = 0, made_numel = 0;  // made: the array that a call allocates
  double factor = 1;
  ResultKind returned = ResultKind::kNothing;

  bool fits(const CallKey& given_options, const CallBuffers& out, const CallBuffers& given,
            const CallBuffers& feedback) const {
    return operation.program != nullptr && options == given_options && out_dtype == out.dtype &&
           given_dtype == given.dtype && number == out.number && out_several == out.several &&
           given_several == given.several && alike(out_numel, out) && alike(given_numel, given) &&
           !(writes && out.readonly) && (placed_alike(out, given) || disjoint(out, given)) &&
           (options.codec == Py_None ? feedback.count == 0 : codes(out, given, feedback));
  }
  void set_distances(const CallBuffers& out, const CallBuffers& given) {
    distances.clear();
    each(out, given, [&](size_t, ptrdiff_t distance) {
      distances.push_back(distance);
      return true;
    });
  }

 private:
  // The checks that a call with codes needs each time. Where one fails, Python raises the error.
  bool codes(const CallBuffers& out, const CallBuffers& given, const CallBuffers& feedback) const {
    const auto positive = [](const CallBuffers& side) {
      return std::ranges::all_of(side.all(), [](const BufferExtent& extent) {
        return first_negative(reinterpret_cast<const float*>(extent.data), extent.numel) == extent.numel;
      });
    };
    if ((operation.checks_out && !positive(out)) || (operation.checks_in && !positive(given))) return false;
    if (feedback_numel == 0) return feedback.count == 0;
    return feedback.count == 1 && feedback.dtype == static_cast<int>(DType::kF32) && !feedback.readonly &&
           feedback.extents[0].numel == feedback_numel && disjoint(feedback, out) &&
           disjoint(feedback, given);
  }
  static bool alike(const std::vector<size_t>& numel, const CallBuffers& side) {
    const auto all = side.all();
    return std::equal(numel.begin(), numel.end(), all.begin(), all.end(),
                      [](size_t known, const BufferExtent& extent) { return known == extent.numel; });
  }
  bool placed_alike(const CallBuffers& out, const CallBuffers& given) const {
    return each(out, given, [&](size_t i, ptrdiff_t distance) { return distances[i] == distance; });
  }
  template <class Look>
  static bool each(const CallBuffers& out, const CallBuffers& given, Look look) {
    const unsigned char* const first = out.count > 0 ? out.extents[0].data : given.extents[0].data;
    size_t i = 0;
    for (const CallBuffers* side : {&out, &given})
      for (const BufferExtent& extent : side->all())
        if (!look(i++, extent.data - first)) return false;
    return true;
  }
};

// A coalesced call that was checked once, and the calls it became.
struct CachedCoalescedCall {
  struct ListItemShape {
    int dtype;
    size_t numel;
  };
  std::array<nb::object, 7> kept;
  CallKey options{};
  std::vector<ListItemShape> out, given;
  std::vector<ptrdiff_t> distances;  // of each input from its output: an input may be a block of it
  std::vector<BoundCall> calls;      // without buffers

  bool same_call(const CallKey& given_options, const BufferList& outs, const BufferList& givens) const {
    return options == given_options && alike(out, outs) && alike(given, givens);
  }
  bool fits(const CallKey& given_options, const BufferList& outs, const BufferList& givens) const {
    if (!same_call(given_options, outs, givens)) return false;
    if (!calls.front().writes) return true;
    const bool readonly =
        std::ranges::any_of(outs.all(), [](const BufferList::TypedExtent& one) { return one.readonly; });
    return !readonly && disjoint(outs, givens);
  }

  static std::vector<ptrdiff_t> distances_of(const BufferList& outs, const BufferList& givens) {
    std::vector<ptrdiff_t> list;
    list.reserve(givens.all().size());
    for (size_t i = 0; i < givens.all().size(); ++i)
      list.push_back(givens.all()[i].extent.data - outs.all()[i].extent.data);
    return list;
  }

 private:
  static bool alike(const std::vector<ListItemShape>& forms, const BufferList& side) {
    const auto same = [](const ListItemShape& form, const BufferList::TypedExtent& one) {
      return form.dtype == one.dtype && form.numel == one.extent.numel;
    };
    return std::equal(forms.begin(), forms.end(), side.all().begin(), side.all().end(), same);
  }
  // Whether no output shares memory with another buffer, apart from an input that is the same block of its
  // output as before.
  bool disjoint(const BufferList& outs, const BufferList& givens) const {
    struct AddressRange {
      const unsigned char *start, *end;
      bool written;
    };
    const auto reach = [](const BufferList::TypedExtent& one, bool written) {
      const size_t nbytes = one.extent.numel * itemsize(static_cast<DType>(one.dtype));
      return AddressRange{one.extent.data, one.extent.data + nbytes, written};
    };
    std::vector<AddressRange> reaches;
    reaches.reserve(outs.all().size() + givens.all().size());
    for (const BufferList::TypedExtent& one : outs.all())
      if (one.extent.numel > 0) reaches.push_back(reach(one, true));
    const auto reads = [&](const unsigned char* start, const unsigned char* end) {
      if (start < end) reaches.push_back({start, end, false});
    };
    for (size_t i = 0; i < givens.all().size(); ++i) {
      const AddressRange read = reach(givens.all()[i], false), own = reach(outs.all()[i], true);
      const bool meets = read.start < own.end && own.start < read.end;
      if (meets && read.start - own.start == distances[i]) {
        reads(read.start, std::min(read.end, own.start));
        reads(std::max(read.start, own.end), read.end);
      } else {
        reads(read.start, read.end);
      }
    }
    std::ranges::sort(reaches, {}, &AddressRange::start);
    const unsigned char *written = nullptr, *read = nullptr;
    for (const AddressRange& one : reaches) {
      if (one.start < written || (one.written && one.start < read)) return false;
      (one.written ? written : read) = std::max(one.written ? written : read, one.end);
    }
    return true;
  }
};

}  // namespace call_cache
