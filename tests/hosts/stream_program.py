"""One end of a stream of bytes. Prints, where it sends, the seconds until the other had all of it.

stream_program.py listen ADDRESS BYTES | send ADDRESS BYTES
"""

import socket
import sys
import time

PORT = 4000


def listen(family: int, address: str, left: int) -> None:
    total = 0
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier stream had the port
        listener.bind((address, PORT))
        listener.listen()
        print("ready", flush=True)
        sock, _ = listener.accept()
        with sock:
            while left:
                got = sock.recv(min(left, 1 << 20))
                left -= len(got)
                total += sum(got[:64])
            sock.sendall(b"k")
    print(total, flush=True)


def send(family: int, address: str, nbytes: int) -> None:
    with socket.socket(family) as sock:
        sock.connect((address, PORT))
        start = time.monotonic()
        sock.sendall(b"\1" * nbytes)
        assert sock.recv(1) == b"k"
        print(time.monotonic() - start)


if __name__ == "__main__":
    _, doing, at, count = sys.argv
    {"listen": listen, "send": send}[doing](socket.AF_INET6 if ":" in at else socket.AF_INET, at, int(count))
