"""`MembershipGroup`: a `Group` from which a next one can be made, and what that needs of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol

from unisono import _native
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.costs.machine import MachineCalibration
from unisono.engine.environment import env
from unisono.engine.group.departure import Departure
from unisono.engine.group.group import Group
from unisono.engine.group.native_planning import NativePlanner
from unisono.engine.store import Store

__all__ = ["Former", "Loop", "MembershipGroup"]


class Former(NamedTuple):
    """The group before: who of it is not in this one, and the former rank of each rank; none: new ranks."""

    left: tuple[Departure, ...] = ()
    ranks: tuple[int | None, ...] = ()


class Loop(Protocol):
    """The loop of `elastic` whose turn a group is."""

    minimum: int
    maximum: int | None
    newcomers: int

    def leave(self, error: BaseException | None) -> bool:
        """Called where the block of the turn ends. True: the fault is dealt with in the next turn."""


class MembershipGroup(Group):
    """A `Group` of the engine, with what its next one is made from."""

    _planner: NativePlanner
    _identity: Identity | None
    _store: Store | None
    _former: Former
    _settings: env.Settings | None
    _attempts: int
    _loop: Loop | None

    @abstractmethod
    def _next(
        self,
        engine: _native.Engine,
        rank: int,
        store: Store | None,
        members: tuple[int, ...],
        hosts: tuple[str, ...],
        machine: MachineCalibration,
        identity: Identity,
        former: Former,
    ) -> MembershipGroup:
        """A group that follows this one."""

    @abstractmethod
    def _hand_over(self) -> Rendezvous | None:
        """End this group, whose next one is made; returns its rendezvous, which the next one keeps."""
