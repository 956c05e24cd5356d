"""The only reader of the environment: `read()` makes a frozen `Settings`, each value with its origin.

One table, `VARIABLES`, makes the reader, docs/reference/environment.md (`markdown`) and the listing of
`unisono doctor` (`listing`).

Several variables may set the same setting, because each launcher sets its own. The innermost launcher counts:
a launcher inside another one (torchrun inside srun) gives each process a rank that the outer one does not
know. So of `unisono run`, torchrun, MPI, Slurm and Kubernetes only the first one present counts. RANK,
WORLD_SIZE and so on, when set, have to agree with it; otherwise an error names both.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from unisono.engine.base import timeouts
from unisono.engine.base.authentication import parse_token, read_token_file
from unisono.engine.environment.settings import LOG_SUBSYSTEMS, InvalidSetting, Settings
from unisono.errors import message

__all__ = [
    "LOG_LEVELS",
    "LOG_SUBSYSTEMS",
    "REPLACEABLE",
    "VARIABLES",
    "WAIT_POLICIES",
    "EnvironmentVariable",
    "Settings",
    "copy",
    "flight_recorder",
    "listing",
    "markdown",
    "parse_size",
    "read",
    "replaced_backend",
    "unknown",
]

Parser = Callable[[str], Any]
INT32_MAX = 2**31 - 1
# Set for the tests, by tools/sanitize.sh, the Makefile and tests/torch/pytorch_suite/all.py.
ELSEWHERE = {
    *("UNISONO_SANITIZED", "UNISONO_TEST_LONG", "UNISONO_TEST_SLOW", "UNISONO_TEST_SWEEP"),
    *("UNISONO_TEST_TEXTS", "UNISONO_TESTS_RECORD"),
}
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
WAIT_POLICIES = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
"""Each of these sets how idle OpenMP threads wait."""
LOG_LEVELS = ("off", "info", "debug")
OTHER_LEVELS = {"trace": "debug", "detail": "debug", "version": "off", "warn": "off", "abort": "off"}
"""Words of NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG, and what they mean here."""
LOG_SIGNALS = ("HUP", "USR1", "USR2", "WINCH")
REPLACEABLE = ("gloo", "mpi", "mpi4py")
"""What Unisono can replace: a backend of PyTorch, and a package."""


def _whole_number(least: int, most: int) -> Parser:
    def parse(text: str) -> int:
        value = int(text) if text.strip().lstrip("+-").isdecimal() else None
        if value is None or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        return timeouts.seconds(float(text))
    except ValueError:
        raise ValueError("a number of seconds above 0") from None


def parse_size(text: str) -> int:
    """Bytes from "4194304", "4M" or "4MiB" (K, M, G are powers of 1024)."""
    number = text.strip().upper().removesuffix("IB")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    digits = number.removesuffix(unit).strip()
    if not digits.isdecimal() or (unit == "" and text.strip().upper().endswith("IB")):
        raise ValueError("a number of bytes such as 4194304, 4M or 4MiB")
    return int(digits) * SIZE_UNITS[unit]


def _flag(text: str) -> bool:
    given = text.strip().lower()
    if given not in TRUE + FALSE:
        raise ValueError("1 or 0")
    return given in TRUE


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("host:port, as in 127.0.0.1:29500")
    return host.strip("[]"), int(port)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError("host:port or :port, as in 10.0.0.5:29600")
    return host.strip("[]"), int(port)


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})", text.strip())
    least, most = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < least <= most:
        raise ValueError("two numbers of ranks, MIN:MAX, as in 2:8")
    return least, most


def _descriptor(text: str) -> tuple[int, int]:
    fd, _, inode = text.partition(":")
    if not fd.isdecimal() or not inode.isdecimal():
        raise ValueError("a descriptor and its inode, as in 7:40312")
    return int(fd), int(inode)


def _port_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", text)
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last < 65536:
        raise ValueError("two ports, first-last, as in 20000-20100")
    return first, last


def _text(text: str) -> str:
    return text.strip()


def _present(text: str) -> bool:
    return bool(text)


def _backend(text: str) -> str:
    name = text.strip().lower()
    if name not in ("", *REPLACEABLE):
        raise ValueError(" or ".join(REPLACEABLE))
    return name


def _log_level(text: str) -> str:
    word = text.strip().lower()
    level = OTHER_LEVELS.get(word, word)
    if level not in LOG_LEVELS:
        raise ValueError(", ".join(LOG_LEVELS))
    return level


def _level_of_others(text: str) -> str:
    """As `_log_level`; words that it does not know are another library's matter."""
    try:
        return _log_level(text)
    except ValueError:
        return "off"


