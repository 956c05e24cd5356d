"""Where the ranks of other launchers meet without MASTER_ADDR."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from loops import each
from meeting import closed_together, env_of, meet, together
from unisono.engine.bootstrap import launchers
from unisono.engine.bootstrap.store_setup import probe_ports
from unisono.engine.environment import env
from unisono.engine.store import StoreServer
from unisono.errors import RendezvousError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{0}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{0}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-17@1",
}  # fmt: skip
INTEL_MPI = {
    "PMI_RANK": "{0}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{0}", "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "e4280000-80e9",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "{0}", "SLURM_NTASKS": "2", "SLURM_LOCALID": "{0}", "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "a7",
}  # fmt: skip
ON_ONE_HOST = {"Open MPI": OPEN_MPI, "Intel MPI": INTEL_MPI, "Slurm": SLURM}


def settings_of(variables: dict[str, str], rank: int = 0, **changes: str) -> env.Settings:
    return env.read(
        {name: text.format(rank) for name, text in {**variables, **changes}.items()}, strict=False
    )


@each("launcher", list(ON_ONE_HOST))
def test_on_one_host_ranks_meet_without_an_address(launcher: str) -> None:
    of_rank = [settings_of(ON_ONE_HOST[launcher], rank) for rank in range(2)]
    worlds = together(*[lambda mine=mine: meet(settings=mine) for mine in of_rank])
    assert [world.rank for world in worlds] == [0, 1]
    assert worlds[0].master == "127.0.0.1"
    closed_together(worlds)


def test_jobs_of_one_host_stay_apart() -> None:
    jobs = [settings_of(SLURM, rank, SLURM_STEP_ID=step) for step in "12" for rank in (0, 1)]
    worlds = together(*[lambda mine=mine: meet(settings=mine) for mine in jobs])
    assert worlds[0].members == worlds[1].members != worlds[2].members
    closed_together(worlds)


@each(
    ("nodes", "first"),
    [
        ("a7", "a7"), ("a7,b9", "a7"), ("host[0-1]", "host0"), ("n[03,07-09],login", "n03"),
        ("r[1-2]n[07,09]-ib", "r1n07-ib"), ("", ""),
    ],
)  # fmt: skip
def test_the_first_of_a_list_of_hosts(nodes: str, first: str) -> None:
    assert launchers.first_host(nodes) == first


def test_several_hosts_of_slurm_meet_on_the_first() -> None:
    several = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[03-04]"}
    target = launchers.rendezvous_address(settings_of(SLURM, **several))
    assert target is not None
    assert (target.host, target.job) == ("n03", "Slurm 17.0")


def test_on_the_first_host_itself_its_name_may_mean_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[03-04]", "SLURMD_NODENAME": "n03"}
    loopback = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    outside = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.3", 0))
    for found, host in [([loopback, outside], "10.0.0.3"), ([outside], "n03")]:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        target = launchers.rendezvous_address(settings_of(SLURM, **own))
        assert target is not None
        assert target.host == host


@each(
    ("variables", "changes", "text"),
    [
        (OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "several hosts.*mpiexec -x MASTER_ADDR=HOST"),
        (INTEL_MPI, {"MPI_LOCALNRANKS": "1"}, "several hosts.*mpiexec -genv MASTER_ADDR HOST"),
        (SLURM, {"SLURM_STEP_ID": ""}, "batch script.*srun python script.py"),
        ({"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "2"}, {}, "name of pod 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "unisono run -n 2"),
    ],
)
def test_missing_address_error_names_the_variable(
    variables: dict[str, str], changes: dict[str, str], text: str
) -> None:
    with pytest.raises(RendezvousError, match=f"MASTER_ADDR, MASTER_PORT, not set here.*{text}"):
        meet(settings=settings_of(variables, **changes))


def test_an_address_that_is_set_is_used() -> None:
    with pytest.raises(RendezvousError, match="environment variable MASTER_ADDR, not set"):
        meet(settings=settings_of(OPEN_MPI, MASTER_PORT="29500"))
    with pytest.raises(RendezvousError, match="environment variable MASTER_PORT, not set"):
        meet(settings=settings_of(OPEN_MPI, MASTER_ADDR="127.0.0.1"))


def test_a_batch_script_of_one_task_is_a_world() -> None:
    alone = meet(settings=settings_of({**SLURM, "SLURM_NTASKS": "1"}, SLURM_STEP_ID=""))
    assert (alone.rank, alone.world_size) == (0, 1)
    alone.close()


def test_tasks_of_srun_with_pmi2_are_slurms() -> None:
    pmi = {"PMI_RANK": "{0}", "PMI_SIZE": "2", "PMI_JOBID": "17.0"}
    assert settings_of({**SLURM, **pmi}).launcher == "Slurm"
    assert settings_of({**SLURM, **pmi}, PMI_JOBID="kvs_9").launcher == "MPICH/PMI"


def test_mpich_jobs_are_known_by_the_process_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mpich = {name: text for name, text in INTEL_MPI.items() if name != "I_MPI_HYDRA_UUID"}
    assert launchers.rendezvous_address(settings_of(mpich)) is None  # no ancestor of this test has its name
    with open("/proc/self/stat") as stat:
        name = stat.read().partition(" (")[2].rpartition(") ")[0]
    monkeypatch.setattr(launchers, "STARTER", name)
    target = launchers.rendezvous_address(settings_of(mpich))
    assert target is not None
    assert target.job.startswith("MPICH/PMI ")


# ---- ranks as threads in torchrun's environment: the master's port belongs to its agent ----


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
