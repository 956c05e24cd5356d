"""A link with delay and loss: forwards packets between two interfaces with a delay, and drops some of them.

    lossy.py p0 p1 0.05 0.01 1     delay 50 ms each way, drop 1 %, seed 1
    lossy.py --plain eth0          make an interface send complete packets

The kernel's netem is better where it exists. TCP sees real loss here and repairs it, which a relay of byte
streams could not show. With checksum and segmentation offload an interface sends packets that cannot be
forwarded from here, so `--plain` turns both off, once, on each host.
"""

import collections
import errno
import fcntl
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 3
SIOCETHTOOL = 0x8946
OFFLOADS = (0x17, 0x1F, 0x24)  # ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO
PACKET_OUTGOING = 4
GONE = (errno.ENETDOWN, errno.ENODEV, errno.ENXIO)  # the errors after the removal of an interface


def plain(interface: str) -> None:
    """Turn checksum and segmentation offload off."""
    import array

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            address, _ = value.buffer_info()
            fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP", interface.encode(), address) + bytes(16))


def relay(names: list[str], delay_s: float, loss: float, seed: int) -> None:
    """Forward packets until killed, or until an interface is removed."""
    chance = random.Random(seed)
    sockets = []
    for name in names:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        sock.bind((name, ETH_P_ALL))
        sock.setblocking(False)
        sockets.append(sock)
    other = {sockets[0]: sockets[1], sockets[1]: sockets[0]}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for sock in select.select(sockets, [], [], patience)[0]:
            try:
                packet, origin = sock.recvfrom(1 << 17)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                return
            if origin[2] != PACKET_OUTGOING and chance.random() >= loss:
                waiting.append((time.monotonic() + delay_s, other[sock], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, packet = waiting.popleft()
            try:
                to.send(packet)
            except OSError:  # a full queue: lost, as on a wire
                continue


if __name__ == "__main__":
    if sys.argv[1] == "--plain":
        plain(sys.argv[2])
    else:
        relay(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