def _log_subsystems(text: str) -> tuple[str, ...]:
    """Those of "init,coll" or, without some, of "^coll"; words that only NCCL knows count as none."""
    words = {word.strip().lower() for word in text.strip().removeprefix("^").split(",")}
    if text.strip().startswith("^"):
        return tuple(name for name in LOG_SUBSYSTEMS if name not in words)
    return LOG_SUBSYSTEMS if "all" in words else tuple(name for name in LOG_SUBSYSTEMS if name in words)


def _log_signal(text: str) -> str:
    name = text.strip().upper().removeprefix("SIG")
    if name not in LOG_SIGNALS:
        raise ValueError(" or ".join(LOG_SIGNALS))
    return name


_rank = _whole_number(0, INT32_MAX)
_count = _whole_number(1, INT32_MAX)
_port = _whole_number(1, 65535)


class EnvironmentVariable(NamedTuple):
    """One environment variable: its setting, its parser, and its description.

    `source` is the launcher that sets it; "": any launcher or the user.
    `yields`: an earlier variable of the same setting overrides it, instead of having to agree.
    `secret`: its value is not repeated in errors.
    """

    name: str
    setting: str
    parse: Parser
    doc: str
    source: str = ""
    yields: bool = False
    secret: bool = False


def _placement(
    source: str, rank: str, world: str, local_rank: str, local_world: str
) -> list[EnvironmentVariable]:
    """The four variables in which a launcher gives a process its rank."""
    return [
        EnvironmentVariable(rank, "rank", _rank, "rank of this process", source),
        EnvironmentVariable(world, "world_size", _count, "number of ranks", source),
        EnvironmentVariable(local_rank, "local_rank", _rank, "rank among those on this host", source),
        EnvironmentVariable(local_world, "local_world_size", _count, "number of ranks on this host", source),
    ]


def _table(*variables: EnvironmentVariable) -> tuple[EnvironmentVariable, ...]:
    """The table. Raises ValueError when a variable is declared twice."""
    counted = Counter(variable.name for variable in variables)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise ValueError(message("variables are declared twice", observed=", ".join(twice)))
    return variables


