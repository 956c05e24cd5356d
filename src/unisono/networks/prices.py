"""A network in the figures of the engine's cost model, by which it chooses algorithms (`engine/costs`)."""

from __future__ import annotations

import msgspec

from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.tuner import ENGINE_S
from unisono.networks.costs import InsideCosts
from unisono.networks.network import Network

__all__ = ["machine_of"]


def machine_of(network: Network) -> MachineCalibration:
    """The figures of a machine on which the cost model has this network's prices.

    Taken from two routes: between the first two ranks of a host, and from the first host to the last one.
    """
    costs, hosts = network.costs_of(0), network.hosts
    changes: dict[str, float] = {"call_s": max(costs.call_s, 1e-9)}
    copy, reduce = DEFAULTS.copy, DEFAULTS.reduce
    near = next((rank for rank in range(1, network.size) if hosts[rank] == hosts[0]), None)
    if near is not None:
        inside = costs.inside or InsideCosts(
            send_s=costs.o_send_s,
            recv_s=costs.o_recv_s,
            write_s_per_byte=costs.o_s_per_byte,
            s_per_byte=costs.o_s_per_byte,
        )
        latency, rate = _route(network, 0, near)
        changes["flag_s"] = max(latency + inside.send_s + inside.recv_s - ENGINE_S, 1e-8)
        copy = msgspec.structs.replace(copy, all_memory=1 / (inside.s_per_byte + 1 / rate))
    if hosts[-1] != hosts[0]:
        latency, rate = _route(network, 0, network.size - 1)
        changes["tcp_s"] = (latency + costs.o_send_s + costs.o_recv_s) / 2
        changes["tcp"] = 1 / (costs.o_s_per_byte + 1 / rate)
    if costs.reduce_s_per_byte:
        reduce = msgspec.structs.replace(reduce, all_shared_cache=1 / costs.reduce_s_per_byte)
    return msgspec.structs.replace(DEFAULTS, copy=copy, reduce=reduce, **changes)


def _route(network: Network, source: int, target: int) -> tuple[float, float]:
    """(latency, bytes per second) of a message alone."""
    links = [network.links[link] for link in network.route(source, target)]
    return sum(link.latency_s for link in links), min((link.bytes_per_s for link in links), default=1e15)
