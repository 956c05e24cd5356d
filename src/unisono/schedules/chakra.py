"""Chakra execution traces: one file per rank, NAME.0.et, NAME.1.et ... Needs the package protobuf.

A file is a sequence of messages, each after its length: GlobalMetadata, then Nodes. What ranks send and
receive are COMM_SEND_NODE and COMM_RECV_NODE with the attributes comm_src, comm_dst, comm_size (bytes) and
comm_tag; computations are COMP_NODE with a duration. Nodes wait for the nodes in ctrl_deps and data_deps.

Source: MLCommons Chakra, schema/protobuf/et_def.proto (version 0.0.4); its numbers of fields are used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from unisono.plans.plan import Plan
from unisono.schedules.actions import Rates, TraceAction, actions

__all__ = ["chakra", "files_of", "read_chakra"]

VERSION = "0.0.4"
MOST_BYTES = 256 << 20
MOST_RANKS = 1 << 14
MOST_NODES = 1 << 20
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
KINDS = {COMPUTE: "calc", SEND: "send", RECEIVE: "recv"}
NUMBERS = {
    "int32_val": 7, "int64_val": 9, "uint32_val": 11, "uint64_val": 13, "sint32_val": 15, "sint64_val": 17,
    "fixed32_val": 19, "fixed64_val": 21, "sfixed32_val": 23, "sfixed64_val": 25,
}  # fmt: skip
READ = ("comm_src", "comm_dst", "comm_size", "comm_tag", "duration_nanos")


@cache
def _messages() -> dict[str, Any]:
    """The classes Node and GlobalMetadata, from the fields that are used; unknown fields are skipped."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "Chakra traces need the package protobuf: pip install 'unisono[chakra]'", name="google.protobuf"
        ) from None
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="unisono/chakra.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    attribute.field.add(name="name", number=1, type=field.TYPE_STRING, label=1)
    for name, number in NUMBERS.items():
        kind = getattr(field, f"TYPE_{name.removesuffix('_val').upper()}")
        attribute.field.add(name=name, number=number, type=kind, label=1, oneof_index=0)
    attribute.field.add(name="bool_val", number=27, type=field.TYPE_BOOL, label=1, oneof_index=0)
    metadata = file.message_type.add(name="GlobalMetadata")
    metadata.field.add(name="version", number=1, type=field.TYPE_STRING, label=1)
    node = file.message_type.add(name="Node")
    for name, number, kind, label in (
        ("id", 1, field.TYPE_UINT64, 1),
        ("name", 2, field.TYPE_STRING, 1),
        ("type", 3, field.TYPE_INT32, 1),  # an enum on the wire
        ("ctrl_deps", 4, field.TYPE_UINT64, 3),
        ("data_deps", 5, field.TYPE_UINT64, 3),
        ("duration_micros", 7, field.TYPE_UINT64, 1),
    ):
        node.field.add(name=name, number=number, type=kind, label=label)
    attributes = {"name": "attr", "number": 10, "type": field.TYPE_MESSAGE, "label": 3}
    node.field.add(**attributes, type_name=".ChakraProtoMsg.AttributeProto")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in ("Node", "GlobalMetadata")
    }


def chakra(plan: Plan, nbytes: int, rates: Rates = Rates()) -> list[bytes]:  # noqa: B008  # frozen
    """A plan as the contents of a file for each rank, for a buffer of `nbytes`.

    Durations are whole microseconds, rounded up; `duration_nanos` has what `rates` give.

    Raises:
        ModuleNotFoundError: protobuf is not installed.
    """
    return [
        b"".join(_delimited(message) for message in _nodes(rank, listed))
        for rank, listed in enumerate(actions(plan, nbytes, rates))
    ]


