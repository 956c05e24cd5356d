"""Fuzzes what takes bytes apart in Python: the decoder of objects, and what the store's server reads.

    python tests/fuzz/decoders.py --seconds 600 [--seed 7] [--target objects] [--grow]

No process, socket or thread: functions of bytes. Inputs of the corpus and valid messages are changed, cut,
joined and given numbers at the limits. Feedback comes from outcomes: an input with a new type of object, or
an error from a new place, joins the pool; `--grow` keeps it in tests/fuzz/corpus. The decoder may return an
object or raise ValueError; the server may find an operation or raise `wire.FrameFormatError`. Anything else
is a failure, and its input goes to the working directory as crash-TARGET-HASH.
"""

import argparse
import hashlib
import random
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unisono.engine.encoding import decode, encode
from unisono.engine.store import wire
from unisono.engine.store.operations import (
    Add,
    Check,
    CompareSet,
    Count,
    Delete,
    Get,
    Keys,
    KeyValueTable,
    Peek,
    Set,
    Wait,
)

CORPUS = Path(__file__).resolve().parent / "corpus"
LONGEST_NBYTES = 4096
KEPT_NBYTES = 512  # of an input that `--grow` keeps
MOST_BYTES = 1 << 30  # of this process: an input of 4 KiB that needs more is an amplifier
NUMBERS = (0, 1, 7, 127, 128, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    None, True, 3, -(1 << 70), 2.5, 1j, "text", b"bytes", bytearray(b"more"), [1, [2, (3,)]], {"a": {1: 2}},
    {1, 2}, frozenset("x"), np.arange(3.0), np.zeros((2, 0, 3), "i2"), np.float32(1), np.array(b"ab"),
    np.arange(40000, dtype="u1").reshape(200, 200).T, np.zeros(2, [("x", "i4"), ("y", "f8", (2,))]),
    np.array("2026-01-01", "M8[D]"),
)  # fmt: skip
OPERATIONS = (
    Set("k"), Get("k"), Peek("k"), Wait(("k", "l")), Check(("k",)), Add("n", 5), CompareSet("k", b"v"),
    Delete("k"), Count("k"), Keys("k"),
)  # fmt: skip


class Target(NamedTuple):
    """What is fuzzed. run: (input) -> outcome in words.  valid: inputs to begin with."""

    run: Callable[[bytes], str]
    valid: list[bytes]


def place_of(error: BaseException) -> str:
    """The lines that an error passed, and those of what caused it: two errors of one place are alike."""
    lines, step = [], error.__traceback__
    while step is not None:
        lines.append(f"{Path(step.tb_frame.f_code.co_filename).stem}:{step.tb_lineno}")
        step = step.tb_next
    cause = error.__cause__ or error.__context__
    return f"{type(error).__name__} {' '.join(lines)}" + (f" after {place_of(cause)}" if cause else "")


def decode_object(data: bytes) -> str:
    """The type of the object in `data`, or the decoder's refusal."""
    for given in (data, bytearray(data)):  # read-only memory is copied, writable memory is shared
        try:
            found = decode(given)
        except ValueError as error:
            outcome = place_of(error)
        else:
            outcome = f"object {type(found).__name__}"
            if not isinstance(found, np.ndarray) or found.nbytes < LONGEST_NBYTES:
                repr(found)
    return outcome


def serve(data: bytes) -> str:
    """What the store's server makes of a client's frame: a greeting, then a request with its payload.

    The first byte is the length of the head; what is behind it is the payload.
    """
    head, payload = bytearray(data[1 : 1 + data[0]]) if data else bytearray(), bytearray(data[256:])
    outcomes = []
    for read in (wire.read_hello, wire.read_proof, wire.read_greeting):
        try:
            outcomes.append(type(read(head)).__name__)
        except wire.FrameFormatError as error:
            outcomes.append(place_of(error))
    try:
        request = wire.read_request(head)
    except wire.FrameFormatError as error:
        return " | ".join([*outcomes, place_of(error)])
    table = KeyValueTable({"k": b"v", "n": b"12"})
    missing = table.missing(request.op)
    reply = table.apply(request.op, payload)
    pieces = wire.reply_frame(reply)
    assert sum(map(len, pieces)) < 4 * LONGEST_NBYTES, "an answer longer than what was asked"
    return f"{type(request.op).__name__} {len(missing)} {bool(reply.error)}"


