"""Collectives across hosts, Unisono against other libraries, on namespaces of this machine. Needs root.

    python benchmarks/hosts.py                         2x1, 2x2 and 4x2 ranks, unshaped links: ratios to Gloo
    python benchmarks/hosts.py --against mpich,openmpi   the MPI libraries of `make bench-peers`, by TCP
    python benchmarks/hosts.py --against before --before ../other/.venv/bin/python       another Unisono
    python benchmarks/hosts.py --layout 4x1 --shape 1gbit --sizes 64M       share of the bound, bytes on links

Every library has processes of its own on all hosts; they take turns, round by round, as in `unisono bench`:
values are checked, a figure is the median over rounds of the slowest rank's time, a ratio is taken within a
round. The bound of an all-reduce of n bytes among p hosts is 2(p-1)/p * n bytes through every host's link,
each way. On a shaped link `share` is what the bound alone would take divided by what it took; `link` is the
bytes counted over the bound. `before` runs the other installation's worker, with its own way of lining up.

An MPI library's own launcher starts its ranks: what it takes for `ssh` enters a namespace. Between hosts it
has TCP only; inside one it takes what it likes best, or TCP with --mpi-inside tcp.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from turns import PORTS, HostWorkerGroup, arguments, bytes_sent, hosts, network, write

from unisono.commands.bench.cases import OPERATIONS, BenchCase, sweep
from unisono.commands.bench.libraries import MPIS, MpiLibrary, MpiWorkerGroup
from unisono.commands.bench.measure import CaseResult, Timing, measure_sweep
from unisono.commands.bench.noise import CoreSpeed, CpuMeter, ticks_of
from unisono.commands.bench.report import noise_line, reasons
from unisono.commands.bench.worker_group import WorkerGroup
from unisono.engine.environment.env import parse_size

RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
AGENT = """#!/bin/sh
# In ssh's place: agent [OPTION...] HOST COMMAND
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in
{places}
*) echo "there is no host $1" >&2; exit 1 ;;
esac
shift
exec nsenter -t "$pid" -n -u -m -i sh -c "$*"
"""


def bits_per_s(rate: str) -> float:
    """Read tc's "1gbit"."""
    unit = next(unit for unit in RATES if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * RATES[unit]


# ---- sides ---------------------------------------------------------------------------------------------


class MpiHostWorkerGroup(MpiWorkerGroup):
    """Ranks that an MPI library starts on the hosts, through an agent instead of ssh."""

    def __init__(self, name: str, net: hosts.Network, per_host: int, inside: str) -> None:
        super().__init__(name, len(net) * per_host)
        self._net, self._per_host, self._inside = net, per_host, inside

    def _launcher(self, mpi: MpiLibrary, folder: str) -> list[str]:
        agent = Path(folder, "agent")
        places = "\n".join(f"{node.address}|{node.name}) pid={node.pid} ;;" for node in self._net)
        agent.write_text(AGENT.format(places=places))
        agent.chmod(0o700)
        settings, flags = MPI_LAUNCH[self.name](str(agent), self._inside)
        slots = ",".join(f"{node.address}:{self._per_host}" for node in self._net)
        where = [OF_HOSTS[self.name], slots, "-n", str(self.size)]
        program = str(mpi.home / "bin" / "mpiexec")
        crowded = self.size > len(os.sched_getaffinity(0))
        yields = YIELDING.get(self.name, []) if crowded else []
        return self._net[0].command([*settings, program, *flags, *yields, *mpi.flags, *where])


def _mpich(agent: str, inside: str) -> tuple[list[str], list[str]]:
    """UCX would detect that the "hosts" share a kernel, and copy between processes: so it has to use TCP."""
    settings = ["UCX_TLS=tcp,self", f"UCX_NET_DEVICES={hosts.INTERFACE}"]
    settings += ["MPIR_CVAR_NOLOCAL=1"] if inside == "tcp" else []
    return settings, ["-launcher", "ssh", "-launcher-exec", agent, "-iface", hosts.INTERFACE]


def _openmpi(agent: str, inside: str) -> tuple[list[str], list[str]]:
    """Settings must be flags: those are passed on to the ranks."""
    transports = "self,tcp" if inside == "tcp" else "self,sm,tcp"
    parameters = {"pml": "ob1", "btl": transports, "btl_tcp_if_include": hosts.INTERFACE}
    daemons = {"plm": "ssh", "plm_ssh_agent": agent, "prte_if_include": hosts.INTERFACE}
    flags = [word for name, value in parameters.items() for word in ("--mca", name, value)]
    return [], [*flags, *(word for name, value in daemons.items() for word in ("--prtemca", name, value))]


MPI_LAUNCH: dict[str, Callable[[str, str], tuple[list[str], list[str]]]] = {
    "mpich": _mpich,
    "openmpi": _openmpi,
}
"""(agent, transport inside a host) -> settings in the environment, and flags."""

YIELDING = {"openmpi": ["--mca", "mpi_yield_when_idle", "1"]}
"""It counts the ranks of a host, and does not see that these hosts have the same cores."""

OF_HOSTS = {"mpich": "-hosts", "openmpi": "-H"}


# ---- measuring -----------------------------------------------------------------------------------------


def make_side(name: str, net: hosts.Network, per_host: int, args: Any, token: str) -> WorkerGroup:
    """The ranks of a library, not started yet."""
    if name in MPI_LAUNCH:
        return MpiHostWorkerGroup(name, net, per_host, args.mpi_inside)
    return HostWorkerGroup(name, net, per_host, token, args.before if name == "before" else sys.executable)


def carried(side: WorkerGroup, case: BenchCase, net: hosts.Network) -> float:
    """Bytes that a call sends through the busiest host's link, headers included."""
    side.ask({"do": "bind", "case": case.to_json()})
    calls, before = 5, bytes_sent(net)
    side.time_block(calls, 0)
    return max(after - sent for after, sent in zip(bytes_sent(net), before, strict=True)) / calls


def measure(layout: str, operation: str, args: Any) -> list[dict[str, Any]]:
    """Start all sides on hosts of their own network; a record for each size."""
    count, per_host = (int(word) for word in layout.split("x"))
    rest = {"op": "sum", "root": 0, "ranks": count * per_host, "algorithm": args.algorithm, "dtype": "f32"}
    swept = [
        case
        for size in args.sizes
        for case in sweep(OPERATIONS[operation], first=size, last=size, factor=2, **rest)
    ]
    with network(count, args.shape) as (net, token), ExitStack() as stack:
        sides = [make_side(name, net, per_host, args, token) for name in ("unisono", *args.against)]
        own, *peers = [stack.enter_context(side) for side in sides]
        meter = CpuMeter(ticks_of([pid for side in sides for pid in side.pids]))
        lines = measure_sweep(swept, own, peers, rounds=args.rounds, round_ms=args.round_ms, pace=CoreSpeed())
        noise = noise_line(meter.read(), len(os.sched_getaffinity(0)))
        sent = [carried(own, line.case, net) if line.case.count else 0.0 for line in lines]
    print(f"{layout} {operation}{', links of ' + args.shape if args.shape else ''}")
    for line, each in zip(lines, sent, strict=True):
        print(shown(line, each, count, args.shape))
    print("\n".join([*reasons(lines), noise]), flush=True)
    return [
        {"layout": layout, "sent": each, **line.to_json()} for line, each in zip(lines, sent, strict=True)
    ]


def shown(line: CaseResult, sent: float, count: int, shape: str) -> str:
    """A line of the table: microseconds, and the ratio to each peer."""
    text = f"  {line.case.nbytes:>10} bytes {line.own.p50_us:>10.0f} us"
    for peer in line.peers:
        if isinstance(peer, Timing):
            text += f"  {peer.side} {peer.p50_us:>9.0f} us {line.ratio(peer):>5.2f}"
        else:
            text += f"  {peer.side} {'-':>18}"
    best = line.best_ratio()
    text += f"  best {best:.2f}" if best is not None and len(line.peers) > 1 else ""
    bound = 2 * (count - 1) / count * line.case.nbytes
    if line.case.operation == "all_reduce":
        share = bound * 8 / bits_per_s(shape) / line.own.p50_us * 1e6 if shape else 0
        text += f"  share of the bound {share:.0%}" if shape else ""
        text += f"  link {sent / bound:.2f}"
    return text + (f"  WRONG VALUES: {line.own.wrong}" if line.own.wrong else "")


def main() -> int:
    """Read the command line and measure."""
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--layout", action="append", metavar="HxR", help="hosts x ranks on each (2x1, 2x2, 4x2)")
    add("--operation", action="append", choices=list(OPERATIONS), help="(all_reduce)")
    add("--algorithm", default="", help="the algorithm for Unisono, instead of its own choice")
    add("--against", default="gloo", metavar="PEERS", help="a comma list of gloo, mpich, openmpi, before")
    add("--before", default="", metavar="PYTHON", help="the interpreter of the Unisono called before")
    add("--mpi-inside", choices=["shm", "tcp"], default="shm", help="transport of MPI inside a host")
    add("--shape", default="", metavar="RATE", help="rate of every link, such as 1gbit")
    add("--sizes", default="4,4K,64K,1M,64M", metavar="BYTES")
    add("--round-ms", type=float, default=50.0, help="length of a side's turn")
    args = parser.parse_args()
    args.sizes = [parse_size(size) for size in args.sizes.split(",")]
    args.against = [name for name in args.against.split(",") if name]
    problems = list(filter(None, [hosts.why_not()]))
    problems += [f"unknown peer {name}" for name in args.against if name not in {*PORTS, *MPI_LAUNCH}]
    problems += [f"no {MPIS[name].home}" for name in args.against if name in MPIS and not MPIS[name].site()]
    if problems:
        print("\n".join(f"left out: {problem}" for problem in problems), file=sys.stderr)
        return 1
    records: list[dict[str, Any]] = []
    for layout in args.layout or ["2x1", "2x2", "4x2"]:
        for operation in args.operation or ["all_reduce"]:
            records += measure(layout, operation, args)
    write(args.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