VARIABLES = _table(
    EnvironmentVariable(
        "UNISONO_TIMEOUT_S", "timeout_s", _seconds, "longest time of an operation, in seconds"
    ),
    EnvironmentVariable(
        "UNISONO_STAGING_BYTES", "staging_bytes", parse_size, "staging memory per rank (8M, 4MiB)"
    ),
    EnvironmentVariable("UNISONO_ZERO_COPY", "zero_copy", _flag, "0: ranks never read each other's memory"),
    EnvironmentVariable(
        "UNISONO_PLACEMENT", "placement", _flag, "0: waiting threads do not move to other cores"
    ),
    EnvironmentVariable(
        "UNISONO_SPIN_US", "spin_us", _whole_number(-1, INT32_MAX), "microseconds to spin; -1: chosen"
    ),
    EnvironmentVariable(
        "UNISONO_PEER_TIMEOUT_S", "peer_timeout_s", _seconds, "seconds until a silent host is lost"
    ),
    EnvironmentVariable(
        "UNISONO_JOIN", "join", _text, "HOST:PORT of a running group that `unisono.elastic` joins"
    ),
    EnvironmentVariable(
        "UNISONO_LISTEN",
        "listen",
        _place,
        "HOST:PORT where `unisono.elastic` lets newcomers come; port 0: any",
    ),
    EnvironmentVariable(
        "UNISONO_ELASTIC",
        "elastic",
        _span,
        "MIN:MAX ranks of `unisono.elastic`; the launcher learns of each change",
        "unisono run",
    ),
    EnvironmentVariable(
        "UNISONO_RANKS_PER_HOST",
        "ranks_per_host",
        _rank,
        "how many successive ranks share memory; others count as on other hosts; 0: no limit",
    ),
    EnvironmentVariable(
        "UNISONO_CALIBRATION", "calibration", _text, "file that `unisono calibrate` wrote; none: the defaults"
    ),
    EnvironmentVariable(
        "UNISONO_COMPARE", "compare", _text, "STEPS:FOLDER: each rank writes what its steps were made of"
    ),
    EnvironmentVariable(
        "UNISONO_RECORD", "record", _text, "FILE: each rank writes its calls to FILE.rank<r> (`run --record`)"
    ),
    EnvironmentVariable("UNISONO_LOG", "log", _log_level, "what is logged: off, info or debug"),
    EnvironmentVariable("NCCL_DEBUG", "log", _level_of_others, "the same, by NCCL's words", yields=True),
    EnvironmentVariable(
        "TORCH_DISTRIBUTED_DEBUG", "log", _level_of_others, "the same, by PyTorch's words", yields=True
    ),
    EnvironmentVariable(
        "UNISONO_LOG_FILE",
        "log_file",
        _text,
        "where the log goes, with %r for the rank, %h for the host, %p for the process; if not set: "
        "standard error",
    ),
    EnvironmentVariable(
        "NCCL_DEBUG_FILE", "log_file", _text, "the same, by NCCL's name (%h, %p)", yields=True
    ),
    EnvironmentVariable(
        "UNISONO_LOG_SUBSYSTEMS",
        "log_subsystems",
        _log_subsystems,
        f"of {', '.join(LOG_SUBSYSTEMS)}: init,coll (these), ^coll (all others)",
    ),
    EnvironmentVariable(
        "NCCL_DEBUG_SUBSYS", "log_subsystems", _log_subsystems, "the same, by NCCL's name", yields=True
    ),
    EnvironmentVariable(
        "UNISONO_LOG_SIGNAL",
        "log_signal",
        _log_signal,
        f"signal that raises the level in a running job, after debug to off: {', '.join(LOG_SIGNALS)}",
    ),
    EnvironmentVariable("XDG_CACHE_HOME", "cache_home", _text, "folder of caches; ~/.cache if it is not set"),
    EnvironmentVariable(
        "UNISONO_REPLACE", "replace", _backend, "what Unisono replaces: gloo or mpi (of PyTorch), or mpi4py"
    ),
    EnvironmentVariable(
        "UNISONO_VIRTUAL_GPUS", "virtual_gpus", _whole_number(0, 64), "number of virtual GPUs"
    ),
    EnvironmentVariable(
        "UNISONO_VIRTUAL_MEMORY",
        "virtual_memory",
        parse_size,
        "memory of each virtual GPU (16G); 0: no limit",
    ),
    EnvironmentVariable(
        "UNISONO_VIRTUAL_POISON", "virtual_poison", _flag, "0: torch.empty leaves memory unchanged"
    ),
    EnvironmentVariable(
        "UNISONO_VIRTUAL_CHECK_STREAMS", "virtual_check_streams", _flag, "1: report missing stream waits"
    ),
    EnvironmentVariable(
        "UNISONO_VIRTUAL_SHARED",
        "virtual_shared",
        _text,
        "file that counts the memory of all processes",
    ),
    EnvironmentVariable(
        "UNISONO_SOCKET_IFNAME",
        "socket_ifname",
        _text,
        "network interfaces to use: eth0,eth1 (prefixes), =eth0 (exact name), ^docker,lo (all except these)",
    ),
    EnvironmentVariable(
        "GLOO_SOCKET_IFNAME", "socket_ifname", _text, "the same, by Gloo's name", yields=True
    ),
    EnvironmentVariable(
        "NCCL_SOCKET_IFNAME", "socket_ifname", _text, "the same, by NCCL's name", yields=True
    ),
    EnvironmentVariable(
        "UNISONO_PORT_RANGE", "port_range", _port_range, "ports to listen on, first-last; if not set: any"
    ),
    EnvironmentVariable(
        "UNISONO_ADVERTISE",
        "advertise",
        _endpoint,
        "host:port at which other hosts reach local rank 0 through a router; local rank 1 has the next port",
    ),
    EnvironmentVariable(
        "UNISONO_TOKEN_FILE", "token", read_token_file, "file (mode 0600) with the token, 64 hex digits"
    ),
    EnvironmentVariable("UNISONO_TOKEN", "token", parse_token, "the token itself", secret=True),
    EnvironmentVariable(
        "UNISONO_TLS",
        "tls",
        _flag,
        "1: TLS 1.3 for the store and between hosts (needs a token and unisono[tls])",
    ),
    EnvironmentVariable(
        "UNISONO_STATUS_FD",
        "status_fd",
        _descriptor,
        "descriptor and inode of the launcher's status board",
        "unisono run",
    ),
    EnvironmentVariable(
        "UNISONO_REPORT_FD",
        "report_fd",
        _descriptor,
        "descriptor and inode of the socket on which a rank sends its error to the launcher",
        "unisono run",
    ),
    EnvironmentVariable(
        "UNISONO_STORE",
        "store_address",
        _endpoint,
        "host:port of the launcher's store",
        "unisono run",
    ),
    EnvironmentVariable(
        "UNISONO_PARENTS",
        "parents",
        _count,
        "how many ranks of the group are those that have started this process (`MPI.Comm.Spawn`)",
    ),
    *_placement("", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    EnvironmentVariable("GROUP_RANK", "group_rank", _rank, "rank of this host"),
    EnvironmentVariable("MASTER_ADDR", "master_addr", _text, "name or address of the host of rank 0"),
    EnvironmentVariable("MASTER_PORT", "master_port", _port, "port of the store on the host of rank 0"),
    EnvironmentVariable("TORCHELASTIC_RUN_ID", "job_id", _text, "name of the job", "torchrun"),
    EnvironmentVariable(
        "TORCHELASTIC_RESTART_COUNT", "restart_count", _rank, "how often the job was restarted", "torchrun"
    ),
    EnvironmentVariable(
        "TORCHELASTIC_USE_AGENT_STORE",
        "agent_store",
        _flag,
        "1: torchrun's agent listens on MASTER_PORT",
        "torchrun",
    ),
    *_placement(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    EnvironmentVariable("PMIX_NAMESPACE", "job_id", _text, "name of the job", "Open MPI"),
    *_placement("MPICH/PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    EnvironmentVariable("I_MPI_HYDRA_UUID", "job_id", _text, "name of the job (Intel MPI)", "MPICH/PMI"),
    *_placement("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    EnvironmentVariable("SLURM_NODEID", "group_rank", _rank, "rank of this host", "Slurm"),
    EnvironmentVariable("SLURM_JOB_ID", "job_id", _text, "name of the job", "Slurm"),
    EnvironmentVariable("SLURM_STEP_ID", "step_id", _text, "name of the step within the job", "Slurm"),
    EnvironmentVariable("SLURM_STEP_NUM_NODES", "num_nodes", _count, "number of hosts of the step", "Slurm"),
    EnvironmentVariable(
        "SLURM_STEP_NODELIST", "node_list", _text, "hosts of the step; the first has rank 0", "Slurm"
    ),
    EnvironmentVariable("SLURMD_NODENAME", "node_name", _text, "name of this host", "Slurm"),
    EnvironmentVariable("JOB_COMPLETION_INDEX", "rank", _rank, "rank of this pod", "Kubernetes"),
    EnvironmentVariable(
        "KUBERNETES_SERVICE_HOST", "kubernetes", _present, "set inside every pod", "Kubernetes"
    ),
)

MARKERS: tuple[tuple[str, str], ...] = (
    ("unisono run", "UNISONO_STORE"),
    ("torchrun", "TORCHELASTIC_RUN_ID"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK"),
    ("MPICH/PMI", "PMI_RANK"),
    ("Slurm", "SLURM_PROCID"),
    ("Kubernetes", "JOB_COMPLETION_INDEX"),
)
"""Launchers, the innermost first, each with the variable that shows that it is present."""


def read(environ: Mapping[str, str] | None = None, *, strict: bool = True) -> Settings:
    """The settings in `environ` (default: this process's environment). An empty variable counts as not set.

    Args:
        strict: False: variables that are not Unisono's own (LOCAL_RANK, MASTER_PORT) are checked only if
            their setting is used. Other programs may use them with another meaning.
    Raises:
        ValueError: a variable is malformed, or two disagree; the text names them and shows their values.
    """
    environ = os.environ if environ is None else environ
    launcher = _launcher(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "")
        if not text or not _counts(variable, launcher):
            continue
        try:
            _take(variable, text, environ, values, origins)
        except ValueError as error:
            if strict or variable.name.startswith("UNISONO_"):
                raise
            values[variable.setting] = InvalidSetting(error)
    return Settings(**values, launcher=launcher, origins=MappingProxyType(origins))


def _launcher(environ: Mapping[str, str]) -> str:
    """The launcher that counts; "" for none."""
    present = [name for name, marker in MARKERS if environ.get(marker)]
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    if present[:1] == ["MPICH/PMI"] and "Slurm" in present and environ.get("PMI_JOBID") == step:
        return "Slurm"  # srun --mpi=pmi2 sets PMI's variables itself
    return present[0] if present else ""


def _take(
    variable: EnvironmentVariable,
    text: str,
    environ: Mapping[str, str],
    values: dict[str, Any],
    origins: dict[str, str],
) -> None:
    """Put a variable's value into `values`, and its name into `origins`."""
    held = values.get(variable.setting)
    if type(held) is InvalidSetting:
        return
    value = _parsed(variable, text)
    if variable.setting not in values:
        values[variable.setting] = value
        origins[variable.setting] = variable.name
    elif held != value and not variable.yields:
        raise ValueError(_disagreement(origins[variable.setting], variable, environ))


def replaced_backend(environ: Mapping[str, str] | None = None) -> str:
    """Read UNISONO_REPLACE only, for `import torch`, which does not use the other variables.

    Raises:
        ValueError: it is malformed.
    """
    environ = os.environ if environ is None else environ
    variable = next(variable for variable in VARIABLES if variable.setting == "replace")
    name: str = _parsed(variable, environ.get(variable.name, ""))
    return name


def compared(environ: Mapping[str, str] | None = None) -> tuple[int, str, int] | None:
    """Read what `unisono compare` has set: (steps, a folder, this rank); None: this process is not of it."""
    given = os.environ if environ is None else environ
    steps, _, folder = given.get("UNISONO_COMPARE", "").partition(":")
    return (int(steps), folder, int(given.get("RANK", "0"))) if steps.isdecimal() and folder else None


def flight_recorder(environ: Mapping[str, str] | None = None) -> bool:
    """Whether PyTorch's flight recorder was asked for: its buffer has a size, and not by default."""
    given = os.environ if environ is None else environ
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    sizes = [given[name] for name in names if given.get(name)]
    return bool(sizes) and sizes[0].isdecimal() and int(sizes[0]) > 0


def copy() -> dict[str, str]:
    """A copy of this process's environment, from which a launcher builds that of its children."""
    return dict(os.environ)


def dumb_terminal(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the terminal, if any, shows escape codes as text."""
    return (os.environ if environ is None else environ).get("TERM", "dumb") == "dumb"


def _counts(variable: EnvironmentVariable, launcher: str) -> bool:
    """Whether `variable` belongs to the launcher that counts, or to none; see the module's docstring."""
    ours = variable.name.startswith("UNISONO_")
    return ours or variable.source in ("", launcher) or variable.setting == "kubernetes"


def _parsed(variable: EnvironmentVariable, text: str) -> Any:
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(
            message(
                f"{variable.name} is malformed",
                observed="something else" if variable.secret else repr(text),
                expected=str(error),
                remedy=f"Set {variable.name} ({variable.doc}) to that, or unset it.",
            )
        ) from None


def _disagreement(name: str, other: EnvironmentVariable, environ: Mapping[str, str]) -> str:
    shown = "(secret)" if other.secret else environ[other.name]
    by = f" ({other.name} was set by {other.source})" if other.source else ""
    return message(
        f"{name}={environ[name]} and {other.name}={shown} disagree on the {other.doc}",
        remedy=f"Unset the one that is wrong{by}.",
    )


def unknown(environ: Mapping[str, str] | None = None) -> list[str]:
    """One line for every unknown variable with our prefix, with the most similar known one."""
    environ = os.environ if environ is None else environ
    names = {variable.name for variable in VARIABLES} | ELSEWHERE
    lines = []
    for name in sorted(environ):
        if name.startswith("UNISONO_") and name not in names:
            import difflib

            near = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean {near[0]}?" if near else "`unisono doctor` lists those there are."
            lines.append(
                message(f"the environment variable {name} is none of Unisono's and is ignored", remedy=hint)
            )
    return lines


def listing(settings: Settings) -> list[tuple[str, str, str]]:
    """(setting, value, origin) of every setting, as text."""
    names = [name for name in Settings._fields if name not in ("origins", "launcher")]
    return [(name, _shown(getattr(settings, name)), settings.origin(name)) for name in names]


def markdown() -> str:
    """The text of docs/reference/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Generated from `engine/environment/env.py`; do not edit. An empty variable counts as not set.",
        "",
        "| variable | meaning | default | set by |",
        "|---|---|---|---|",
    ]
    defaults = Settings()
    for variable in VARIABLES:
        value = getattr(defaults, variable.setting)
        default = _shown(int(value) if variable.parse is _flag else value)
        source = variable.source or "you, or any launcher"
        lines.append(f"| `{variable.name}` | {variable.doc} | {default} | {source} |")
    order = ", ".join(name for name, _ in MARKERS)
    lines += [
        "",
        f"If several launchers are present, only the first one counts, in this order: {order}.",
        "Variables of the others are ignored. If two variables that count disagree, the error names both.",
        "",
    ]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "" if value is None or value in ("", b"") else str(value)
