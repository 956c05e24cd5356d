"""A job: the command line of `unisono run`, and the environment of each rank.

The flags also accept torchrun's spellings. Every error of a command line is reported here, in one line,
before anything starts. Nothing here starts a process.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import unisono
from unisono.engine.base.authentication import (
    JobToken,
    await_token_file,
    check_for_tls,
    make_token,
    read_token_file,
    token_file,
)
from unisono.engine.base.limits import usable_cores
from unisono.engine.environment import env
from unisono.errors import LaunchError, message

MPI4PY = os.path.join(os.path.dirname(unisono.__file__), "mpi4py", "site")
"""The folder in which the ranks of `--replace mpi4py` find that package: unisono.mpi4py.package.SITE."""

STDOUT = 1
STDERR = 2
MEET_S = 300.0


class VirtualGpus(NamedTuple):
    """The settings of `unisono.virtual` in every rank. `memory`: bytes of each GPU, 0: no limit."""

    gpus: int
    memory: int
    poison: bool
    check_streams: bool


@dataclass(frozen=True)
class Job:
    """One run of `world_size` processes of one command on this machine, alone or as one node of several.

    Attributes:
        command: argv of every rank.
        shown: per rank the streams that reach the console, STDOUT | STDERR.
        logged: per rank the streams that are written to files in `log_dir`.
        master_port: 0: the launcher chooses a free one; with several nodes, the port of their rendezvous.
        nnodes, node_rank: how many machines, and which one this is.
        token: the job's token; every connection of its processes proves it.
        advertise, tls: UNISONO_ADVERTISE and UNISONO_TLS of the ranks.
        elastic: (MIN, MAX) ranks of a job that goes on without lost ranks; None: the first failure ends it.
        respawn: how often a lost rank is replaced in succession.
        join: addresses of a running group, which the ranks join; "": they form one.
        listen: where newcomers may come, HOST:PORT; "": at any port.
        grace_s: seconds for the other ranks to end by themselves after the first failure.
        replace: what Unisono replaces in the ranks, "gloo" or "mpi4py"; "": the environment decides.
        json_errors: the file for the record of how the job ended; "": none.
        record: the file for the program of what the ranks have called; "": none.
        full_tracebacks: Unisono's own frames are shown, too.
        gpus: the virtual GPUs of this machine.
        stdin: rank 0 inherits the launcher's standard input (the other ranks read nothing).
    """

    command: tuple[str, ...]
    world_size: int
    shown: tuple[int, ...]
    logged: tuple[int, ...]
    log_dir: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    grace_s: float = 1.0
    stdin: bool = False
    json_errors: str = ""
    record: str = ""
    full_tracebacks: bool = False
    replace: str = ""
    nnodes: int = 1
    node_rank: int = 0
    token: JobToken = field(default_factory=JobToken, repr=False)
    advertise: str = ""
    tls: bool = False
    gpus: VirtualGpus | None = None
    elastic: tuple[int, int] | None = None
    respawn: int = 0
    join: str = ""
    listen: str = ""

    @property
    def starts_its_ranks(self) -> bool:
        """Whether it is one process with several GPUs, which may start its other ranks itself.

        A launcher's LOCAL_RANK would say to it that they run.
        """
        alone = self.world_size == self.nnodes == 1 and not self.elastic and not self.join
        return alone and self.gpus is not None and self.gpus.gpus > 1


@dataclass(frozen=True)
class Assignment:
    """What is known after the rendezvous of the nodes.

    Attributes:
        store: host:port of the store, as this node reaches it.
        master_port: MASTER_PORT of the ranks.
        first_rank: rank of this node's local rank 0.
        world_size: ranks of all nodes.
    """

    store: str
    master_port: int
    first_rank: int
    world_size: int


def _foreign_placement() -> frozenset[str]:
    """Names of the variables in which other launchers give a process its rank."""
    places = ("rank", "world_size", "local_rank", "local_world_size")
    return frozenset(
        variable.name
        for variable in env.VARIABLES
        if variable.source == "torchrun"
        or (variable.source in ("Open MPI", "MPICH/PMI", "Slurm") and variable.setting in places)
    )


def rank_environment(
    job: Job,
    local_rank: int,
    base: Mapping[str, str],
    *,
    assignment: Assignment,
    status_fd: str,
    report_fd: str = "",
    shared: str = "",
    join: str = "",
) -> dict[str, str]:
    """Build the environment of one rank. join: addresses of the group that it joins, other than the job's.

    Variables of another launcher in `base` (SLURM_PROCID, ...) describe this launcher, not the rank. They are
    dropped: a library that reads them would see n equal ranks.
    """
    token = ("UNISONO_TOKEN", "UNISONO_TOKEN_FILE") if job.token else ()
    dropped = _foreign_placement().union(("UNISONO_JOIN", "UNISONO_PARENTS"), token)
    environ = {name: value for name, value in base.items() if name not in dropped}
    _share_cores(environ, job.world_size)
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if not job.starts_its_ranks:
        environ.update(
            RANK=str(assignment.first_rank + local_rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(assignment.world_size),
            LOCAL_WORLD_SIZE=str(job.world_size),
            GROUP_RANK=str(job.node_rank),
            GROUP_WORLD_SIZE=str(job.nnodes),
            MASTER_ADDR=job.master_addr,
            MASTER_PORT=str(assignment.master_port),
            UNISONO_STORE=assignment.store,
        )
    environ.update(
        UNISONO_STATUS_FD=status_fd,
        UNISONO_REPORT_FD=report_fd,
        PYTHONUNBUFFERED="1",
    )
    given = {
        "UNISONO_TOKEN": job.token.hex() if job.token else "",
        "UNISONO_TLS": "1" if job.tls else "",
        "UNISONO_ADVERTISE": job.advertise,
        "UNISONO_RECORD": job.record,
        "UNISONO_ELASTIC": "{}:{}".format(*job.elastic) if job.elastic else "",
        "UNISONO_LISTEN": job.listen,
        "UNISONO_JOIN": join or job.join,
        "UNISONO_REPLACE": job.replace,
    }
    environ.update({name: value for name, value in given.items() if value})
    if env.replaced_backend(environ) == "mpi4py":
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (MPI4PY, environ.get("PYTHONPATH", ""))))
    if job.gpus:
        from unisono.virtual.environment import set_for_children  # a third of what a launcher imports

        gpus, memory, poison, check_streams = job.gpus
        set_for_children(environ, gpus, str(memory), poison=poison, check_streams=check_streams)
        environ["UNISONO_VIRTUAL_SHARED"] = shared
    return environ


def _share_cores(environ: dict[str, str], ranks: int) -> None:
    """Give every rank its share of the cores. If the user sets more threads, make idle ones sleep.

    OpenMP's threads poll for their next work. With more threads than cores, they take time from ranks that
    have work.
    """
    cores = usable_cores()
    threads = environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks))).partition(",")[0].strip()
    many = threads.isdecimal() and int(threads) > 1 and int(threads) * ranks > cores
    if many and not environ.keys() & env.WAIT_POLICIES:
        environ["OMP_WAIT_POLICY"] = "PASSIVE"


# ---- the command line ----------------------------------------------------------------------------------

BOTH = STDOUT | STDERR
NODES_PORT = 29500  # torchrun's
MOST_RANKS = 1600  # of a group that changes, see docs/elastic.md

# torchrun's flags without a counterpart. (flag, takes a value, values that change nothing, verdict):
# None: print a remark and run the job; a text: reject the job, which would differ from the request.
_ELSEWHERE: tuple[tuple[str, bool, tuple[str, ...], str | None], ...] = (
    ("--standalone", False, ("True",), None),
    ("--rdzv-backend", True, ("c10d", "static"), None),
    ("--rdzv-endpoint", True, (), None),
    ("--rdzv-id", True, (), None),
    ("--rdzv-conf", True, (), None),
    ("--local-addr", True, (), None),
    ("--role", True, ("default",), None),
    ("--monitor-interval", True, (), None),
    ("--start-method", True, ("spawn",), None),
    ("--signals-to-handle", True, (), None),
    ("--run-path", False, (), None),
    ("--max-restarts", True, ("0",), "use --elastic MIN:MAX and --respawn N, or run again from a checkpoint"),
    ("--event-log-handler", True, ("null",), "there are no torchelastic events"),
    ("--logs-specs", True, ("default",), "use --log-dir"),
    ("--duplicate-stdout-filters", True, (), "use --log-dir and grep"),
    ("--duplicate-stderr-filters", True, (), "use --log-dir and grep"),
    ("--numa-binding", True, (), "binding is not done yet; start the ranks through numactl with --no-python"),
    ("--virtual-local-rank", False, (), "LOCAL_RANK is always the rank on this machine"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `unisono run` to `parser`."""
    parser.usage = (
        "%(prog)s [-n N] [flags] script.py [args ...]\n"
        "       %(prog)s [-n N] [flags] -m module [args ...]\n"
        "       %(prog)s [-n N] [flags] --no-python program [args ...]"
    )
    parser.allow_abbrev = False
    add = parser.add_argument
    add(
        "-n", *_both("--nproc-per-node"), dest="nproc", metavar="N",
        help="processes to start here: a number (1), 'cpu': one per core, 'gpu', 'auto': gpu, or else cpu",
    )  # fmt: skip
    add("-m", "--module", action="store_true", help="the script is a module, as in python -m")
    add(*_both("--no-python"), action="store_true", help="the script is any program")
    add(*_both("--log-dir"), metavar="DIR", help="write DIR/rank<r>.stdout.log and rank<r>.stderr.log")
    add(
        "-t", "--tee", metavar="S", default="0",
        help="what goes to files and console: 1 stdout, 2 stderr, 3 both (the default); per rank 0:3,1:2",
    )  # fmt: skip
    add("-r", "--redirects", metavar="S", default="0", help="what goes to files only, written as for --tee")
    add(*_both("--local-ranks-filter"), metavar="R,R", default="", help="show only these ranks")
    add(*_both("--json-errors"), metavar="FILE", help="write how every rank ended, and of what, to FILE")
    add("--record", metavar="FILE", help="write what all ranks call, as a program for `unisono simulate`")
    add(*_both("--full-tracebacks"), action="store_true", help="show Unisono's own frames, too")
    add("--grace", type=float, default=1.0, metavar="S", help="seconds others get after a failure (1.0)")
    add("--stdin", action="store_true", help="rank 0 reads this terminal or pipe; without it no rank does")
    add(
        "--replace", choices=env.REPLACEABLE,
        help="scripts that ask for this backend of PyTorch, or this package, get Unisono (UNISONO_REPLACE)",
    )  # fmt: skip
    add(
        *_both("--virtual-gpus"), metavar="N",
        help="GPUs of this machine that every rank sees, in host memory; without -n as many ranks",
    )  # fmt: skip
    add(*_both("--gpu-memory"), metavar="M", help="memory of each virtual GPU, as in 16G (counted, no limit)")
    add(*_both("--no-poison"), action="store_true", help="virtual GPUs: torch.empty leaves memory as it is")
    add(*_both("--check-streams"), action="store_true", help="virtual GPUs: report missing waits of streams")
    add("--nnodes", default="1", metavar="N", help="machines; start this command on each (1)")
    add(*_both("--node-rank"), default="0", metavar="R", help="which machine this is, 0 to N-1")
    add(*_both("--master-addr"), metavar="A", help="node 0, as all reach it; one machine: 127.0.0.1")
    add(
        *_both("--master-port"), metavar="P",
        help=f"port on node 0 where the nodes meet ({NODES_PORT}); one machine: MASTER_PORT (a free one)",
    )  # fmt: skip
    add(
        *_both("--token-file"), metavar="F",
        help="the job's token, mode 0600; node 0 makes it when absent, copy it to the other nodes",
    )  # fmt: skip
    add("--tls", action="store_true", help="encrypt the connections of the store and between hosts")
    add("--advertise", metavar="HOST:PORT", help="where others reach this node's ranks, behind a router")
    _add_elastic_arguments(parser)
    for flag, takes_value, _, _ in _ELSEWHERE:
        names, dest = _both(flag), _dest(flag)
        if takes_value:
            add(*names, dest=dest, help=argparse.SUPPRESS)
        else:
            add(*names, dest=dest, action="store_const", const="True", help=argparse.SUPPRESS)
    add("script", help="what every rank runs")
    add("args", nargs=argparse.REMAINDER, help="its arguments")


