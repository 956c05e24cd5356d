"""Ranks as threads in torchrun's environment: the master's port belongs to its agent."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from meeting import closed_together, env_of, meet, together
from unisono.engine.bootstrap.opening import probe_ports
from unisono.engine.environment import env
from unisono.engine.store import StoreServer
from unisono.errors import RendezvousError


@contextlib.contextmanager
def agent() -> Iterator[int]:
    """Something that holds the master's port and speaks another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def torchrun(port: int, rank: int, world_size: int, run_id: str = "none") -> env.Settings:
    return env_of(port, rank, world_size, TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_USE_AGENT_STORE="True")


def test_under_torchrun_the_ranks_find_each_other() -> None:
    with agent() as port:
        worlds = together(*[lambda r=r: meet(settings=torchrun(port, r, 3)) for r in range(3)])
        assert worlds[0].members == worlds[2].members
        closed_together(worlds)


def test_under_torchrun_ports_of_others_are_passed_over() -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(agent())
        ports = list(dict.fromkeys(probe_ports(f"torchrun none 0 127.0.0.1:{port}")))
        stack.enter_context(StoreServer("127.0.0.1", ports[0], job="another"))
        stack.enter_context(StoreServer("127.0.0.1", ports[1]))
        worlds = together(*[lambda r=r: meet(settings=torchrun(port, r, 2)) for r in (1, 0)])
        assert "127.0.0.1:" in repr(worlds[0].store)
        assert f":{ports[0]}" not in repr(worlds[0].store)
        closed_together(worlds)


def test_two_torchrun_jobs_stay_apart() -> None:
    with agent() as port:
        jobs = [torchrun(port, rank, 2, run_id) for run_id in "ab" for rank in (0, 1)]
        worlds = together(*[lambda mine=mine: meet(settings=mine) for mine in jobs])
        assert worlds[0].members == worlds[1].members != worlds[2].members
        closed_together(worlds)


def test_under_torchrun_a_missing_rank_0_is_told() -> None:
    with (
        agent() as port,
        pytest.raises(RendezvousError, match="no store of job 'torchrun none 0.*rank 0 is alive"),
    ):
        meet(settings=torchrun(port, 1, 2), timeout_s=0.3)


def test_probe_ports_are_the_same_everywhere_and_differ_between_jobs() -> None:
    assert probe_ports("a") == probe_ports("a")
    assert probe_ports("a") != probe_ports("b")
    assert all(10_000 <= port < 32_768 for port in probe_ports("a"))
