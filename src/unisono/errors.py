"""All errors of Unisono, and the one builder of their messages.

    UnisonoError(RuntimeError)
    ├── AuthenticationError  the other end of a connection does not have the job's token
    ├── RendezvousError      the rendezvous of the ranks failed
    ├── StoreError           the key-value store failed or sent an invalid answer
    │   └── StoreTimeout     (also TimeoutError) a key did not appear in time
    ├── GroupError           an operation failed; the group is aborted and stays so
    │   ├── Timeout          (also TimeoutError) a rank did not arrive in time
    │   ├── PeerLost         (also ConnectionError) a rank died or left
    │   ├── Evicted          the other ranks went on without this one
    │   ├── Mismatch         ranks made different calls, or sizes do not fit
    │   └── Aborted          this group was aborted by this process (interrupt, abort())
    ├── GroupClosed          the group was used after close()
    ├── NotSupported         (also NotImplementedError) the group's backend cannot do this
    ├── PlanError            (also ValueError) a plan is wrong; says at which step
    ├── SimulationError      a simulated run does not end; says at which rank, step and link
    └── LaunchError          the launcher could not start the ranks
    UnfitError(ValueError)   a training plan does not go with a model, or by itself

A caller's mistake (wrong dtype, wrong length, read-only output ...) is a plain
`ValueError` or `TypeError`, raised before a byte moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.engine.diagnosis.report import FaultReport

__all__ = [
    "Aborted",
    "AuthenticationError",
    "Evicted",
    "GroupClosed",
    "GroupError",
    "LaunchError",
    "Mismatch",
    "NotSupported",
    "PeerLost",
    "PlanError",
    "RendezvousError",
    "SimulationError",
    "StoreError",
    "StoreTimeout",
    "Timeout",
    "UnfitError",
    "UnisonoError",
    "message",
]


class UnisonoError(RuntimeError):
    """Base of every error in this module. `pickle` and `copy` keep all of them, including attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


class AuthenticationError(UnisonoError):
    """The other end of a connection does not have the job's token, or is not the expected process."""


class RendezvousError(UnisonoError):
    """The rendezvous of the ranks failed.

    Attributes:
        missing: the ranks that did not join in time, as far as this rank knows.
    """

    def __init__(self, *args: object, missing: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.missing = missing


class StoreError(UnisonoError):
    """The key-value store failed, or another program answered."""


class StoreTimeout(StoreError, TimeoutError):
    """A key did not appear, or the store did not answer, in time."""


class GroupError(UnisonoError):
    """An operation of a group failed. The group is aborted and stays so; `close()` works.

    The Timeout and PeerLost of a `Queue` leave the group as it is.

    Attributes:
        report: the record of the fault; None if the engine did not find it.
    """

    def __init__(self, *args: object, report: FaultReport | None = None) -> None:
        super().__init__(*args)
        if report is not None and not hasattr(report, "missing"):
            raise TypeError(f"report is a {type(report).__name__}, expected a FaultReport")
        self.report = report


class Timeout(GroupError, TimeoutError):
    """An operation did not end before its deadline.

    Attributes:
        missing: the ranks that had not begun it; empty for a message, and if all had.
    """

    def __init__(self, *args: object, report: FaultReport | None = None) -> None:
        super().__init__(*args, report=report)
        self.missing: tuple[int, ...] = () if report is None else report.missing


class PeerLost(GroupError, ConnectionError):
    """A rank died or left the group.

    Attributes:
        rank: its rank in the group.  pid: its process id.  host: where it ran.
        signal: the signal that ended it, None when unknown or none.
        exit_code: its exit code, None when unknown or ended by a signal.
    """

    def __init__(
        self,
        text: str,
        *,
        rank: int,
        pid: int,
        signal: int | None = None,
        exit_code: int | None = None,
        host: str = "",
        report: FaultReport | None = None,
    ) -> None:
        super().__init__(text, report=report)
        self.rank = rank
        self.pid = pid
        self.host = host
        self.signal = signal
        self.exit_code = exit_code


class Evicted(GroupError):
    """The other ranks went on without this one, or this side of a split group may not go on.

    This rank can never disturb their group. It may join it again, see `join`.

    Attributes:
        why: the reason: "stopped", "late", "excluded", "cut off: its host does not answer".
        generation: of the group that this rank was in.
    """

    def __init__(
        self, *args: object, why: str = "", generation: int = 0, report: FaultReport | None = None
    ) -> None:
        super().__init__(*args, report=report)
        self.why = why
        self.generation = generation


class Mismatch(GroupError):
    """Ranks of one group made different calls, or the same call with sizes that do not fit.

    Attributes:
        calls: the call of each rank, "all_reduce(float64[4], SUM)"; without ranks whose call is not known,
            and empty for a message.
    """

    def __init__(self, *args: object, report: FaultReport | None = None) -> None:
        super().__init__(*args, report=report)
        ranks = () if report is None else report.ranks
        self.calls: dict[int, str] = {each.rank: str(each.call) for each in ranks if each.call is not None}


class Aborted(GroupError):
    """This process aborted the group (an interrupt in a wait, or an explicit abort)."""


class GroupClosed(UnisonoError):
    """The group was used after `close()`."""


class NotSupported(UnisonoError, NotImplementedError):
    """The backend of the group cannot do this; no byte has moved, and the group can still be used.

    Attributes:
        backend: its name.  what: the unsupported feature, as in the text.
    """

    def __init__(self, *args: object, backend: str = "", what: str = "") -> None:
        super().__init__(*args)
        self.backend = backend
        self.what = what


class PlanError(UnisonoError, ValueError):
    """A plan is wrong. The message shows the rank and the step."""


class SimulationError(UnisonoError):
    """A simulated run does not end. The message names the rank, the step and the link that it waits for."""


class LaunchError(UnisonoError):
    """The launcher could not start the ranks."""


class UnfitError(ValueError):
    """A training plan does not go with this model, its optimizer or this job, or is wrong by itself."""


def _restored(kind: type[UnisonoError], args: tuple[Any, ...], attributes: dict[str, Any]) -> UnisonoError:
    """Restore an error without calling its `__init__`, which may need keywords."""
    root: Any = OSError if issubclass(kind, OSError) else RuntimeError  # its allocator
    error: UnisonoError = root.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


def message(what: str, *, where: str = "", observed: str = "", expected: str = "", remedy: str = "") -> str:
    """Build an error text: what happened, where, observed against expected, what to do.

    Example: message("MASTER_PORT is not a port", observed="'29k'", expected="1..65535",
    remedy="Set MASTER_PORT to a number.") ->
    "MASTER_PORT is not a port: got '29k', expected 1..65535. Set MASTER_PORT to a number."
    """
    text = f"{what} [{where}]" if where else what
    if observed and expected:
        text += f": got {observed}, expected {expected}"
    elif observed:
        text += f": {observed}"
    elif expected:
        text += f": expected {expected}"
    return f"{text}. {remedy}" if remedy else text
