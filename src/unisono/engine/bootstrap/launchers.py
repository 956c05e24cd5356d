"""The rendezvous address under another launcher when MASTER_ADDR is not set.

MPI's launchers and Slurm set no address, but they say on how many hosts the ranks are, and name the job:

    launcher     on how many hosts               the job's name
    Open MPI     OMPI_COMM_WORLD_LOCAL_SIZE      PMIX_NAMESPACE
    Intel MPI    MPI_LOCALNRANKS                 I_MPI_HYDRA_UUID
    MPICH        MPI_LOCALNRANKS                 pid and start time of the process that started the ranks
    Slurm        SLURM_STEP_NUM_NODES            SLURM_JOB_ID, SLURM_STEP_ID

Rank 0 serves the store on a port computed from the job's name (`opening.probe_ports`): on one host at
127.0.0.1, of several hosts of a Slurm step on the first, where Slurm puts task 0. For several hosts of MPI
the user names the host of rank 0.
"""

from __future__ import annotations

import re
import socket

from unisono.engine.bootstrap.init_method import InitMethod
from unisono.engine.bootstrap.interfaces import is_loopback, local_address
from unisono.engine.environment.env import Settings

LOOPBACK = "127.0.0.1"
STARTER = "hydra_pmi_proxy"  # the process of MPICH and Intel MPI that starts the ranks of one host


def rendezvous_address(settings: Settings) -> InitMethod | None:
    """The address at which rank 0 serves the store, and the job's name; None where the launcher sets too
    little.

    Raises:
        ValueError: a variable of the launcher is malformed.
    """
    job = _job(settings)
    if not job:
        return None
    if _one_host(settings):
        return InitMethod("job", host=LOOPBACK, job=job)
    if settings.launcher == "Slurm" and settings.node_list:
        return InitMethod("job", host=_reachable(first_host(settings.node_list), settings), job=job)
    return None


def remedy(settings: Settings) -> str:
    """What the user has to set where `rendezvous_address` is None; "" for an unknown launcher."""
    host = "MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port of it"
    several = (
        "The ranks are on several hosts" if _job(settings) and not _one_host(settings) else "Where to meet"
    )
    if settings.launcher == "Open MPI":
        return f"{several}: set {host}: mpiexec -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ..."
    if settings.launcher == "MPICH/PMI":
        return f"{several}: set {host}: mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 ..."
    if settings.launcher == "Slurm":
        return (
            "This process is the batch script, not a task of a step. Start the ranks with srun: "
            "srun python script.py."
        )
    if settings.launcher == "Kubernetes":
        return "Set MASTER_ADDR to the name of pod 0 (train-0.train) and MASTER_PORT to a port, for all pods."
    return ""


def first_host(nodes: str) -> str:
    """The first name of a list in Slurm's notation.

    Examples: "host[0-1]" -> "host0"; "r[1-2]n[07,09],login" -> "r1n07".
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")


def _one_host(settings: Settings) -> bool:
    if settings.launcher == "Slurm":
        return settings.num_nodes == 1 or settings.world_size == 1
    return settings.local_world_size is not None and settings.local_world_size == settings.world_size


def _job(settings: Settings) -> str:
    """The job's name, the same for all its ranks and for no other job; "" where there is none."""
    name = ""
    if settings.launcher == "Slurm":
        task = settings.step_id if settings.world_size != 1 else settings.step_id or "batch"
        name = f"{settings.job_id}.{task}" if settings.job_id and task else ""
    elif settings.launcher in ("Open MPI", "MPICH/PMI"):
        name = settings.job_id or (_starter() if settings.launcher == "MPICH/PMI" else "")
    return f"{settings.launcher} {name}" if name else ""


def _starter() -> str:
    """Pid and start time of the nearest ancestor that is MPICH's starter of ranks; "": none is visible."""
    pid = "self"
    while True:
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                text = file.read()
        except OSError:  # this process may not see it
            return ""
        own, _, rest = text.partition(" (")
        name, _, tail = rest.rpartition(") ")
        fields = tail.split()  # state, parent, ...; the start is field 22 of the line
        if name == STARTER:
            return f"{own} {fields[19]}"
        if fields[1] == "0":
            return ""
        pid = fields[1]


def _reachable(host: str, settings: Settings) -> str:
    """The host's name; on that host itself, where the name may mean loopback, an address for the others."""
    if host not in (settings.node_name, socket.gethostname()):
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # unknown here; the other hosts may know it
        return local_address(None, settings)
    outside = [str(address[0]) for *_, address in found if not is_loopback(str(address[0]))]
    return host if len(outside) == len(found) else (outside or [local_address(None, settings)])[0]