def _add_elastic_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--elastic", metavar="MIN:MAX",
        help="lost ranks do not end the job while MIN are left; up to MAX; without -n it starts MAX",
    )  # fmt: skip
    add(
        "--respawn",
        metavar="N",
        help="replace a lost rank, at most N times in succession (0); with --elastic",
    )
    add("--join", metavar="HOST:PORT", help="the ranks join a running elastic job; several with commas")
    add(*_both("--join-port"), metavar="P", help="port of this host where newcomers may come (a free one)")


def _both(flag: str) -> list[str]:
    """Return both spellings. _both("--log-dir") -> ["--log-dir", "--log_dir"]."""
    return list(dict.fromkeys((flag, "--" + flag[2:].replace("-", "_"))))


def _dest(flag: str) -> str:
    return flag[2:].replace("-", "_")


def job_from(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Job, list[str]]:
    """Check the parsed flags; return the job and the remarks to print.

    Raises:
        LaunchError: with one line, about the first thing that is wrong.
    """
    remarks = _torchrun_remarks(args)
    nnodes = _nnodes(args.nnodes)
    node_rank = _number("--node-rank", args.node_rank, 0, nnodes - 1)
    gpus = _virtual_gpus(args)
    elastic, join = _elastic(args), _join(args, nnodes)
    default = gpus.gpus if gpus else elastic[1] if elastic and nnodes == 1 and not args.join else 1
    asked = args.nproc if args.nproc is not None else str(default)
    size = gpus.gpus if gpus and asked in ("gpu", "auto") else _world_size(asked, environ)
    if args.nproc is None and not gpus and default == 1:
        remarks.append(f"without -n it starts one process; -n 4 starts four, -n cpu {usable_cores()} here")
    if elastic:
        _check_span(elastic, size, alone=nnodes == 1 and not args.join)
    shown, logged = _streams(args, size)
    job = Job(
        command=_command(args, environ),
        world_size=size,
        shown=shown,
        logged=logged,
        log_dir=_log_dir(args.log_dir),
        **_master(args, nnodes),
        grace_s=_grace(args.grace),
        stdin=args.stdin,
        json_errors=_writable("--json-errors", args.json_errors),
        record=_writable("--record", args.record),
        full_tracebacks=args.full_tracebacks,
        nnodes=nnodes,
        node_rank=node_rank,
        advertise=args.advertise or "",
        tls=args.tls or _tls(environ),
        replace=_check_replacement(args.replace, environ),
        gpus=gpus,
        elastic=elastic,
        respawn=0 if args.respawn is None else _number("--respawn", args.respawn, 0, 10_000),
        join=join,
        listen=_listen(args, nnodes),
        token=_token(args, environ, nnodes, node_rank),  # last: it may wait
    )
    remarks += env.unknown(environ)
    _check_environment(job, environ)
    return job, remarks


