"""`Settings`: the settings from the environment, which `env` reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from unisono.engine.base.authentication import JobToken

LOG_SUBSYSTEMS = ("init", "env", "net", "coll", "elastic")
"""What lines of the log are about, by NCCL's words where it has the same."""


class InvalidSetting(str):
    """The error of a setting's variables, in place of its value."""

    __slots__ = ()


class _SettingFields(NamedTuple):
    timeout_s: float = 300.0
    staging_bytes: int = 1 << 20
    zero_copy: bool = True
    placement: bool = True
    spin_us: int = -1
    peer_timeout_s: float = 10.0
    join: str = ""
    listen: tuple[str, int] = ("", 0)
    elastic: tuple[int, int] | None = None
    ranks_per_host: int = 0
    calibration: str = ""
    compare: str = ""
    record: str = ""
    log: str = "off"
    log_file: str = ""
    log_subsystems: tuple[str, ...] = LOG_SUBSYSTEMS
    log_signal: str = ""
    cache_home: str = ""
    replace: str = ""
    virtual_gpus: int = 0
    virtual_memory: int = 0
    virtual_poison: bool = True
    virtual_check_streams: bool = False
    virtual_shared: str = ""
    socket_ifname: str = ""
    port_range: tuple[int, int] | None = None
    advertise: tuple[str, int] | None = None
    token: JobToken = JobToken()
    tls: bool = False
    status_fd: tuple[int, int] | None = None
    report_fd: tuple[int, int] | None = None
    store_address: tuple[str, int] | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    group_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job_id: str = ""
    step_id: str = ""
    num_nodes: int | None = None
    node_list: str = ""
    node_name: str = ""
    restart_count: int = 0
    agent_store: bool = False
    kubernetes: bool = False
    parents: int = 0
    launcher: str = ""
    origins: Mapping[str, str] = MappingProxyType({})


class Settings(_SettingFields):
    """All settings from the environment. None: not set, and no default.

    `origins` has, for each setting, the variable it came from, or "default".

    Raises:
        ValueError: at the access to a setting that `read(strict=False)` could not parse.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if type(value) is InvalidSetting:
            raise ValueError(str(value))
        return value

    def origin(self, setting: str) -> str:
        """The variable from which `setting` was read, or "default"."""
        return self.origins.get(setting, "default")
