"""Tries the operations of each backend on this machine, on two ranks in processes of their own.

`try_backend(name)` starts the ranks with the backend's launcher, `mpiexec` for MPI and `unisono run` for
the others. It returns "yes", or the reason why not, for every operation. As a program this module is one of
the ranks.
"""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.engine.backends.availability import BACKENDS, is_available
from unisono.engine.environment import env
from unisono.engine.operations.functions import op
from unisono.errors import NotSupported, UnisonoError

TRIAL_S = 120.0
"""The time limit for the ranks of one backend, including PyTorch's import."""
RANKS = 2
MARK = "TRIED "
PLACES = (
    "rank", "world_size", "local_rank", "local_world_size", "group_rank", "master_addr", "master_port",
    "status_fd", "report_fd", "store_address", "agent_store",
)  # fmt: skip
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""For Open MPI: root may start ranks, and more than there are cores."""

Try = Callable[[Any, Callable[..., Any]], Any]


def _message(group: Any, make: Callable[..., Any]) -> None:
    peer = 1 - group.rank
    group.sendrecv(make(3), peer, make(3), peer)


def _any_tag(group: Any, make: Callable[..., Any]) -> None:
    from unisono.engine.group import ANY_TAG

    if group.rank == 0:
        group.recv(make(3), 1, ANY_TAG)
    else:
        group.send(make(3), 0)


def _any_source(group: Any, make: Callable[..., Any]) -> None:
    if group.rank == 0:
        group.recv(make(3))
    else:
        group.send(make(3), 0)


def _probe(group: Any, make: Callable[..., Any]) -> None:
    if group.rank == 0:
        group.probe(1)
        group.recv(make(3), 1)
    else:
        group.send(make(3), 0)


def _tagged(group: Any, make: Callable[..., Any]) -> None:
    peer = 1 - group.rank
    group.sendrecv(make(3), peer, make(3), peer, 7)


def _subgroup(group: Any, make: Callable[..., Any]) -> None:
    with group.subgroup([1, 0]) as other:
        other.all_reduce(make(3))


def _codecs(group: Any, make: Callable[..., Any]) -> None:  # noqa: ARG001
    group.error_bound("all_reduce", 1.0, "bf16")
    group.explain("all_reduce", 1 << 20, max_error=0.01)


OPERATIONS: dict[str, Try] = {
    "all_reduce": lambda group, make: group.all_reduce(make(3)),
    "broadcast": lambda group, make: group.broadcast(make(3)),
    "reduce": lambda group, make: group.reduce(make(3)),
    "scan, exclusive_scan": lambda group, make: (group.scan(make(3)), group.exclusive_scan(make(3))),
    "barrier": lambda group, make: group.barrier(),  # noqa: ARG005
    "all_gather": lambda group, make: group.all_gather(make(3)),
    "all_gather_v": lambda group, make: group.all_gather_v([make(1), make(2)], make(group.rank + 1)),
    "gather": lambda group, make: group.gather(make(3)),
    "scatter": lambda group, make: group.scatter(make(3), make(2, 3) if group.rank == 0 else None),
    "reduce_scatter": lambda group, make: group.reduce_scatter(make(2, 3)),
    "all_to_all": lambda group, make: group.all_to_all(make(2, 3)),
    "coalesced": lambda group, make: group.all_reduce_coalesced([make(3), make(5)]),
    "async_op": lambda group, make: group.all_reduce(make(3), async_op=True).wait(),
    "send, recv": _message,
    "tags": _tagged,
    "any source": _any_source,
    "ANY_TAG": _any_tag,
    "probe": _probe,
    "objects": lambda group, make: group.all_gather_object({"rank": group.rank}),  # noqa: ARG005
    "op(f)": lambda group, make: group.all_reduce(make(3), op(operator.add)),
    "out=": lambda group, make: group.all_reduce(make(3), out=make(3)),
    "subgroup, split": _subgroup,
    "timeout=": lambda group, make: group.all_reduce(make(3), timeout=30),
    "algorithm=": lambda group, make: group.all_reduce(make(3), algorithm="ring"),
    "reproducible=": lambda group, make: group.all_reduce(make(3), reproducible=True),
    "codec=": lambda group, make: group.all_reduce(make(3), codec="bf16"),
    "error_bound, explain": _codecs,
    "choice": lambda group, make: group.choice("all_reduce", 1 << 20),  # noqa: ARG005
    "last_seen": lambda group, make: group.last_seen(0),  # noqa: ARG005
}
"""Operations and options of calls, each with a small call."""


def try_backend(
    name: str, launcher: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Try every operation of a backend. Returns for each "yes", or the reason why it fails here.

    Args:
        launcher: the command that starts ranks; None: the one on this machine.
        environ: of the ranks; None: this process's, without the variables of a job.
    Raises:
        UnisonoError: the backend is not installed, its ranks failed, or they took too long.
    """
    return ran([*(launcher or _launcher(name)), "-m", __name__, name], environ)


