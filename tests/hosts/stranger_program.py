"""A stranger on the network, for test_strangers.py.

    stranger_program.py record p0 21000 21003             print handshakes seen on the wire, as hexadecimal
    stranger_program.py knock SECONDS PLACES FILE         knock at PLACES ("host:port,...") for so long

What `record` has printed is in FILE, and is said again. Connections are left half open, 500 at most.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import struct
import sys
import time

from unisono.engine.store import wire

MAGIC = b"UNISONO\x01"
ETH_P_ALL, ETH_HEADER = 3, 14


def payload_of(packet: bytes) -> tuple[tuple[bytes, int, bytes, int], bytes]:
    """(from, its port, to, its port) and the payload of an IPv4 packet of TCP; empty for others."""
    ip = packet[ETH_HEADER:]
    if packet[12:14] != b"\x08\x00" or ip[9] != socket.IPPROTO_TCP:
        return (b"", 0, b"", 0), b""
    tcp = ip[4 * (ip[0] & 15) : struct.unpack(">H", ip[2:4])[0]]
    ports = struct.unpack(">HH", tcp[:4])
    return (ip[12:16], ports[0], ip[16:20], ports[1]), tcp[4 * (tcp[12] >> 4) :]


def record(interface: str, first: int, last: int) -> None:
    """Print what three sides that connect have said until they were let in."""
    said: dict[tuple[bytes, int, bytes, int], bytes] = {}
    printed = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as sock:
        sock.bind((interface, 0))
        print("ready", flush=True)
        while printed < 3:
            flow, payload = payload_of(sock.recv(1 << 17))
            if not first <= flow[3] <= last or not payload:
                continue
            if payload.startswith(MAGIC):
                said[flow] = payload
            elif flow in said:
                print((said.pop(flow) + payload[:32]).hex(), flush=True)
                printed += 1


def sayings(recorded: list[bytes], chance: random.Random) -> list[bytes]:
    """What a stranger may say first."""
    hello = b"".join(wire.frame(wire.ClientHello(wire.MAGIC, wire.VERSION, "", "x", nonce=bytes(32))))
    proof = b"".join(wire.frame(wire.TokenProof(bytes(32))))
    greeting = MAGIC + bytes(32)
    return [
        b"",
        chance.randbytes(chance.randrange(1, 9000)),
        greeting + b"\xff\xff",  # a name of 65535 bytes
        greeting + b"\x02\x00" + bytes(512) + bytes(32),  # the longest name, and a wrong proof
        greeting[: chance.randrange(1, 40)],
        b"\xff" * 64,
        wire.PREFIX.pack(2**31 - 1, 2**32 - 1),
        hello + proof,
        *recorded,
        *(each[:-32] for each in recorded),
    ]


def knock(seconds: float, places: list[tuple[str, int]], recorded: list[bytes]) -> None:
    """Connect, say something, and stay."""
    chance = random.Random(1)
    open_ones: collections.deque[socket.socket] = collections.deque()
    entered: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        place = chance.choice(places)
        sock = socket.socket()
        sock.settimeout(1.0)
        try:
            sock.connect(place)
            sock.sendall(chance.choice(sayings(recorded, chance)))
            entered[f"{place[0]}:{place[1]}"] += 1
        except OSError:
            sock.close()
            time.sleep(0.0005)
            continue
        open_ones.append(sock)
        if len(open_ones) > 500:
            open_ones.popleft().close()
    with contextlib.ExitStack() as stack:
        for sock in open_ones:
            stack.enter_context(sock)
    print(json.dumps(entered), flush=True)


def main() -> None:
    if sys.argv[1] == "record":
        record(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    _, _, seconds, spots, path = sys.argv
    with open(path) as file:
        recorded = [bytes.fromhex(line) for line in file]
    pairs = [spot.rsplit(":", 1) for spot in spots.split(",")]
    knock(float(seconds), [(host, int(port)) for host, port in pairs], recorded)


if __name__ == "__main__":
    main()
