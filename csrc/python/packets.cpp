// The packets of the object calls: each has the length of an object, and the object if it has room for it.
// See unisono/engine/group/objects.py.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>

#include "python/bindings.hpp"

namespace nb = nanobind;

namespace {

constexpr size_t kPacket = 256;
constexpr size_t kRoom = kPacket - sizeof(uint64_t);
// In the length. What follows: one of the sender's objects has no room. A refusal: the bytes are a text.
constexpr uint64_t kFollows = uint64_t{1} << 63, kRefused = uint64_t{1} << 62;

uint64_t little(uint64_t value) {
  return std::endian::native == std::endian::big ? __builtin_bswap64(value) : value;
}

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

class Bytes {
 public:
  explicit Bytes(nb::handle owner) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  std::string_view all() const {
    return {static_cast<const char*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_;
};

nb::object pack(const nb::list& parts, bool refused) {
  const size_t count = parts.size();  // of the list itself, whatever a subclass's __len__ says
  nb::object made = checked(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kPacket)));
  char* const start = PyByteArray_AsString(made.ptr());
  std::memset(start, 0, count * kPacket);
  uint64_t mark = refused ? kRefused : 0;
  for (size_t i = 0; i < count; ++i) {
    if (parts.size() != count) throw nb::value_error("the list has changed");  // by a part's __buffer__
    const Bytes bytes(nb::borrow(parts[i]));
    const uint64_t length = little(bytes.all().size());
    char* const packet = start + kPacket * i;
    std::memcpy(packet, &length, sizeof length);
    if (bytes.all().size() > kRoom)
      mark |= kFollows;
    else
      std::memcpy(packet + sizeof length, bytes.all().data(), bytes.all().size());
  }
  for (size_t i = 0; mark != 0 && i < count; ++i) {
    uint64_t length;
    std::memcpy(&length, start + kPacket * i, sizeof length);
    length |= little(mark);
    std::memcpy(start + kPacket * i, &length, sizeof length);
  }
  return made;
}

// (follows, items): bytearrays, or the lengths of what follows.
nb::object unpack(nb::handle packets, nb::handle refusal) {
  const Bytes bytes(packets);
  const std::string_view all = bytes.all();
  if (all.empty() || all.size() % kPacket != 0) throw nb::value_error("these are no packets");
  const size_t count = all.size() / kPacket;
  const auto head = [&](size_t i) {
    uint64_t length;
    std::memcpy(&length, all.data() + kPacket * i, sizeof length);
    return little(length);
  };
  uint64_t marks = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t length = head(i);
    marks |= length & (kFollows | kRefused);
    if ((length & kRefused) == 0) continue;
    const size_t nbytes = std::min<size_t>(length & ~(kFollows | kRefused), kRoom);
    const nb::str reason = nb::steal<nb::str>(PyUnicode_DecodeUTF8(
        all.data() + kPacket * i + sizeof length, static_cast<Py_ssize_t>(nbytes), "replace"));
    const nb::object raised = refusal(i, reason);
    PyErr_SetObject(refusal.ptr(), raised.ptr());
    throw nb::python_error();
  }
  nb::list items;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t length = head(i) & ~kFollows;
    if (marks != 0)
      items.append(length);
    else if (length > kRoom)
      throw nb::value_error("these are no packets");
    else
      items.append(checked(PyByteArray_FromStringAndSize(all.data() + kPacket * i + sizeof length,
                                                         static_cast<Py_ssize_t>(length))));
  }
  return nb::make_tuple(marks != 0, items);
}

}  // namespace

void bind_packets(nb::module_& m) {
  m.attr("PACKET_NBYTES") = kPacket;
  m.def("pack_packets", &pack, nb::arg("parts"), nb::arg("refused") = false,
        nb::sig("def pack_packets(parts: list[bytes], refused: bool = False) -> bytearray"),
        "A packet for each of them. refused: they are texts why there are no objects.");
  m.def("unpack_packets", &unpack, nb::arg("packets"), nb::arg("refusal"),
        nb::sig("def unpack_packets(packets: bytearray, refusal: type[Exception]) -> "
                "tuple[bool, list[typing.Any]]"),
        "(False, the objects' bytes), or (True, their lengths: they follow).\n\n"
        "Raises refusal(place, text): a packet has a text instead of an object.");
}