def _elastic(args: argparse.Namespace) -> tuple[int, int] | None:
    """The numbers of ranks of an elastic job. A node that joins one takes those of that job."""
    if args.elastic is None:
        for flag in ("respawn", "join_port"):
            if getattr(args, flag) is not None and args.join is None:
                raise LaunchError(f"{_flag(flag)} needs --elastic MIN:MAX.")
        return (1, MOST_RANKS) if args.join else None
    least, _, most = args.elastic.partition(":")
    if not most:
        expected = "MIN:MAX, as in 2:8"
        raise LaunchError(message("--elastic does not fit", observed=repr(args.elastic), expected=expected))
    low = _number("--elastic", least, 1, MOST_RANKS)
    return low, _number("--elastic", most, low, MOST_RANKS)


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _check_span(elastic: tuple[int, int], size: int, *, alone: bool) -> None:
    """Whether the ranks of this node fit; only a job of one node knows all of them."""
    if size > elastic[1] or (alone and size < elastic[0]):
        expected = f"{elastic[0]}..{elastic[1]}, as --elastic says"
        raise LaunchError(message("-n does not fit", observed=str(size), expected=expected))


def _join(args: argparse.Namespace, nnodes: int) -> str:
    if args.join is None:
        return ""
    if nnodes > 1:
        raise LaunchError("--join and --nnodes exclude each other: each host joins by itself.")
    for address in args.join.split(","):
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise LaunchError(
                message("--join does not fit", observed=repr(args.join), expected="HOST:PORT, or several")
            )
    return str(args.join)


