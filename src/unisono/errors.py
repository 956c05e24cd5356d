"""Every error Unisono raises on its own account, and the one builder of their messages.

    UnisonoError(RuntimeError)
    ├── AuthenticationError  the other end of a connection does not have the job's token
    ├── RendezvousError      the ranks could not come together
    ├── StoreError           the key-value store failed or answered nonsense
    │   └── StoreTimeout     (also TimeoutError) a key did not appear in time
    ├── GroupError           an operation failed; the group is aborted and stays so
    │   ├── Timeout          (also TimeoutError) somebody did not arrive in time
    │   ├── PeerLost         (also ConnectionError) a rank died or left
    │   ├── Mismatch         ranks called different things, or sizes do not fit
    │   └── Aborted          this group was aborted by this process (interrupt, abort())
    ├── GroupClosed          the group was used after close()
    ├── PlanError            (also ValueError) a plan is wrong; says at which step
    └── LaunchError          the launcher could not start the ranks

A caller's mistake (wrong dtype, wrong length, read-only output ...) is a plain
`ValueError` or `TypeError`, raised before a byte moves.
"""

from __future__ import annotations

__all__ = [
    "Aborted",
    "AuthenticationError",
    "GroupClosed",
    "GroupError",
    "LaunchError",
    "Mismatch",
    "PeerLost",
    "PlanError",
    "RendezvousError",
    "StoreError",
    "StoreTimeout",
    "Timeout",
    "UnisonoError",
    "message",
]


class UnisonoError(RuntimeError):
    """Base of every error in this module."""


class AuthenticationError(UnisonoError):
    """The other end of a connection does not have the job's token, or is not who it should be."""


class RendezvousError(UnisonoError):
    """The ranks could not come together."""


class StoreError(UnisonoError):
    """The key-value store failed, or something that is no store answered."""


class StoreTimeout(StoreError, TimeoutError):
    """A key did not appear, or the store did not answer, in time."""


class GroupError(UnisonoError):
    """An operation of a group failed. The group is aborted and stays so; `close()` works."""


class Timeout(GroupError, TimeoutError):
    """An operation outlived its deadline; the message names who had not arrived."""


class PeerLost(GroupError, ConnectionError):
    """A rank died or left the group.

    Attributes:
        rank: its rank in the group.  pid: its process id.
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
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.pid = pid
        self.signal = signal
        self.exit_code = exit_code


class Mismatch(GroupError):
    """Ranks of one group called different things, or the same with sizes that do not fit each other."""


class Aborted(GroupError):
    """This process aborted the group (an interrupt in a wait, or an explicit abort)."""


class GroupClosed(UnisonoError):
    """The group was used after `close()`."""


class PlanError(UnisonoError, ValueError):
    """A plan is wrong. The message shows the rank and the step."""


class LaunchError(UnisonoError):
    """The launcher could not start the ranks."""


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
