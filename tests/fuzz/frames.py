"""Fuzzes every frame that a peer can send, against real ranks, windows, stores and hand-shakes.

    python tests/fuzz/frames.py --frames 100000 [--seed 7] [--target rank]
    FUZZ_FRAMES=100000 tools/sanitize.sh address tests/fuzz/test_fuzz_frames.py     the same under ASan

Frames are random, valid with some bytes changed, cut off, replayed, or carry numbers at the limits. What may
come of them: an error of Unisono. What may not: any other exception, more memory than MOST_BYTES, a crash,
which ends this process. Prints the seed of each failure: `--seed` with it and `--frames 1` shows it again.
"""

import argparse
import contextlib
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

import unisono as un
from unisono import _native
from unisono.engine.base.authentication import handshake
from unisono.engine.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.memory.buffers import DTYPES
from unisono.engine.store import wire
from unisono.engine.store.operations import Add, Check, CompareSet, Count, Get, Keys, Peek, Set, Wait
from unisono.engine.windows.window import ExposedPart, Window

KINDS = ("control", "data", "messages")
LIMITS = [
    0, 1, 2, 7, 8, 15, 16, 127, 128, 255, 4096, (1 << 16) - 1, (1 << 26) - 128, 1 << 26, (1 << 31) - 1,
    1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 48, (1 << 48) + 1, (1 << 62), (1 << 63) - 1, 1 << 63,
    (1 << 63) + 5, (1 << 64) - 1,
]  # fmt: skip
MOST_BYTES = 1 << 30  # of this process: the sanitizer keeps what was freed for a while
CASE_FRAMES = 40
CALL = struct.Struct("<QQQi4BII")
CONTROL = struct.Struct("<IIiiiiQiIIQQQIIIIQIQQ")
REQUEST, REPLY = struct.Struct("<4IQQq"), struct.Struct("<Ii")  # of windows


class Chance(random.Random):
    """Random numbers, mostly at the limits."""

    def number(self, bits: int) -> int:
        value = self.choice(LIMITS) + self.choice([-1, 0, 0, 0, 1])
        return (value if self.random() < 0.8 else self.getrandbits(64)) % (1 << bits)

    def signed(self, bits: int) -> int:
        return self.number(bits) - (1 << (bits - 1)) if self.random() < 0.3 else self.number(bits - 1)

    def small(self, bits: int) -> int:
        """Mostly a number that a frame may hold."""
        return self.randrange(3) if self.random() < 0.8 else self.number(bits)


def control_frame(chance: Chance) -> bytes:
    kind, fault = chance.choice([1, 2, 2, 3, 4, chance.number(32)]), chance.small(32)
    ranks = [chance.small(31) for _ in range(4)]
    sizes = [chance.small(31), *(chance.small(32) for _ in range(2)), *(chance.number(64) for _ in range(3))]
    flags = [chance.small(32) for _ in range(4)]
    started = chance.small(64)
    number, window = chance.number(64), chance.small(32)
    head = (kind, fault, *ranks, chance.number(64), *sizes, *flags, number, window, started)
    calls = b"".join(
        CALL.pack(chance.choice([0, 0, 1, started]) if chance.random() < 0.9 else chance.number(64),
                  chance.number(64), chance.number(64), chance.small(31),
                  *(chance.small(8) for _ in range(4)), chance.small(32), chance.small(32))
        for _ in range(16)
    )  # fmt: skip
    text = chance.choice([bytes(240), b"x" * 239 + b"\0", chance.randbytes(240)])
    report = struct.pack("<IQ", chance.choice([0, 0, 1, chance.number(32)]), chance.number(64)) + text
    return CONTROL.pack(*head, min(started, chance.small(64))) + calls + report


def data_frame(chance: Chance) -> bytes:
    return struct.pack("<QQ", chance.number(64), chance.number(64)) + chance.randbytes(chance.randrange(64))


def message_frame(chance: Chance) -> bytes:
    dtype = chance.choice([9, 9, 9, 0, 11, 12, 1 << 31, (1 << 31) + 9, chance.number(32)])
    nbytes = chance.choice([0, 8, 80, 800, 8 * chance.randrange(100), chance.number(64)])
    payload = bytes(nbytes) if nbytes <= 1 << 20 and chance.random() < 0.8 else b""
    tag = chance.choice([0, 0, 1, chance.signed(32)])
    return struct.pack("<QiI", nbytes, tag, dtype) + payload


