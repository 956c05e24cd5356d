"""Ray starts the ranks: `run` calls a function on new actors, `join` makes a group of existing ones.

    import unisono.ray

    def train(world, lr): ...                                  # world is a unisono.Group
    results = unisono.ray.run(train, num_workers=4, args=(0.1,))

    @ray.remote
    class Learner:
        def __init__(self, rank):
            self.world = unisono.ray.join("learners", rank=rank, world_size=4)

Ray places the processes and moves the function and its results; ranks communicate over Unisono. Each group
has a token of its own, which Ray sends to its ranks. Ray is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from unisono.engine.base.authentication import JobToken, make_token
from unisono.engine.base.validation import flag, instance, listed, text, whole
from unisono.engine.bootstrap.init_method import InitMethod
from unisono.engine.environment import env
from unisono.engine.group import Group
from unisono.engine.group.init import form
from unisono.engine.group.work import seconds
from unisono.errors import GroupError, PeerLost, RendezvousError, message

__all__ = ["join", "run"]

GRACE_S = 1.0
"""Time for the other ranks to end by themselves after the first failure."""
AGAIN_S = 0.02
"""The pause between two checks of a name that an earlier rendezvous still uses."""
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


def run(
    fn: Callable[..., Any],
    num_workers: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    placement_group: Any = None,
    placement_strategy: str = "PACK",
    runtime_env: Mapping[str, Any] | None = None,
    timeout: float | timedelta | None = None,
    reproducible: bool = False,
) -> list[Any]:
    """Call `fn(group, *args, **kwargs)` on `num_workers` new Ray actors, a group; results by rank.

    The actors start when there is room for all, and end with this call. It starts Ray if it does not run.

    Args:
        num_cpus, num_gpus, resources, runtime_env: of every worker, as in Ray.
        placement_group: of Ray: rank r gets bundle r. None: the call makes one.
        placement_strategy: for that one: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        timeout: seconds for placement, rendezvous and every operation; default UNISONO_TIMEOUT_S, 300 s.
        reproducible: of the group, see `Group`.
    Raises:
        ImportError: Ray is not installed.  RendezvousError: the cluster had no room in time.
        PeerLost: a worker died; names its rank, process and host.  TypeError, ValueError: a wrong argument.
        Otherwise the first exception of `fn` on a rank; the group's errors on other ranks follow from it.
    """
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}, expected a function that takes the group")
    size = whole(num_workers, "num_workers", 1)
    arguments = (tuple(listed(args, "args")), _mapping(kwargs, "kwargs"))
    need = _needs(num_cpus, num_gpus, resources)
    if text(placement_strategy, "placement_strategy") not in STRATEGIES:
        raise ValueError(
            f"placement_strategy is {placement_strategy!r}, expected one of {', '.join(STRATEGIES)}"
        )
    options = {"runtime_env": _mapping(runtime_env, "runtime_env") or None}
    timeout_s = seconds(timeout, env.read(strict=False).timeout_s)
    flag(reproducible, "reproducible")
    ray = _ray()
    _check_placement_group(placement_group, size)
    if not ray.is_initialized():
        ray.init()
    bundles = placement_group or ray.util.placement_group([need] * size, strategy=placement_strategy)
    workers: list[Any] = []
    try:
        _await_room(ray, bundles, need, size, timeout_s)
        workers.extend(_start(ray, bundles, rank, need, options) for rank in range(size))
        places = [WorkerPlacement(*place) for place in _all(ray, [each.place.remote() for each in workers])]
        rest = (size, _invite(places[0].address), timeout_s, reproducible, *arguments)
        calls = [worker.call.remote(fn, rank, *rest) for rank, worker in enumerate(workers)]
        return _gather(ray, calls, places)
    finally:
        for worker in workers:
            ray.kill(worker, no_restart=True)
        if placement_group is None:
            ray.util.remove_placement_group(bundles)


def join(
    name: str,
    *,
    rank: int,
    world_size: int,
    timeout: float | timedelta | None = None,
    reproducible: bool = False,
) -> Group:
    """Form the group `name` with other actors or tasks of this Ray job; each of them calls this.

    The rendezvous uses a named actor without resources, which ends after it. A name can be used again.

    Args:
        name: the same for all; appears in error texts.
        timeout: seconds for the rendezvous and for every operation; default UNISONO_TIMEOUT_S, 300 s.
        reproducible: of the group and its subgroups, see `Group`.
    Raises:
        ImportError: Ray is not installed.  TypeError, ValueError: an argument is wrong.
        RendezvousError: the rendezvous failed; the text names the missing ranks.
    """
    if not text(name, "name"):
        raise ValueError("name is empty, expected the group's name")
    size = whole(world_size, "world_size", 1)
    mine = whole(rank, "rank", 0, size - 1)
    timeout_s = seconds(timeout, env.read(strict=False).timeout_s)
    flag(reproducible, "reproducible")
    ray = _ray()
    if not ray.is_initialized():
        raise RuntimeError("join is called in Ray's actors and tasks, and this process is none of Ray's")
    ours = _invite(ray.util.get_node_ip_address()) if mine == 0 else None
    board, invitation = _meet(ray, name, mine, size, ours, timeout_s)
    group = _form(invitation, mine, size, timeout_s, name, reproducible)
    del board  # not earlier: the other ranks may still wait for its answer
    return group


class RendezvousInfo(NamedTuple):
    """The address of rank 0's store, the name of its job, and its token."""

    address: str
    job: str
    token: bytes