def _listen(args: argparse.Namespace, nnodes: int) -> str:
    """Where newcomers come to this node: a node alone listens at --master-addr, so that others reach it."""
    own = args.master_addr if nnodes == 1 and args.master_addr and not args.join else ""
    port = 0 if args.join_port is None else _number("--join-port", args.join_port, 1, 65535)
    if not own and not port:
        return ""
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _virtual_gpus(args: argparse.Namespace) -> VirtualGpus | None:
    if args.virtual_gpus is None:
        if args.gpu_memory or args.no_poison or args.check_streams:
            raise LaunchError("--gpu-memory, --no-poison and --check-streams need --virtual-gpus N.")
        return None
    count = _number("--virtual-gpus", args.virtual_gpus, 1, 64)
    try:
        memory = env.parse_size(args.gpu_memory) if args.gpu_memory else 0
    except ValueError as error:
        raise LaunchError(
            message("--gpu-memory does not fit", observed=repr(args.gpu_memory), expected=str(error))
        ) from None
    return VirtualGpus(count, memory, not args.no_poison, args.check_streams)


def _tls(environ: Mapping[str, str]) -> bool:
    """Whether UNISONO_TLS, which the ranks inherit, asks for it."""
    try:
        return env.read({name: text for name, text in environ.items() if name == "UNISONO_TLS"}).tls
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _check_environment(job: Job, environ: Mapping[str, str]) -> None:
    """Read what the ranks will read: what does not fit is reported here, once, and not by every rank."""
    nowhere = Assignment("127.0.0.1:1", 1, 0, job.world_size)
    try:
        env.read(rank_environment(job, 0, environ, assignment=nowhere, status_fd=""))
        if job.tls:
            check_for_tls(job.token)
    except (ValueError, ModuleNotFoundError) as error:
        raise LaunchError(str(error)) from None