MAKERS: dict[str, Callable[[Chance], bytes]] = {
    "control": control_frame, "data": data_frame, "messages": message_frame,
}  # fmt: skip


def changed(chance: Chance, frame: bytes) -> bytes:
    """The frame as it is, with bytes changed, cut off, twice, or something else altogether."""
    how = chance.random()
    if how < 0.5 or not frame:
        return frame
    if how < 0.7:
        some = bytearray(frame)
        for _ in range(chance.randrange(1, 4)):
            some[chance.randrange(len(some))] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        return bytes(some)
    if how < 0.8:
        return frame[: chance.randrange(len(frame))]
    return frame + frame if how < 0.9 else chance.randbytes(chance.randrange(1, 2000))


# ---- a rank --------------------------------------------------------------------------------------


class Rank:
    """Rank 0 of two, whose only peer is the fuzzer: it holds the other ends of the three connections."""

    def __init__(self) -> None:
        pairs = {kind: socket.socketpair() for kind in KINDS}
        for near, far in pairs.values():
            near.setblocking(False)
            far.setblocking(False)
        lists = {kind: [-1, near.detach()] for kind, (near, _) in pairs.items()}
        joined = _native.Connections(places=[0, -1], hosts=[0, 1], **lists)
        region = _native.Region(-1, 1, 1 << 16, True)
        engine = _native.Engine(region, 0, [-1, -1], -1, 2, 0.0, 1 << 18, connections=joined)
        self.ends = {kind: far for kind, (_, far) in pairs.items()}
        self.group = NativeGroup(engine, 0, 2, "fuzz", 0.05, hosts=("here", "there"))

    def close(self) -> None:
        for end in self.ends.values():
            end.close()
        self.group.close()