class WorkerPlacement(NamedTuple):
    """Where a worker runs."""

    address: str
    host: str
    pid: int


class RayWorker:
    """An actor of `run`."""

    def place(self) -> WorkerPlacement:
        """Where Ray placed this actor."""
        return WorkerPlacement(_ray().util.get_node_ip_address(), socket.gethostname(), os.getpid())

    def call(
        self,
        fn: Callable[..., Any],
        rank: int,
        size: int,
        invitation: RendezvousInfo,
        timeout_s: float,
        reproducible: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Join the group and call the user's function."""
        with _form(invitation, rank, size, timeout_s, "world", reproducible) as world:
            return fn(world, *args, **kwargs)


class RendezvousActor:
    """The named actor at which the ranks of one group come together once; rank 0's invitation goes to all."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._came: set[int] = set()
        self._invitation: RendezvousInfo | None = None
        self._complete = asyncio.Event()

    async def meet(self, rank: int, invitation: RendezvousInfo | None) -> RendezvousInfo | None:
        """Wait for all ranks. Returns rank 0's invitation; None if an earlier group used this board."""
        if self._complete.is_set():
            return None
        self._came.add(rank)
        self._invitation = invitation or self._invitation
        if len(self._came) == self._size:
            self._complete.set()
        await self._complete.wait()
        return self._invitation

    async def missing(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self._size) if rank not in self._came]


def _invite(address: str) -> RendezvousInfo:
    return RendezvousInfo(address, f"Ray {os.urandom(8).hex()}", bytes(make_token()))


def _meet(
    ray: Any, name: str, rank: int, size: int, ours: RendezvousInfo | None, timeout_s: float
) -> tuple[Any, RendezvousInfo]:
    """The board and the invitation. The board ends when its first process drops this handle."""
    gone = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)
    deadline = time.monotonic() + timeout_s
    options = {"name": f"unisono group {name}", "get_if_exists": True, "num_cpus": 0}
    while True:
        try:
            board = ray.remote(RendezvousActor).options(**options, max_concurrency=2 * size).remote(size)
            invitation = ray.get(board.meet.remote(rank, ours), timeout=max(0.0, deadline - time.monotonic()))
            if invitation is not None:
                return board, RendezvousInfo(*invitation)
        except gone:  # its maker has left: it had finished an earlier meeting, or given up
            pass
        except ray.exceptions.GetTimeoutError:
            missing = [other for other in _missing(ray, board) if other != rank]
            raise _too_few(name, rank, size, timeout_s, missing) from None
        if time.monotonic() >= deadline:
            raise _too_few(name, rank, size, timeout_s, [])
        time.sleep(AGAIN_S)


def _missing(ray: Any, board: Any) -> list[int]:
    try:
        return list(ray.get(board.missing.remote(), timeout=GRACE_S))
    except ray.exceptions.RayError:
        return []


def _too_few(name: str, rank: int, size: int, timeout_s: float, missing: list[int]) -> RendezvousError:
    some = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    absent = f"missing rank{'s' if len(missing) > 1 else ''} {some}" if missing else "others gave up earlier"
    return RendezvousError(
        message(
            f"the {size} ranks of the group {name!r} did not come together within {timeout_s:g} s",
            where=f"as seen by rank {rank}",
            observed=absent,
            remedy="See whether their actors run and call join with this name, or raise the timeout.",
        ),
        missing=tuple(missing),
    )


def _form(
    invitation: RendezvousInfo, rank: int, size: int, timeout_s: float, name: str, reproducible: bool
) -> Group:
    return form(
        InitMethod("job", host=invitation.address, job=invitation.job),
        rank=rank,
        world_size=size,
        timeout_s=timeout_s,
        settings=env.read(strict=False)._replace(token=JobToken(invitation.token)),
        group_name=name,
        reproducible=reproducible,
    )


