"""The figures of the machine: measured by `unisono calibrate` and kept in a file, or defaults.

A group never measures. Its rank 0 reads the file, and all ranks use the figures of rank 0, because all have
to choose the same algorithm. If the file is missing, damaged or of another machine, the defaults count; it is
never an error. `plan_cost.py` and `tuner.py` use the figures; docs/adr/0006-calibration.md gives the reasons.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from typing import TYPE_CHECKING, TypeVar

import msgspec

from unisono.engine.environment.env import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERSION = 1
"""Of the file's format; another one is measured again."""

NO_FILE = "none"
"""UNISONO_CALIBRATION=none: the defaults, whatever the cache contains."""


class MemoryBandwidth(msgspec.Struct, frozen=True):
    """Bytes per second of one core, by where its buffers lie, alone and when all cores work at once."""

    cache: float
    shared_cache: float
    memory: float
    all_cache: float
    all_shared_cache: float
    all_memory: float

    def at(self, level: str, *, alone: bool = False) -> float:
        """The rate at a level ("cache", "shared_cache", "memory")."""
        rate: float = getattr(self, level if alone else f"all_{level}")
        return rate


LEAST_SEGMENT_BYTES = 64 * 1024
MOST_SEGMENT_BYTES = 1 << 20


class MachineCalibration(msgspec.Struct, frozen=True):
    """The machine in numbers. Seconds, bytes, bytes per second.

    Attributes:
        machine: which one, see `identity`; "" for the defaults.
        cores: that processes may use.  cache_bytes: of a core's own (second-level) cache.
        shared_cache_bytes: of the cache that cores share (the third level).
        flag_s: until a core sees a store of another.
        wake_s: until a sleeper runs that shares the waker's core.
        crowd_s: a barrier of twice as many ranks as cores.
        give, take: copying into memory that another core has read, and out of memory it has just written.
        call_s: a call of a collective from Python, without any other rank.
        tcp_s: a message of one byte over loopback, one way.  tcp: the bandwidth of loopback.
        wire_s, wire: the same between hosts, as `unisono calibrate --hosts` found it; 0: not measured.
    """

    machine: str = ""
    measured: str = ""
    cores: int = 0
    cache_bytes: int = 1 << 20
    shared_cache_bytes: int = 32 << 20
    flag_s: float = 1.5e-7
    wake_s: float = 3e-6
    crowd_s: float = 2e-5
    give: float = 12e9
    take: float = 8e9
    call_s: float = 8e-7
    copy: MemoryBandwidth = MemoryBandwidth(20e9, 12e9, 8e9, 20e9, 12e9, 6e9)
    reduce: MemoryBandwidth = MemoryBandwidth(16e9, 10e9, 6e9, 16e9, 10e9, 5e9)
    tcp_s: float = 15e-6
    tcp: float = 2e9
    wire_s: float = 0.0
    wire: float = 0.0

    @property
    def measured_here(self) -> bool:
        """Whether these are measured numbers, not the defaults."""
        return bool(self.machine)

    @property
    def segment_bytes(self) -> int:
        """What the engine takes through a plan at once on one host, over all chunks.

        Small enough to stay in a core's cache together with the memory it goes through, large enough for the
        steps' cost to vanish: a quarter of the cache, to a power of two. Example: 1.25 MiB -> 256 KiB.
        """
        quarter = max(self.cache_bytes // 4, 1)
        return min(max(1 << (quarter.bit_length() - 1), LEAST_SEGMENT_BYTES), MOST_SEGMENT_BYTES)

    def between_networks(self) -> MachineCalibration:
        """The same with the wire in place of loopback, or the defaults' sockets if it was not measured."""
        if self.wire:
            return msgspec.structs.replace(self, tcp_s=self.wire_s, tcp=self.wire)
        return msgspec.structs.replace(self, tcp_s=DEFAULTS.tcp_s, tcp=DEFAULTS.tcp)

    def level(self, nbytes: float) -> str:
        """Where `nbytes` that a core works on lie, as `MemoryBandwidth.at` calls it."""
        if nbytes <= self.cache_bytes:
            return "cache"
        return "shared_cache" if nbytes <= self.shared_cache_bytes / max(1, self.cores) else "memory"


DEFAULTS = MachineCalibration()
"""Of an ordinary server of two or more cores; used where nothing was measured."""


class _CalibrationFile(msgspec.Struct, frozen=True):
    version: int
    calibration: MachineCalibration


_decode = msgspec.json.Decoder(_CalibrationFile).decode


class LoadedCalibration(msgspec.Struct, frozen=True):
    """A calibration, its origin, and a note for the user."""

    calibration: MachineCalibration
    source: str
    note: str = ""


def identity() -> str:
    """Identifies this machine: its id, its processor, and how many cores this process may use."""
    parts = (_machine_id(), _processor(), str(len(os.sched_getaffinity(0))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def cache_file(settings: Settings) -> Path | None:
    """The file of this machine's calibration; None: the settings demand the defaults."""
    from pathlib import Path  # which takes a while to load, and ranks need no more than its name

    name = _file_name(settings)
    return None if name is None else Path(name)


def _file_name(settings: Settings) -> str | None:
    if settings.calibration:
        return None if settings.calibration == NO_FILE else settings.calibration
    home = settings.cache_home
    if not home:
        home = os.path.expanduser("~/.cache")
        if home.startswith("~"):
            raise OSError("this user has no home directory")
    return os.path.join(home, "unisono", f"calibration-{identity()}.json")


def recall(settings: Settings) -> LoadedCalibration:
    """The figures of this machine: from the file, otherwise the defaults. Never raises."""
    defaults = msgspec.structs.replace(DEFAULTS, cores=len(os.sched_getaffinity(0)))
    try:
        file = _file_name(settings)
    except OSError as error:
        return LoadedCalibration(defaults, "defaults", f"there is no place for a calibration: {error}")
    if file is None:
        return LoadedCalibration(defaults, "defaults")
    calibration, note = load(file)
    if calibration is None:
        return LoadedCalibration(defaults, "defaults", note)
    return LoadedCalibration(calibration, file)


def load(file: str | Path) -> tuple[MachineCalibration | None, str]:
    """The calibration in a file, or None and why it cannot be used; "" when there is no file."""
    found, note = read_figures(file, _decode, 1 << 16)
    if found is None:
        return None, note
    note = complaint(
        file,
        ours=found.version == VERSION and found.calibration.machine == identity(),
        sane=_sane(found.calibration),
    )
    return (None if note else found.calibration), note


Figures = TypeVar("Figures")


def read_figures(
    file: str | Path, decode: Callable[[bytes], Figures], most_bytes: int
) -> tuple[Figures | None, str]:
    """What a file of this user holds, or None and why it cannot be used; "" when there is no file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.getuid(), 0):
                return None, f"{file} is not a file of this user and is ignored"
            return decode(os.read(descriptor, most_bytes)), ""
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{file} cannot be read and is ignored: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{file} is damaged and is ignored: {error}"


def complaint(file: str | Path, *, ours: bool, sane: bool) -> str:
    """Why figures that were read do not count; "" if they do."""
    if not ours:
        return f"{file} is of another machine or version and is ignored"
    return "" if sane else f"{file} holds numbers that no machine has and is ignored"


def save(calibration: MachineCalibration, file: Path) -> None:
    """Write a calibration atomically, readable by this user only.

    Raises:
        OSError: it cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(_CalibrationFile(VERSION, calibration)), indent=1)
    write_figures(text + b"\n", file)


def write_figures(data: bytes, file: Path) -> None:
    """Write a file atomically, readable by this user only."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = file.with_name(f"{file.name}.{os.urandom(4).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(data)
        beside.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _sane(calibration: MachineCalibration) -> bool:
    """Whether all numbers are such that times computed from them are positive and finite."""
    times = tuple(getattr(calibration, name) for name in ("flag_s", "wake_s", "crowd_s", "call_s", "tcp_s"))
    rates = (*msgspec.structs.astuple(calibration.copy), *msgspec.structs.astuple(calibration.reduce))
    if calibration.wire:
        times, rates = (*times, calibration.wire_s), (*rates, calibration.wire)
    counts = (calibration.cores, calibration.cache_bytes, calibration.shared_cache_bytes)
    return (
        all(1e-9 <= each <= 1.0 for each in times)
        and all(1e6 <= each <= 1e14 for each in (*rates, calibration.give, calibration.take, calibration.tcp))
        and all(each >= 1 for each in counts)
    )


def _machine_id() -> str:
    for name in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        with contextlib.suppress(OSError), open(name) as file:
            return file.read().strip()
    return os.uname().nodename


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:  # which the kernel takes long to write for many cores; the first will do
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return os.uname().machine