def tell(end: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(BlockingIOError, ConnectionError):
        end.send(frame)


ANSWER = CONTROL.pack(2, *([0] * 20)) + bytes(16 * CALL.size) + struct.pack("<IQ", 1, 0) + b"x" + bytes(239)


def echo(rank: Rank, chance: Chance, echoes: bool, stop: threading.Event) -> None:
    """Answer what the rank asks; send back what it sends, which fits its operations, some of it changed."""
    while not stop.is_set():
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if rank.ends["control"].recv(1 << 16):
                tell(rank.ends["control"], ANSWER)
        for kind in ("data", "messages") if echoes else ():
            with contextlib.suppress(BlockingIOError, ConnectionError, ValueError):
                said = rank.ends[kind].recv(1 << 16)
                tell(rank.ends[kind], said if chance.random() < 0.7 else changed(chance, said))
        time.sleep(0.0005)


def use(group: Group, chance: Chance) -> None:
    x, y = np.ones(10), np.zeros(10)
    todo = [
        lambda: group.recv(x, 1), lambda: group.recv(x, tag=un.ANY_TAG), lambda: group.send(y, 1),
        lambda: group.sendrecv(x, 1, y, 1), lambda: group.all_reduce(x), lambda: group.broadcast(x, 1),
        lambda: group.barrier(), lambda: group.irecv(x, 1, 1).wait(0.02), lambda: group.recv_object(1),
        lambda: group.all_gather_object(None), lambda: group.last_seen(1),
    ]  # fmt: skip
    for call in chance.sample(todo, 3):
        with contextlib.suppress(un.UnisonoError, ValueError):  # ValueError: the bytes are no object's
            call()


def fuzz_rank(seed: int) -> int:
    chance, rank, stop = Chance(seed), Rank(), threading.Event()
    mirror = threading.Thread(target=echo, args=(rank, Chance(seed + 1), chance.random() < 0.5, stop))
    try:
        kinds = KINDS if chance.random() < 0.5 else (chance.choice(KINDS),)
        for _ in range(CASE_FRAMES // 2):
            kind = chance.choice(kinds)
            tell(rank.ends[kind], changed(chance, MAKERS[kind](chance)))
        mirror.start()
        use(rank.group, chance)
        for _ in range(CASE_FRAMES // 2):
            kind = chance.choice(kinds)
            tell(rank.ends[kind], changed(chance, MAKERS[kind](chance)))
        use(rank.group, chance)
    finally:
        stop.set()
        if mirror.ident:
            mirror.join()
        rank.close()
    return CASE_FRAMES


# ---- a window of a rank ----------------------------------------------------------------------------


class Exposed:
    """A window of such a rank: the fuzzer asks it, and answers what it asks. Its memory has more around."""

    def __init__(self, rank: Rank, dynamic: bool) -> None:
        self.memory, cell = np.zeros(3 * 32), _native.shared_bytes(1 << 12)
        inside, engine = self.memory[32:64], rank.group._planner.engine
        self.at, place = (one.__array_interface__["data"][0] for one in (inside, cell))
        _native.make_window_cell(engine, place, 1, self.at, inside.nbytes)
        parts = [ExposedPart(place, at, inside.nbytes, DTYPES.index("float64")) for at in (self.at, 1 << 20)]
        (asking, self.answers), (serving, self.asks) = socket.socketpair(), socket.socketpair()
        for end in (asking, serving, self.answers, self.asks):
            end.setblocking(False)
        links = [-1, asking.detach()], [-1, serving.detach()]
        native = _native.Window(engine, [0, 1], parts, [True, False], *links, dynamic, True)
        self.window = Window(rank.group._planner, native, range(2), parts, inside, cell)

    def request(self, chance: Chance) -> bytes:
        at = self.at + chance.choice([0, 8, 3, 250, -8, 256, 1 << 20])
        usual, nbytes = chance.random() < 0.9, 8 * chance.randrange(6)
        call, dtype, op, detail = chance.randrange(9), 9, chance.randrange(3), chance.randrange(2)
        wait_ns = chance.choice([0, 10**6, 10**6, chance.signed(64)])
        if not usual:
            at, nbytes = chance.choice([(at, chance.number(64)), (chance.number(64), nbytes)])
            call, dtype, op, detail = (chance.small(32) for _ in range(4))
        return REQUEST.pack(call, dtype, op, detail, at, nbytes, wait_ns) + bytes(2 * min(nbytes, 4096))

    def answer(self, chance: Chance, stop: threading.Event) -> None:
        """Take what the rank answers; answer what it asks."""
        while not stop.is_set():
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.asks.recv(1 << 16)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                if self.answers.recv(1 << 16):
                    reply = REPLY.pack(chance.small(32) if chance.random() < 0.2 else 0, chance.signed(2))
                    reply += bytes(8 * chance.randrange(3))
                    tell(self.answers, reply if chance.random() < 0.9 else changed(chance, reply))
            time.sleep(0.0005)

    def use(self, chance: Chance) -> None:
        window, x, limit, rank = self.window, np.ones(3), {"timeout": 0.05}, chance.randrange(2)
        todo = [
            lambda: window.put(x, rank, **limit), lambda: window.get(x, rank, **limit),
            lambda: window.accumulate(x, rank, **limit), lambda: window.fetch_and_op(1.0, rank, **limit),
            lambda: window.compare_and_swap(0.0, 1.0, rank, **limit), lambda: window.flush(**limit),
            lambda: window.fence(**limit), lambda: window.start([1], **limit), lambda: window.test([1]),
            lambda: window.wait([1], **limit), lambda: window.lock(rank, **limit).__enter__(),
        ]  # fmt: skip
        for call in chance.sample(todo, 3):
            with contextlib.suppress(ValueError, IndexError):  # IndexError: outside of the window
                call()


def fuzz_window(seed: int) -> int:
    chance, rank, stop, sent = Chance(seed), Rank(), threading.Event(), 0
    exposed = Exposed(rank, chance.random() < 0.5)
    turns = ((exposed.answer, Chance(seed + 1), stop), (echo, rank, Chance(seed + 2), False, stop))
    threads = [threading.Thread(target=call, args=args) for call, *args in turns]
    for one in threads:
        one.start()
    try:
        with contextlib.suppress(un.UnisonoError):  # the group has failed
            for sent in range(1, CASE_FRAMES + 1):
                frame = exposed.request(chance)
                tell(exposed.asks, frame if chance.random() < 0.9 else changed(chance, frame))
                if sent % 4 == 0:
                    exposed.use(chance)
    finally:
        stop.set()
        for one in threads:
            one.join()
        exposed.answers.close()
        exposed.asks.close()
        rank.close()
    assert not np.delete(exposed.memory, range(32, 64)).any(), "a call has written outside of the window"
    return sent


# ---- stores and hand-shakes ----------------------------------------------------------------------


def hello() -> bytes:
    return b"".join(wire.frame(wire.ClientHello(wire.MAGIC, wire.VERSION, "", "fuzz")))


def request(chance: Chance) -> bytes:
    key = chance.choice(["", "a", "b", "k" * 1000])
    op = chance.choice(
        [Set(key), Get(key), Peek(key), Wait((key, "b")), Check((key,)), Add(key, chance.signed(63)),
         CompareSet(key, b"1"), Count(key), Keys(key)]
    )  # fmt: skip
    seconds = chance.choice([0.0, 0.01, float("nan"), float("inf"), -1.0, 1e300])
    said = b"".join(wire.frame(wire.StoreRequest(op, seconds), chance.randbytes(chance.randrange(50))))
    if chance.random() < 0.2:  # deep nesting, or lengths at the limits
        body = chance.choice([b"\x91" * 5000, b"\xdd" + struct.pack(">I", chance.number(32)), b"\xc9" * 40])
        said = struct.pack(">II", len(body), 0) + body
    return said if chance.random() < 0.9 else struct.pack(">II", chance.number(32), chance.number(32)) + said


def fuzz_store_server(seed: int) -> int:
    chance = Chance(seed)
    with un.StoreServer(max_unauthenticated=8) as server:  # noqa: SIM117
        with un.TCPStore("127.0.0.1", server.port, timeout_s=300.0) as honest:
            for _ in range(CASE_FRAMES // 4):
                with socket.create_connection(("127.0.0.1", server.port), timeout=300) as peer:
                    pieces = [changed(chance, request(chance)) for _ in range(4)]
                    with contextlib.suppress(ConnectionError):
                        peer.sendall((hello() if chance.random() < 0.9 else b"") + b"".join(pieces))
            honest.set("still", b"here")
            assert honest.get("still") == b"here"
    return CASE_FRAMES


def fuzz_store_client(seed: int) -> int:
    chance = Chance(seed)
    welcome = wire.frame(wire.ServerWelcome(wire.MAGIC, wire.VERSION, 1 << 30, "h", 1, "s"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer, contextlib.suppress(OSError):
                        peer.settimeout(1.0)
                        peer.recv(4096)
                        peer.sendall(b"".join(welcome))
                        peer.recv(4096)
                        reply = wire.ReplyHeader(
                            chance.signed(63), ("a",) * chance.randrange(3), chance.choice(["", "e"])
                        )
                        peer.sendall(changed(chance, b"".join(wire.frame(reply, b"1" * chance.randrange(9)))))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            for _ in range(4):
                with (
                    contextlib.suppress(un.UnisonoError),
                    un.TCPStore("127.0.0.1", listener.getsockname()[1], timeout_s=0.5, retry=False) as store,
                ):
                    store.get("a")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
    return 4


def fuzz_handshake(seed: int) -> int:
    chance = Chance(seed)
    for _ in range(CASE_FRAMES):
        near, far = socket.socketpair()
        name = chance.randbytes(chance.randrange(300))
        greeting = struct.pack(">8s32sH", b"UNISONO\1", chance.randbytes(32), len(name)) + name
        with near, far:
            far.sendall(changed(chance, greeting + chance.randbytes(32)))
            far.shutdown(socket.SHUT_WR)
            role = chance.choice(["connect", "accept"])
            with contextlib.suppress(un.AuthenticationError):
                handshake(near, b"t" * 32, role=role, me="me", expect=None, job="data", deadline_s=0.2)
    return CASE_FRAMES


TARGETS: dict[str, tuple[Callable[[int], int], int]] = {  # and how often one comes to its turn
    "rank": (fuzz_rank, 8),
    "window": (fuzz_window, 2),
    "store server": (fuzz_store_server, 1),
    "store client": (fuzz_store_client, 1),
    "handshake": (fuzz_handshake, 1),
}


def cases(seed: int, names: list[str]) -> Iterator[tuple[str, int]]:
    turns = [name for name in names for _ in range(TARGETS[name][1])]
    while True:
        yield turns[seed % len(turns)], seed
        seed += 1


def peak_bytes() -> int:
    """The most memory this program has held. `ru_maxrss` also counts what its parent had before the exec."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--target", choices=TARGETS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    sent, started = 0, time.monotonic()
    for name, seed in cases(options.seed, [options.target] if options.target else list(TARGETS)):
        print(f"{name}, --seed {seed}", file=sys.stderr, flush=True)  # the last line tells what crashed
        sent += TARGETS[name][0](seed)
        most = peak_bytes()
        if most > MOST_BYTES:
            print(f"{name}: {most} bytes of memory, expected at most {MOST_BYTES}")
            return 1
        if sent >= options.frames:
            break
    print(f"{sent} frames in {time.monotonic() - started:.1f} s, {most >> 20} MiB at most", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