def _start(ray: Any, bundles: Any, rank: int, need: dict[str, float], options: dict[str, Any]) -> Any:
    """The actor of one rank, in its bundle."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=bundles, placement_group_bundle_index=rank
    )
    others = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU")}
    remote = ray.remote(RayWorker).options(
        num_cpus=need.get("CPU", 0),
        num_gpus=need.get("GPU", 0),
        resources=others,
        scheduling_strategy=strategy,
        max_restarts=0,
        **options,
    )
    return remote.remote()


def _await_room(ray: Any, bundles: Any, need: dict[str, float], size: int, timeout_s: float) -> None:
    for name, amount in need.items():
        if (has := ray.cluster_resources().get(name, 0.0)) < amount * size:  # nodes may still come
            lacking = f"{size} workers need {amount * size:g} {name}, the cluster has {has:g}"
            warnings.warn(f"{lacking}: waiting up to {timeout_s:g} s for more", RuntimeWarning, stacklevel=3)
    if bundles.wait(timeout_s):
        return
    there = {name: amount for name, amount in ray.cluster_resources().items() if name in need}
    free = {name: amount for name, amount in ray.available_resources().items() if name in need}
    raise RendezvousError(
        message(
            f"Ray found no room for {size} workers of {need} within {timeout_s:g} s",
            observed=f"the cluster has {there}, of which {free} are free",
            remedy="Ask for less, add nodes, or wait until other work ends.",
        )
    )


def _all(ray: Any, calls: list[Any]) -> list[Any]:
    """Their results; a worker that cannot start is named by its rank."""
    results = []
    for rank, call in enumerate(calls):
        try:
            results.append(ray.get(call))
        except ray.exceptions.RayError as error:
            raise RendezvousError(
                message(f"the worker of rank {rank} did not start", observed=str(error)), missing=(rank,)
            ) from error
    return results


def _gather(ray: Any, calls: list[Any], places: list[WorkerPlacement]) -> list[Any]:
    """The results by rank; raises the failure that came first."""
    failures: dict[int, Exception] = {}
    deadline: float | None = None
    waiting = list(calls)
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        if not ended:
            break
        try:
            ray.get(ended[0])
        except Exception as error:  # noqa: BLE001 - whatever the user's function raised, handed on below
            failures[calls.index(ended[0])] = error
            deadline = deadline or time.monotonic() + GRACE_S
    if failures:
        raise _first(ray, failures, places)
    return list(ray.get(calls))


def _first(ray: Any, failures: dict[int, Exception], places: list[WorkerPlacement]) -> Exception:
    """The error of a dead worker, else an error of `fn`, else the first error. It names its rank."""
    died = ray.exceptions.RayActorError
    kinds: list[Callable[[Exception], bool]] = [
        lambda error: isinstance(error, died),
        lambda error: not isinstance(error, GroupError),
        lambda _: True,
    ]
    rank, error = next((rank, error) for fits in kinds for rank, error in failures.items() if fits(error))
    place = places[rank]
    who = f"rank {rank} (host {place.host}, pid {place.pid})"
    if isinstance(error, died):
        reason = " ".join(str(error).split()).rpartition("is dead because ")[2]
        reason = reason.partition(" Some common causes")[0].rstrip(".")
        return PeerLost(
            message(f"the Ray actor of {who} died", observed=reason),
            rank=rank, pid=place.pid, host=place.host,
        ).with_traceback(None)  # fmt: skip
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised on {who} of unisono.ray.run")
    return error


def _ray() -> Any:
    try:
        import ray
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ImportError("unisono.ray needs Ray: pip install 'unisono[ray]'") from error
    return ray


def _mapping(value: Any, name: str) -> dict[str, Any]:
    return {} if value is None else dict(instance(value, Mapping, name))


def _needs(num_cpus: float, num_gpus: float, resources: Mapping[str, float] | None) -> dict[str, float]:
    """What a worker needs, as Ray writes a bundle."""
    others = _mapping(resources, "resources")
    for name in ("CPU", "GPU"):
        if name in others:
            raise ValueError(f"resources names {name}: give num_{name.lower()}s instead")
    need: dict[str, float] = {"CPU": num_cpus, "GPU": num_gpus, **others}
    for name, amount in need.items():
        text(name, "a resource's name")
        if type(amount) not in (int, float) or not 0 <= amount < float("inf"):
            raise ValueError(f"a worker's {name} is {amount!r}, expected a number from 0")
    need = {name: amount for name, amount in need.items() if amount}
    if not need:
        raise ValueError("a worker needs no resource at all: Ray places only what needs some")
    return need


def _check_placement_group(group: Any, size: int) -> None:
    if group is None:
        return
    if not hasattr(group, "bundle_specs"):
        raise TypeError(f"placement_group is a {type(group).__name__}, expected one of Ray's")
    if len(group.bundle_specs) < size:
        raise ValueError(
            f"placement_group has {len(group.bundle_specs)} bundles, expected one for each of {size} workers"
        )
