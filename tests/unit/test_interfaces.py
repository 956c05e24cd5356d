"""Addresses and ports of this host: loopback is on every machine, so that is what is asked for."""

import contextlib
import socket

import pytest

from ports import reserved
from unisono.engine.bootstrap import interfaces as sut
from unisono.engine.bootstrap.peer_sockets import TCP_RTO_MAX_MS, prepare
from unisono.engine.environment import env
from unisono.errors import RendezvousError


def settings(**variables: str) -> env.Settings:
    return env.read(variables)


def test_the_route_to_the_master_chooses():
    assert sut.local_address("127.0.0.1", settings()) == "127.0.0.1"
    assert sut.local_address("::1", settings()) == "::1"
    assert sut.local_address("localhost", settings()) in ("127.0.0.1", "::1")
    sut.local_address(None, settings())


@pytest.mark.parametrize("variable", ["UNISONO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_variable_chooses(variable: str):
    assert sut.local_address(None, settings(**{variable: "lo"})) == "127.0.0.1"
    assert sut.local_address("::1", settings(**{variable: "nosuch,=lo"})) == "::1"
    with pytest.raises(RendezvousError, match=f"{variable}=nosuch matches no interface.*lo \\(127.0.0.1\\)"):
        sut.local_address(None, settings(**{variable: "nosuch"}))
    everything = ",".join(each.name for each in sut.interfaces())
    with pytest.raises(RendezvousError, match="matches no interface"):
        sut.local_address(None, settings(**{variable: f"^{everything}"}))


def test_ours_comes_before_gloo_s_and_they_need_not_agree():
    assert settings(UNISONO_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="eth9").socket_ifname == "lo"


def _all_of(stack: contextlib.ExitStack, ranged: env.Settings) -> list[socket.socket]:
    """Listen on every port of a range that is free."""
    found: list[socket.socket] = []
    with contextlib.suppress(RendezvousError):
        while True:
            found.append(stack.enter_context(sut.listen(ranged, "127.0.0.1")))
    return found


def test_a_range_of_ports_is_kept_to_and_a_full_one_is_said():
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(sut.listen(settings(), "127.0.0.1"))
        port = first.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"every port of UNISONO_PORT_RANGE={port}-{port} is taken"):
            sut.listen(settings(UNISONO_PORT_RANGE=f"{port}-{port}"), "127.0.0.1")
        ranged = settings(UNISONO_PORT_RANGE="21000-21100")
        found = {stack.enter_context(sut.listen(ranged, "127.0.0.1")).getsockname()[1] for _ in range(5)}
        assert len(found) == 5 and all(21000 <= each <= 21100 for each in found)
        low = stack.enter_context(reserved(2))
        pair = settings(UNISONO_PORT_RANGE=f"{low}-{low + 1}")
        taken = {sock.getsockname()[1] for sock in _all_of(stack, pair)}
        assert taken == {low, low + 1}  # every port is tried, wherever the walk begins
    with pytest.raises(ValueError, match="UNISONO_PORT_RANGE is malformed: got '9-1'"):
        settings(UNISONO_PORT_RANGE="9-1")


def test_what_is_advertised():
    with sut.listen(settings(), "127.0.0.1") as sock:
        assert sut.advertised_address(settings(), sock) == sock.getsockname()
        assert sut.advertised_address(settings(UNISONO_ADVERTISE="gate:70"), sock) == ("gate", 70)


def test_the_port_advertised_is_the_one_listened_on():
    with reserved() as port:
        told = settings(UNISONO_ADVERTISE=f"gate:{port - 1}", LOCAL_RANK="1")
        sock = sut.listen(told, "127.0.0.1")
    with sock:
        assert sock.getsockname()[1] == port
        assert sut.advertised_address(told, sock) == ("gate", port)
        with pytest.raises(RendezvousError, match=f"UNISONO_ADVERTISE={port}-{port} is taken"):
            sut.listen(told, "127.0.0.1")


def test_the_way_to_an_address():
    assert sut.via("127.0.0.1") == "lo (127.0.0.1)"
    assert sut.via("no.such.name.invalid") == "no interface: there is no route to it"


def test_a_name_without_an_address():
    with pytest.raises(Exception, match="is not usable") as raised:
        sut.local_address("no.such.name.invalid", settings())
    assert isinstance(raised.value.__cause__, socket.gaierror)


# ---- the options of connections between hosts ----


@pytest.mark.parametrize(("peer_timeout_s", "longest_ms"), [(10.0, 1250), (2.0, 1000), (60.0, 7500)])
def test_what_was_lost_is_sent_again_while_the_peer_is_not_given_up(
    peer_timeout_s: float, longest_ms: int
) -> None:
    with socket.socket() as sock:
        try:
            sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            pytest.skip("a kernel before Linux 6.15 bounds no retransmission")
        prepare(sock, "data", peer_timeout_s=peer_timeout_s, buffer_bytes=0)
        found = sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        assert abs(found - longest_ms) <= 10, "milliseconds, in the kernel's ticks"