def _torchrun_remarks(args: argparse.Namespace) -> list[str]:
    remarks = []
    for flag, _, harmless, refusal in _ELSEWHERE:
        value = getattr(args, _dest(flag))
        if value is None or value in harmless:
            continue
        if refusal:
            raise LaunchError(f"{flag}{'' if value == 'True' else ' ' + value} is not supported: {refusal}.")
        remarks.append(f"{flag} has no meaning here and changes nothing")
    return remarks


def _nnodes(text: str) -> int:
    first, _, last = text.partition(":")
    if last and first != last:
        remedy = "Give one number; for ranks that come and go: --elastic MIN:MAX."
        raise LaunchError(
            message("--nnodes does not fit", observed=repr(text), expected="1..1024", remedy=remedy)
        )
    return _number("--nnodes", first, 1, 1024)


def _master(args: argparse.Namespace, nnodes: int) -> dict[str, Any]:
    """The address of the nodes' rendezvous, or that of the ranks of one machine."""
    port = args.master_port
    if nnodes == 1:
        number = 0 if port is None else _number("--master-port", port, 0, 65535)
        return {"master_addr": args.master_addr or "127.0.0.1", "master_port": number}
    if args.master_addr is None:
        remedy = "Give the name or address of node 0, the same on every node."
        raise LaunchError(message("--nnodes above 1 needs --master-addr", remedy=remedy))
    number = NODES_PORT if port is None else _number("--master-port", port, 1, 65535)
    return {"master_addr": args.master_addr, "master_port": number}


