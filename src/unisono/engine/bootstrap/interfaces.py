"""The addresses of this host that other hosts use, and listening on them.

The interface is that of the route to the master, unless UNISONO_SOCKET_IFNAME (or Gloo's or NCCL's variable)
names others. Nothing here sends a packet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from typing import NamedTuple

from unisono.engine.environment.env import Settings
from unisono.engine.store.address import listen as listen_at
from unisono.errors import RendezvousError, StoreError, message

SIOCGIFFLAGS, SIOCGIFADDR = 0x8913, 0x8915
IFF_UP = 1
LINK_LOCAL_SCOPE, HOST_SCOPE = 0x20, 0x10
NO_PARENT = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # take the default route


class NetworkInterface(NamedTuple):
    """A network interface that is up, and one of its addresses."""

    name: str
    address: str

    @property
    def family(self) -> int:
        """AF_INET or AF_INET6."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def interfaces() -> list[NetworkInterface]:
    """Every address of every interface that is up, IPv4 before IPv6; no link-local ones."""
    found = []
    up = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it was removed meanwhile, or has no address
                if _request(sock, SIOCGIFFLAGS, name)[16] & IFF_UP:
                    up.add(name)
                packed = _request(sock, SIOCGIFADDR, name)[20:24]
                found.append(NetworkInterface(name, socket.inet_ntoa(packed)))
    with contextlib.suppress(FileNotFoundError), open("/proc/net/if_inet6") as table:
        for line in table:
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != LINK_LOCAL_SCOPE:
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                found.append(NetworkInterface(name, address))
    return [each for each in found if each.name in up]


def _request(sock: socket.socket, request: int, name: str) -> bytes:
    return fcntl.ioctl(sock, request, struct.pack("256s", name.encode()[:15]))


def chosen(settings: Settings) -> list[NetworkInterface]:
    """The interfaces in the settings, in their order.

    Raises:
        RendezvousError: none of them exists; the text lists the existing ones.
    """
    everything = interfaces()
    pattern = settings.socket_ifname.strip()
    wanted = [word.strip() for word in pattern.lstrip("^").split(",") if word.strip()]
    if pattern.startswith("^"):
        found = [each for each in everything if not any(_matches(word, each.name) for word in wanted)]
    else:
        found = [each for word in wanted for each in everything if _matches(word, each.name)]
    if not found:
        variable = f"{settings.origin('socket_ifname')}={settings.socket_ifname}"
        there = ", ".join(f"{each.name} ({each.address})" for each in everything)
        raise RendezvousError(
            message(
                f"{variable} matches no interface that is up",
                observed=f"this host, {socket.gethostname()}, has {there}",
                remedy="Name one of these.",
            )
        )
    return list(dict.fromkeys(found))


def _matches(word: str, name: str) -> bool:
    """As in NCCL: "eth" matches every name with this prefix, "=eth0" exactly that name."""
    return name == word[1:] if word.startswith("=") else name.startswith(word)


def local_addresses(master: str | None, settings: Settings) -> list[str]:
    """Addresses of this host to listen on and connect from: one for each interface in use.

    Args:
        master: name or address of the master's host; None: the default route decides.
    Raises:
        RendezvousError: the interfaces in the settings do not exist, or have no address of the master's
        family.
        StoreError: the master's name does not resolve.
    """
    family, target = _resolved(master)
    if not settings.socket_ifname:
        return [_towards(family, target)]
    found = chosen(settings)
    fitting = {each.name: each.address for each in reversed(found) if each.family == family}
    names = [name for name in dict.fromkeys(each.name for each in found) if name in fitting]
    if not names:
        kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
        raise RendezvousError(
            message(
                f"the interfaces of {settings.origin('socket_ifname')}={settings.socket_ifname} have no "
                f"{kind} address, and the master, {master}, has",
                observed=", ".join(f"{each.name} ({each.address})" for each in found),
                remedy="Name another interface, or give the master's address of the other kind.",
            )
        )
    return [fitting[name] for name in names]


def local_address(master: str | None, settings: Settings) -> str:
    """The first of `local_addresses`, to listen on only one."""
    return local_addresses(master, settings)[0]


def _resolved(master: str | None) -> tuple[int, str]:
    if master is None:
        return socket.AF_INET, NO_PARENT[socket.AF_INET]
    try:
        found = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        what = f"the master's address {master!r} is not usable: {error}"
        raise StoreError(message(what, remedy="Check MASTER_ADDR (--master-addr).")) from error
    return int(found[0][0]), str(found[0][4][0])


def _towards(family: int, target: str) -> str:
    """The source address of packets to `target`. Connecting a datagram socket only looks up the route."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))
        except OSError as error:
            if target == NO_PARENT[socket.AF_INET]:  # no default route
                return _first_of_ours()
            raise RendezvousError(
                message(
                    f"host {socket.gethostname()} has no route to {target}",
                    observed=error.strerror or str(error),
                    remedy="Check the master's address, and the network of this host.",
                )
            ) from None
        return str(sock.getsockname()[0])


def _first_of_ours() -> str:
    """The first address that is not loopback; loopback on a host without a network."""
    return next((each.address for each in interfaces() if not is_loopback(each.address)), "127.0.0.1")


def via(target: str) -> str:
    """The interface and address from which this host sends to `target`, for errors: "eth0 (10.0.0.1)"."""
    try:
        address = _towards(*_resolved(target))
    except (OSError, RendezvousError, StoreError):
        return "no interface: there is no route to it"
    name = next((each.name for each in interfaces() if each.address == address), "an interface")
    return f"{name} ({address})"


def is_loopback(address: str) -> bool:
    """Whether only this host can reach that numeric address."""
    return address.startswith("127.") or address == "::1"


def listen(settings: Settings, address: str) -> socket.socket:
    """A listening, non-blocking socket on that address.

    Its port is from UNISONO_PORT_RANGE; otherwise that of UNISONO_ADVERTISE for this rank; otherwise any.

    Raises:
        RendezvousError: every port of the range is taken, or this host does not have the address.
    """
    first, last = settings.port_range or (0, 0)
    if settings.port_range is None and settings.advertise is not None:
        first = last = advertised_port(settings)
    count = last - first + 1
    start = int.from_bytes(os.urandom(4), "big")  # random: ranks that start together try different ports
    for step in range(count):
        try:
            return listen_at(address, first + (start + step) % count)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise RendezvousError(str(error)) from None
    setting = "port_range" if settings.port_range is not None else "advertise"
    what = f"every port of {settings.origin(setting)}={first}-{last} is taken on {address}"
    raise RendezvousError(message(what, remedy="Widen the range: a rank needs one, the launcher two."))


def advertised_address(settings: Settings, listener: socket.socket) -> tuple[str, int]:
    """Host and port to publish: those of `listener`, or of UNISONO_ADVERTISE."""
    if settings.advertise is not None:
        return settings.advertise[0], advertised_port(settings)
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def advertised_port(settings: Settings) -> int:
    """The port of UNISONO_ADVERTISE plus the local rank: the ranks of a host share one such variable."""
    return settings.advertise[1] + (settings.local_rank or 0) if settings.advertise is not None else 0