def targets() -> dict[str, Target]:
    """By name."""
    requests = [msgspec.msgpack.encode(wire.StoreRequest(op, 1.0)) for op in OPERATIONS]
    hello = msgspec.msgpack.encode(wire.ClientHello(wire.MAGIC, wire.VERSION, "job", "client"))
    heads = [*requests, hello, msgspec.msgpack.encode(wire.TokenProof(b"p" * 32))]
    return {
        "objects": Target(decode_object, [encode(value)[:LONGEST_NBYTES] for value in VALUES]),
        "store": Target(serve, [bytes([len(head)]) + head for head in heads]),
    }


def changed(chance: random.Random, pool: list[bytes]) -> bytes:
    """One of `pool` with some bytes changed, cut off, joined with another or overwritten by a number."""
    data = bytearray(chance.choice(pool))
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = chance.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del data[at : at + chance.randrange(1, 9)]
        elif kind == 3:
            data[at:at] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 4:
            number = chance.choice(NUMBERS)
            layout = chance.choice(("<Q", ">Q", "<I", ">I", ">H"))
            piece = struct.pack(layout, number % (1 << 8 * struct.calcsize(layout)))
            data[at : at + len(piece)] = piece
        else:
            other = chance.choice(pool)
            data[at:] = other[chance.randrange(len(other) + 1) :]
    return bytes(data[:LONGEST_NBYTES])


def fuzz(name: str, target: Target, seconds: float, seed: int, *, grow: bool) -> bool:
    """Run one target; whether nothing was wrong."""
    chance = random.Random(seed)
    folder = CORPUS / name
    pool = target.valid + [path.read_bytes() for path in sorted(folder.glob("*"))]
    seen = {target.run(data) for data in pool}
    begun, executions, kept = time.monotonic(), 0, 0
    while time.monotonic() < begun + seconds:
        data = changed(chance, pool)
        executions += 1
        try:
            outcome = target.run(data)
        except Exception as error:  # every other one is a fault
            crash = Path(f"crash-{name}-{hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]}")
            crash.write_bytes(data)
            print(f"{name}: {type(error).__name__}: {error}; input in {crash}", file=sys.stderr)
            return False
        if outcome not in seen:
            seen.add(outcome)
            pool.append(data)
            if grow and len(data) <= KEPT_NBYTES:
                folder.mkdir(parents=True, exist_ok=True)
                digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()[:12]
                (folder / digest).write_bytes(data)
                kept += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name}: {executions} inputs in {time.monotonic() - begun:.0f} s, {len(seen)} kinds of outcome,"
        f" {kept} inputs kept, peak {peak >> 20} MiB",
        flush=True,
    )
    if peak > MOST_BYTES:
        print(f"{name}: more memory than {MOST_BYTES >> 20} MiB", file=sys.stderr)
    return peak <= MOST_BYTES


def main(arguments: Iterable[str] | None = None) -> int:
    """Fuzz every target, or the one that is asked for, the same time each."""
    all_targets = targets()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--target", choices=sorted(all_targets), action="append")
    parser.add_argument("--grow", action="store_true", help="keep new inputs in the corpus")
    given = parser.parse_args(None if arguments is None else list(arguments))
    names = given.target or sorted(all_targets)
    print(f"seed {given.seed}", flush=True)
    share = given.seconds / len(names)
    results = [fuzz(name, all_targets[name], share, given.seed, grow=given.grow) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