def _token(args: argparse.Namespace, environ: Mapping[str, str], nnodes: int, node_rank: int) -> JobToken:
    """The job's token: given, made for a job of one machine, or made by node 0 and written to the file."""
    path = args.token_file
    try:
        if path is not None and node_rank:
            return await_token_file(path, MEET_S, _say_remark)
        if path is not None:
            return read_token_file(path) if args.join else token_file(path)
        given = {k: v for k, v in environ.items() if k in ("UNISONO_TOKEN", "UNISONO_TOKEN_FILE")}
        token = env.read(given).token
    except (ValueError, OSError) as error:
        where = f"--token-file {path} does not fit: expected " if path is not None else ""
        raise LaunchError(f"{where}{error}") from None
    if token or (nnodes == 1 and not args.join):
        return token or make_token()
    if args.join:
        remedy = "Give --token-file F of the job, or set UNISONO_TOKEN."
        raise LaunchError(message("--join needs the token of the job that it joins", remedy=remedy))
    raise LaunchError(
        message(
            "several nodes need one token, by which they know each other",
            remedy="Give --token-file F (node 0 makes it, copy it to the others), or set UNISONO_TOKEN.",
        )
    )


def _say_remark(text: str) -> None:
    sys.stderr.write(f"unisono run: {text}\n")


def _number(flag: str, text: str, low: int, high: int, note: str = "") -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        expected = (f"{low}..{high}" if high > low else str(low)) + note
        raise LaunchError(message(f"{flag} does not fit", observed=repr(text), expected=expected))
    return value


def _grace(seconds: float) -> float:
    if not 0 <= seconds <= 86400:
        raise LaunchError(message("--grace does not fit", observed=str(seconds), expected="0..86400 seconds"))
    return seconds


def _check_replacement(backend: str | None, environ: Mapping[str, str]) -> str:
    """Refuse settings with which the ranks would silently use the backend that should be replaced."""
    if backend == "gloo" and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        raise LaunchError(
            f"--replace {backend} needs PyTorch's autoloading: unset TORCH_DEVICE_BACKEND_AUTOLOAD."
        )
    return backend or ""


def _world_size(text: str, environ: Mapping[str, str]) -> int:
    cores = usable_cores()
    if text in ("auto", "gpu"):
        gpus = _gpus(environ)
        if text == "gpu" and gpus == 0:
            raise LaunchError("-n gpu: this machine shows no NVIDIA GPU. Use -n cpu or a number.")
        return gpus or cores
    return (
        cores
        if text == "cpu"
        else _number(
            "-n", text, 1, max(256, 16 * cores), ", or 'cpu', 'gpu', 'auto': how many processes to start"
        )
    )


def _gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])


