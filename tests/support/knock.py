"""`knock.py ADDRESS ...`: fails unless each address answers. Run by `hosts.Network.wait_until_up`."""

import errno
import socket
import sys


def answers(address: str) -> bool:
    """A closed port that answers (connection refused) shows that packets pass both ways."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.settimeout(0.3)
        return sock.connect_ex((address, 9)) == errno.ECONNREFUSED


if __name__ == "__main__":
    sys.exit(not all(answers(address) for address in sys.argv[1:]))
