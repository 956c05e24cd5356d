// The packets of the object calls: each has the length of an object, and the object if it has room for it.
// See unisono/engine/group/objects.py.
#include <algorithm>
#include <array>
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

nb::object room_for(size_t count) {
  nb::object made = checked(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * kPacket)));
  std::memset(PyByteArray_AsString(made.ptr()), 0, count * kPacket);
  return made;
}

nb::object object_of(std::string_view bytes, nb::handle decode) {
  const auto nbytes = static_cast<Py_ssize_t>(bytes.size());
  if (decode.is_none()) return checked(PyByteArray_FromStringAndSize(bytes.data(), nbytes));
  return call_python(decode, checked(PyBytes_FromStringAndSize(bytes.data(), nbytes)));
}

nb::object pack(const nb::list& parts, bool refused) {
  const size_t count = parts.size();  // of the list itself, whatever a subclass's __len__ says
  nb::object made = room_for(count);
  char* const start = PyByteArray_AsString(made.ptr());
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

// (the bytes of the objects, their packets).
nb::object encode_all(const nb::list& objs, nb::handle encode) {
  nb::list parts;
  for (size_t i = 0; i < objs.size(); ++i) parts.append(call_python(encode, nb::borrow(objs[i])));
  nb::object packets = pack(parts, false);
  return nb::make_tuple(std::move(parts), std::move(packets));
}

// (follows, items): what `decode` makes of the objects' bytes, or the lengths of what follows.
nb::object unpack(nb::handle packets, nb::handle refusal, nb::handle decode) {
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
      items.append(object_of(all.substr(kPacket * i + sizeof length, length), decode));
  }
  return nb::make_tuple(marks != 0, std::move(items));
}

// Moves packets by an operation: `move(kind, out, sendbuf, *more)`.
nb::object exchange(nb::handle move, nb::handle kind, nb::handle sent, size_t size, nb::handle refusal,
                    nb::handle decode, const nb::args& more) {
  constexpr size_t kMost = 12;
  if (more.size() > kMost) throw nb::type_error("too many arguments");
  const auto is = [&](const char* name) { return PyUnicode_CompareWithASCIIString(kind.ptr(), name) == 0; };
  const bool in_place = is("broadcast_object"), one = in_place || is("scatter_object");
  nb::object out = in_place && !sent.is_none() ? nb::borrow(sent) : room_for(one ? 1 : size);
  std::array<PyObject*, 3 + kMost> given{kind.ptr(), out.ptr(), in_place ? Py_None : sent.ptr()};
  for (size_t i = 0; i < more.size(); ++i) given[3 + i] = more[i].ptr();
  checked(unisono_call(move.ptr(), given.data(), 3 + more.size(), nullptr));
  return unpack(out, refusal, decode);
}

}  // namespace

void bind_packets(nb::module_& m) {
  m.attr("PACKET_NBYTES") = kPacket;
  m.def("pack_packets", &pack, nb::arg("parts"), nb::arg("refused") = false,
        nb::sig("def pack_packets(parts: list[bytes], refused: bool = False) -> bytearray"),
        "A packet for each of them. refused: they are texts why there are no objects.");
  m.def("encode_packets", &encode_all, nb::arg("objs"), nb::arg("encode"),
        nb::sig("def encode_packets(objs: list[typing.Any], encode: typing.Callable[[typing.Any], bytes]) -> "
                "tuple[list[bytes], bytearray]"),
        "What `encode` makes of objects, and packets of that.");
  m.def(
      "exchange_packets", &exchange, nb::arg("move"), nb::arg("kind"), nb::arg("sent").none(),
      nb::arg("size"), nb::arg("refusal"), nb::arg("decode").none(), nb::arg("more"),
      nb::sig("def exchange_packets(move: typing.Callable[..., object], kind: str, sent: bytearray | None, "
              "size: int, refusal: type[Exception], decode: typing.Callable[[bytes], typing.Any] | None, "
              "*more: typing.Any) -> tuple[bool, list[typing.Any]]"),
      "The first operation of an object call: move(kind, out, sendbuf, *more) moves the packets of all ranks."
      "\n\nsent: packets of what this rank sends; None: nothing.\n"
      "Returns (False, the objects of this rank: their bytes, or what `decode` makes of them), or (True, the "
      "lengths of these, which follow).\n"
      "Raises refusal(place, text): a rank has sent a text instead of an object; on all that were to get "
      "it.");
}
