"""`init_process_group`: ranks meet by URL or environment, and form a group."""

from __future__ import annotations

import contextlib
import sys
import warnings
from datetime import timedelta
from typing import Any, cast

from unisono.engine.base.limits import refuse_replaced_modules
from unisono.engine.base.validation import flag, instance, text, whole
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.init_method import InitMethod
from unisono.engine.bootstrap.rendezvous import rendezvous
from unisono.engine.diagnosis import except_hook
from unisono.engine.environment import env
from unisono.engine.environment.event_log import LOG
from unisono.engine.group.group import Group
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.notices import announce
from unisono.engine.group.parent_group import making
from unisono.engine.group.work import seconds
from unisono.engine.store import Store
from unisono.errors import message


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | Any | None = None,
    group_name: str = "world",
    reproducible: bool = False,
) -> Group:
    """Meet the other ranks and form a group with them.

    Args:
        backend: what moves the bytes. None or "native": Unisono's engine. "mpi", "gloo", "nccl": that
            library, see docs/backends.md. "auto": the engine; under `mpiexec` without further settings,
            mpi4py distributes the address of the rendezvous.
        init_method: `env://` (default), `tcp://host:port` or `file:///path`; excludes `store`.
        timeout: seconds for the rendezvous and for every operation; default UNISONO_TIMEOUT_S, 300 s.
        world_size, rank: -1 takes them from the URL or the environment.
        store: an open store for the rendezvous, also one of `torch.distributed`; the caller keeps it.
        group_name: appears in error texts. Ranks meet only under the same name; worlds of different names
            may meet at the same time, in threads of the same processes.
        reproducible: of the group and its subgroups, see `Group`.
    Raises:
        ValueError: an argument, the URL or an environment variable is wrong.
        NotSupported: the backend is not available, or cannot do what an argument asks for.
        RendezvousError: the rendezvous failed; the text names the missing ranks.
    """
    chosen = "native" if backend is None else instance(backend, str, "backend")
    world_size, rank = whole(world_size, "world_size"), whole(rank, "rank")
    text(group_name, "group_name")
    flag(reproducible, "reproducible")
    store = _of_ours(store, seconds(timeout, 300.0))
    if chosen in ("mpi", "gloo", "nccl"):
        from unisono.engine.group.external_init import (
            external_group,  # imports libraries that a native group does not need
        )

        return external_group(
            chosen,
            init_method,
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            store=store,
            group_name=group_name,
            reproducible=reproducible,
        )
    if chosen not in ("native", "auto"):
        raise ValueError(_no_backend(chosen))
    over_mpi = chosen == "auto" and init_method is None and store is None
    return _native_group(over_mpi, init_method, timeout, world_size, rank, store, group_name, reproducible)


def _of_ours(store: Any, timeout_s: float) -> Store | None:
    """A store of Unisono, one of PyTorch's translated."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(store, getattr(distributed, "Store", ())):
        from unisono.engine.backends.torch_store import TorchStore

        return TorchStore(store, timeout_s=timeout_s)
    return None if store is None else cast("Store", instance(store, Store, "store"))


def _native_group(
    over_mpi: bool,
    init_method: str | None,
    timeout: float | timedelta | None,
    world_size: int,
    rank: int,
    store: Store | None,
    group_name: str,
    reproducible: bool,
) -> Group:
    """A group over the engine. over_mpi: where `mpiexec` has started the ranks, MPI tells where to meet."""
    refuse_replaced_modules()
    settings = env.read(strict=False)
    with contextlib.ExitStack() as stack:
        if over_mpi:
            from unisono.engine.group.external_init import mpi_rendezvous, started_by_mpi

            if started_by_mpi():
                init_method, token = stack.enter_context(mpi_rendezvous())
                settings = settings._replace(token=token)
        except_hook.install(settings)
        _warn_of_unknown(settings)
        if settings.join and init_method is None and store is None:
            what = f"this process was started to join a running group (UNISONO_JOIN={settings.join})"
            raise ValueError(
                message(what, remedy="Use un.elastic(), or un.join(os.environ['UNISONO_JOIN']).")
            )
        return form(
            init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout_s=seconds(timeout, settings.timeout_s),
            settings=settings,
            group_name=group_name,
            reproducible=reproducible,
        )


def form(
    where: str | InitMethod | None,
    *,
    store: Store | None = None,
    rank: int,
    world_size: int,
    timeout_s: float,
    settings: env.Settings,
    group_name: str,
    reproducible: bool,
) -> Group:
    """`init_process_group` with given settings instead of the environment's, as under Ray.

    Args:
        where: an init_method, or a parsed one.
    """
    LOG.configure(settings)
    with making(world_size):
        own_rendezvous = rendezvous(
            where,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            settings=settings,
            name=group_name,
        )
        try:
            engine_settings = EngineSettings.of(settings, own_rendezvous.master)
            opened = open_engine(
                own_rendezvous.store,
                own_rendezvous.rank,
                own_rendezvous.world_size,
                timeout_s=timeout_s,
                settings=engine_settings,
            )
        except BaseException:
            own_rendezvous.close()
            raise
    group = NativeGroup(
        opened.engine,
        own_rendezvous.rank,
        own_rendezvous.world_size,
        group_name,
        timeout_s,
        own_rendezvous.store,
        own_rendezvous,
        reproducible=reproducible,
        hosts=opened.hosts,
        machine=opened.machine,
        settings=settings,
        identity=Identity(opened.membership, engine_settings),
    )
    announce(group)
    return group


def _warn_of_unknown(settings: env.Settings) -> None:
    if settings.launcher != "unisono run":  # the launcher has warned once for all ranks
        for line in env.unknown():
            warnings.warn(line, stacklevel=4)


def _no_backend(backend: str) -> str:
    remedy = "Choose native, mpi, gloo, nccl or auto, or leave it out."
    if backend == "unisono":
        remedy = (
            "That is Unisono's name in PyTorch: import unisono.torch, then "
            "torch.distributed.init_process_group('unisono')."
        )
    if "://" in backend:
        remedy = f"An address is init_method={backend!r}."
    return message(f"there is no backend {backend!r}", remedy=remedy)