def _streams(args: argparse.Namespace, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return per rank which streams are shown and which are logged."""
    tee = _per_rank("--tee", args.tee, size)
    redirects = _per_rank("--redirects", args.redirects, size)
    if args.log_dir is None and any(tee + redirects):
        raise LaunchError("--tee and --redirects need --log-dir, where the files go.")
    if args.log_dir is not None and not any(tee + redirects):
        tee = (BOTH,) * size
    visible = set(range(size))
    if args.local_ranks_filter:
        numbers = args.local_ranks_filter.split(",")
        visible = {_number("--local-ranks-filter", number, 0, size - 1) for number in numbers}
    shown = tuple((BOTH & ~redirects[r]) | tee[r] if r in visible else 0 for r in range(size))
    return shown, tuple(tee[r] | redirects[r] for r in range(size))


def _per_rank(flag: str, text: str, size: int) -> tuple[int, ...]:
    """Read torchrun's stream sets. ("3", size 2) -> (3, 3); ("1:2", size 2) -> (0, 2)."""
    if ":" not in text:
        return (_number(flag, text, 0, BOTH),) * size
    streams = [0] * size
    for part in text.split(","):
        rank, _, bits = part.partition(":")
        streams[_number(flag, rank, 0, size - 1)] = _number(flag, bits, 0, BOTH)
    return tuple(streams)


def _log_dir(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {path} cannot be made: {error.strerror}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise LaunchError(f"--log-dir {path} cannot be written to.")
    return path


def _writable(flag: str, path: str | None) -> str:
    """Make the file now, so that an unwritable one is an error before a long job and not after it."""
    if path is None:
        return ""
    try:
        with open(path, "w"):
            return os.path.abspath(path)
    except OSError as error:
        raise LaunchError(f"{flag} {path} cannot be written: {error.strerror}.") from None


def _command(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    if args.module and args.no_python:
        raise LaunchError("-m and --no-python exclude each other.")
    if args.no_python:
        if shutil.which(args.script, path=environ.get("PATH")) is None:
            raise LaunchError(f"program {args.script!r} was not found or cannot be executed.")
        return (args.script, *args.args)
    if args.module:
        replaced = args.replace or env.replaced_backend(environ)
        _check_module(args.script, MPI4PY if replaced == "mpi4py" else "")
        return (sys.executable, "-m", args.script, *args.args)
    _check_script(args.script, environ)
    return (sys.executable, args.script, *args.args)


def _check_script(script: str, environ: Mapping[str, str]) -> None:
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise LaunchError(f"script {script!r} is a directory without __main__.py.")
    elif not os.path.exists(script):
        hint = ""
        if os.sep not in script and shutil.which(script, path=environ.get("PATH")):
            hint = f" {script!r} is a program: leave it out before a Python script, or use --no-python."
        raise LaunchError(f"script {script!r} does not exist in {os.getcwd()}.{hint}")
    elif not os.access(script, os.R_OK):
        raise LaunchError(f"script {script!r} cannot be read.")


def _check_module(name: str, first: str = "") -> None:
    """Find the module as python -m would, without running a line of it or of its packages.

    first: a folder that is in the ranks' PYTHONPATH before all others.
    """
    parts = name.split(".")
    path: list[str] | None = None
    for depth in range(len(parts)):
        found = _find(".".join(parts[: depth + 1]), path, first)
        if found is None:
            raise LaunchError(f"module {name!r} was not found from {os.getcwd()}.")
        path = list(found.submodule_search_locations or []) or None
        if path is None and depth + 1 < len(parts):
            raise LaunchError(f"module {name!r} was not found: {parts[depth]!r} is not a package.")
    if path is not None and _find(f"{name}.__main__", path, first) is None:
        raise LaunchError(f"package {name!r} has no __main__ and cannot be run.")


def _find(name: str, path: list[str] | None, first: str) -> ModuleSpec | None:
    before = sys.path[:]
    sys.path[:0] = [os.getcwd(), first] if first else [os.getcwd()]
    try:
        for finder in sys.meta_path:
            found = finder.find_spec(name, path)
            if found is not None:
                return found
    except (ImportError, AttributeError, ValueError):
        return None
    finally:
        sys.path[:] = before
    return None