def ran(command: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Run the ranks of a trial; what rank 0 prints behind MARK. Raises UnisonoError: see `try_backend`."""
    try:
        ended = subprocess.run(
            command, env=environ or _environ(), capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnisonoError(f"the trial did not end within {TRIAL_S:.0f} s") from None
    _, mark, told = ended.stdout.partition(MARK)
    if not mark:
        lines = [line for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
        raise UnisonoError(f"its ranks failed: {lines[-1].strip() if lines else 'without output'}")
    found: dict[str, str] = json.loads(told.partition("\n")[0])
    return found


def _launcher(name: str) -> list[str]:
    """The command before a program that starts its ranks."""
    if name == "mpi":
        if not is_available("mpi"):
            raise UnisonoError("mpi4py is not installed, or finds no library of MPI")
        beside = Path(sys.executable).with_name("mpiexec")  # that of the environment's MPI
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise UnisonoError("no mpiexec is on the PATH")
        return [found, "-n", str(RANKS), sys.executable]
    return run_command(name == "nccl" and not is_available("nccl"))


def run_command(virtual: bool) -> list[str]:
    """The launcher of Unisono. virtual: with a virtual GPU for each rank."""
    run = [sys.executable, "-m", "unisono", "run", "-n", str(RANKS)]
    return [*run, "--virtual-gpus", str(RANKS)] if virtual else run


def _environ() -> dict[str, str]:
    """The environment of a separate job, even if this process is a rank."""
    of_a_job = {variable.name for variable in env.VARIABLES if variable.setting in PLACES}
    kept = {name: value for name, value in env.copy().items() if name not in of_a_job}
    return {**kept, "OMP_NUM_THREADS": "1", **AS_ROOT}


def main(name: str) -> None:
    """One rank: try all operations, and print the results."""
    from unisono.engine.group import init_process_group

    if name == "nccl":
        import torch

        torch.cuda.set_device((env.read().local_rank or 0) % torch.cuda.device_count())
    told = {}
    with init_process_group(name) as group:
        make = _maker(BACKENDS[name])
        for operation, call in OPERATIONS.items():
            try:
                call(group, make)
            except NotSupported as error:
                told[operation] = str(error).partition(": ")[2].partition(". ")[0]
            else:
                told[operation] = "yes"
        results = group.all_gather_object(told)
        if group.rank == 0:  # an operation counts as missing if any rank refuses it
            merged = {key: next((one[key] for one in results if one[key] != "yes"), "yes") for key in told}
            print(MARK + json.dumps(merged), flush=True)


def _maker(device: str) -> Callable[..., Any]:
    if device == "cuda":
        import torch

        return lambda *shape: torch.ones(shape, device="cuda")
    import numpy as np

    return lambda *shape: np.ones(shape, np.float32)


if __name__ == "__main__":
    main(sys.argv[1])
