"""The store's address, and this process's rank: `init_method`, arguments and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from unisono.engine.environment.env import Settings
from unisono.errors import RendezvousError, message


class InitMethod(msgspec.Struct, frozen=True):
    """A parsed init_method. Scheme "job": the port is computed from the job's name, see `launchers`."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    job: str = ""
    query: Mapping[str, int] = {}


class RankAndSize(NamedTuple):
    rank: int
    world_size: int


MULTICAST = tuple(f"{first}." for first in range(224, 240))


def parse(url: str) -> InitMethod:
    """Raises ValueError for anything but the three forms of URL."""
    from urllib.parse import unquote, urlsplit  # imported late: most jobs have no URL

    try:
        parts = urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(_malformed(url, str(error))) from None
    query = _query(url, parts.query)
    if parts.scheme == "env" and not (parts.netloc or parts.path):
        return InitMethod("env", query=query)
    if parts.scheme == "tcp":
        if not parts.hostname or port is None or parts.path not in ("", "/"):
            raise ValueError(_malformed(url, "tcp:// needs a host and a port, as in tcp://127.0.0.1:29500"))
        if parts.hostname.startswith(MULTICAST) and parts.hostname.replace(".", "").isdecimal():
            why = "this is a multicast address, by which no ranks meet: write the address of rank 0's host"
            raise ValueError(_malformed(url, why))
        return InitMethod("tcp", host=parts.hostname, port=port, query=query)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            remedy = f"file:///{unquote(parts.netloc + parts.path).lstrip('/') or 'tmp/meet'}"
            raise ValueError(_malformed(url, f"file:// needs an absolute path, three slashes: {remedy}"))
        return InitMethod("file", path=unquote(parts.path), query=query)
    raise ValueError(_malformed(url, "write env://, tcp://host:port or file:///path"))


def _malformed(url: object, why: str) -> str:
    return message(f"init_method {url!r} is not usable", observed=why)


def _query(url: str, text: str) -> dict[str, int]:
    from urllib.parse import parse_qsl

    found: dict[str, int] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in ("rank", "world_size"):
            raise ValueError(_malformed(url, f"unknown parameter {name!r}, there are rank and world_size"))
        if not value.isdecimal():
            raise ValueError(_malformed(url, f"{name} is a whole number, got {value!r}"))
        found[name] = int(value)
    return found


def find_rank_and_size(
    target: InitMethod, rank: int, world_size: int, settings: Settings, remedy: str = ""
) -> RankAndSize:
    """Rank and world size from the arguments, otherwise the URL, otherwise the environment.

    Args:
        remedy: what the user of this launcher has to set when an address is missing; "": the general advice.
    """
    given_rank = _given("rank", rank, target, settings)
    given_world = _given("world_size", world_size, target, settings)
    missing = [name for name, value in (("RANK", given_rank), ("WORLD_SIZE", given_world)) if value is None]
    if target.scheme == "env" and settings.store_address is None:
        address = {"MASTER_ADDR": settings.master_addr, "MASTER_PORT": settings.master_port}
        missing += [name for name, value in address.items() if value is None]
    if missing or given_rank is None or given_world is None:
        raise RendezvousError(_missing(target.scheme, missing, remedy))
    if given_world < 1:
        raise ValueError(f"world_size is at least 1, got {given_world}")
    if not 0 <= given_rank < given_world:
        origin = f" ({settings.origin('rank')})" if rank == -1 and "rank" not in target.query else ""
        raise ValueError(f"rank{origin} is from 0 to world_size - 1 = {given_world - 1}, got {given_rank}")
    return RankAndSize(given_rank, given_world)


def _given(name: str, argument: int, target: InitMethod, settings: Settings) -> int | None:
    in_url = target.query.get(name)
    if argument == -1 and in_url is None:
        of_the_environment: int | None = getattr(settings, name)
        return of_the_environment
    if argument == -1:
        return in_url
    if in_url is not None and in_url != argument:
        raise ValueError(f"the argument {name}={argument} and the init_method's {name}={in_url} disagree")
    return argument


def _missing(scheme: str, names: list[str], remedy: str) -> str:
    listed = ", ".join(names)
    where = "environment variable" + ("s" if len(names) > 1 else "")
    if scheme in ("env", "job"):
        remedy = remedy or (
            "Start the ranks with a launcher (unisono run -n 2 script.py), set them, or give init_method=."
        )
        return message(f"env:// needs the {where} {listed}, not set here", remedy=remedy)
    arguments = " and ".join(name.lower() for name in names)
    return message(f"{arguments} not given", remedy=f"Pass {arguments}=, or set the {where} {listed}.")