def _nodes(rank: int, listed: Sequence[TraceAction]) -> Iterator[Any]:
    classes = _messages()
    yield classes["GlobalMetadata"](version=VERSION)
    for number, action in enumerate(listed):
        kind = {"calc": COMPUTE, "send": SEND, "recv": RECEIVE}[action.kind]
        node = classes["Node"](id=number, name=action.label, type=kind)
        node.ctrl_deps.extend(action.irequires)
        node.data_deps.extend(action.requires)
        node.attr.add(name="is_cpu_op", bool_val=False)
        if action.kind == "calc":
            node.duration_micros = -(-action.size // 1000)
            node.attr.add(name="duration_nanos", uint64_val=action.size)
        else:
            source, target = (rank, action.peer) if action.kind == "send" else (action.peer, rank)
            node.attr.add(name="comm_src", int32_val=source)
            node.attr.add(name="comm_dst", int32_val=target)
            node.attr.add(name="comm_size", int64_val=action.size)
            node.attr.add(name="comm_tag", int32_val=action.tag)
        yield node


def _delimited(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    length, head = len(data), bytearray()
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    return bytes([*head, length]) + data


def files_of(file: Path) -> list[Path]:
    """The files of all ranks, given that of rank 0.

    Raises:
        ValueError: the name does not end in .0.et.
    """
    if not file.name.endswith(".0.et"):
        raise ValueError(f"{file}: expected the file of rank 0, whose name ends in .0.et")
    stem = file.name.removesuffix(".0.et")
    found = [file]
    while len(found) < MOST_RANKS and (beside := file.with_name(f"{stem}.{len(found)}.et")).exists():
        found.append(beside)
    return found


def read_chakra(file: str | Path) -> list[list[TraceAction]]:
    """The actions of all ranks; `file` is that of rank 0.

    Raises:
        OSError: a file cannot be read.  ValueError: it is wrong; the message names the file and the node.
        ModuleNotFoundError: protobuf is not installed.
    """
    files = files_of(Path(file))
    return [_rank(each, rank, len(files)) for rank, each in enumerate(files)]


def _rank(file: Path, rank: int, size: int) -> list[TraceAction]:
    from google.protobuf.message import DecodeError

    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    nodes: list[Any] = []
    for number, (start, part) in enumerate(_pieces(file, data)):
        try:
            message = _messages()["Node" if number else "GlobalMetadata"].FromString(part)
        except DecodeError as error:
            raise ValueError(f"{file}: byte {start}: {error}") from None
        if number:
            nodes.append(message)
    places = {node.id: at for at, node in enumerate(nodes)}
    if len(places) < len(nodes):
        raise ValueError(f"{file}: two nodes have the same id")
    return [_action(file, node, rank, size, places) for node in nodes]


def _pieces(file: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = count = 0
    while at < len(data):
        start, length, shift = at, 0, 0
        while True:
            if at >= len(data) or shift > 35:
                raise ValueError(f"{file}: byte {start}: the length of a message is damaged")
            byte = data[at]
            length |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        count += 1
        if at + length > len(data) or count > MOST_NODES:
            raise ValueError(f"{file}: byte {start}: a message of {length} bytes ends beyond the file")
        yield at, data[at : at + length]
        at += length


def _action(file: Path, node: Any, rank: int, size: int, places: dict[int, int]) -> TraceAction:
    where = f"{file}: node {node.id}"
    if node.type == COLLECTIVE:
        raise ValueError(f"{where} is a whole collective; expected a schedule of sends and receives")
    if node.type not in KINDS:
        raise ValueError(f"{where} has type {node.type}, expected computations, sends and receives")
    found = {}
    for each in node.attr:
        if (value := each.WhichOneof("value")) in NUMBERS:
            found[each.name] = getattr(each, value)
        elif each.name in READ:
            raise ValueError(f"{where}: {each.name} is no whole number")
    before = []
    for other in (*node.data_deps, *node.ctrl_deps):
        if other not in places or other == node.id:
            raise ValueError(f"{where} waits for node {other}, which is not in this file, or itself")
        before.append(places[other])
    requires, irequires = tuple(before[: len(node.data_deps)]), tuple(before[len(node.data_deps) :])
    kind = KINDS[node.type]
    if kind == "calc":
        nanos = int(found.get("duration_nanos", node.duration_micros * 1000))
        return TraceAction(kind, node.name, nanos, requires=requires, irequires=irequires)
    ends = tuple(int(found.get(name, -1)) for name in ("comm_src", "comm_dst"))
    own, peer = ends if kind == "send" else (ends[1], ends[0])
    if own not in (rank, -1) or not 0 <= peer < size or peer == rank:
        raise ValueError(
            f"{where} goes from rank {ends[0]} to rank {ends[1]}, in the file of rank {rank} of {size}"
        )
    nbytes = int(found.get("comm_size", -1))
    if not 0 <= nbytes < 1 << 60:
        raise ValueError(f"{where}: comm_size is {nbytes}")
    return TraceAction(kind, node.name, nbytes, peer, int(found.get("comm_tag", 0)), requires, irequires)
