"""`unisono calibrate`: measure the machine once, keep the figures, show them; or a job's network.

    measure     the measuring, in threads of this process: under two seconds
    hosts       --hosts, in every rank of a job: the network between its hosts, as a file

What the figures are and where they are kept: `unisono.engine.costs.machine`. Groups read them when
they are made. `--compute` is `unisono.parallel.calibration`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.commands.calibrate.hosts import HostMeasurements
    from unisono.engine.costs.machine import LoadedCalibration, MemoryBandwidth
    from unisono.engine.environment.env import Settings
    from unisono.engine.group.group import Group

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--refresh", action="store_true", help="measure again though there are figures")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on standard output")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="measure the network of a job; every rank runs it: unisono run ... -m unisono calibrate --hosts",
    )
    parser.add_argument(
        "--compute", action="store_true", help="measure the operators of training, for `unisono.parallel`"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="with --compute: measure once more, and take the medians of all times",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="with --hosts: write the network there, FILE.toml"
    )


def main(args: argparse.Namespace) -> int:
    """Show the figures; measure them if there are none.

    Exit code: 0; 1: something could not be measured or written; 2: wrong usage, or a malformed setting.
    """
    from unisono.engine.costs.machine import recall
    from unisono.engine.environment import env

    if args.output and not args.hosts:
        print("unisono calibrate: -o needs --hosts", file=sys.stderr)
        return 2
    try:
        settings = env.read()
    except ValueError as error:
        print(f"unisono calibrate: {error}", file=sys.stderr)
        return 2
    if args.again and (args.refresh or not args.compute):
        print("unisono calibrate: --again needs --compute, and no --refresh", file=sys.stderr)
        return 2
    if args.hosts and args.compute:
        print("unisono calibrate: --hosts or --compute, not both", file=sys.stderr)
        return 2
    if args.hosts:
        return _hosts(args.output)
    if args.compute:
        return _compute(settings, refresh=args.refresh, again=args.again, as_json=args.json)
    found = recall(settings)
    if found.note:
        print(f"unisono calibrate: {found.note}", file=sys.stderr)
    if args.refresh or not found.calibration.measured_here:
        found = _measured(settings)
    if args.json:
        from msgspec import json

        print(json.format(json.encode(found.calibration)).decode())
    else:
        print("\n".join(lines(found)))
    return 0


def _compute(settings: Settings, *, refresh: bool, again: bool, as_json: bool) -> int:
    """Show the operators' figures; measure them if there are none."""
    from msgspec import json

    try:
        from unisono.parallel.calibration.jobs import ComputeCalibrationError, calibrated, compute_lines
    except ModuleNotFoundError as error:  # PyTorch
        print(f"unisono calibrate: --compute: {error}", file=sys.stderr)
        return 1
    try:
        found = calibrated(
            settings, refresh=refresh, again=again, say=lambda text: print(text, file=sys.stderr)
        )
    except ComputeCalibrationError as error:
        print(f"unisono calibrate: {error}", file=sys.stderr)
        return 1
    if found.note:
        print(f"unisono calibrate: {found.note}", file=sys.stderr)
    print(json.encode(found.calibration).decode() if as_json else "\n".join(compute_lines(found)))
    return 0


def _hosts(output: str | None) -> int:
    """Measure the network of this job; rank 0 writes it."""
    from unisono.commands.calibrate.hosts import measure_hosts, written
    from unisono.engine.group.init import init_process_group
    from unisono.errors import UnisonoError

    try:
        with init_process_group() as world:
            if world.size < 2:
                print(
                    "unisono calibrate: --hosts needs a job of at least two ranks: "
                    "unisono run -n 2 -m unisono calibrate --hosts",
                    file=sys.stderr,
                )
                return 2
            measured = measure_hosts(world)
            text = written(measured)
            _keep_wire(world, measured)
            if world.rank == 0 and output:
                Path(output).write_text(text, encoding="utf-8")
            if world.rank == 0:
                print(output or text)
    except OSError as error:
        print(f"unisono calibrate: {output}: {error.strerror}", file=sys.stderr)
        return 1
    except UnisonoError as error:
        print(f"unisono calibrate: {error}", file=sys.stderr)
        return 1
    return 0


def _keep_wire(world: Group, measured: HostMeasurements) -> None:
    """Keep what a message between hosts takes in the figures of each host: groups choose algorithms by it."""
    from unisono.engine.costs.machine import NO_FILE
    from unisono.engine.environment import env

    settings, hosts = env.read(), world._planner.hosts
    first = hosts.index(hosts[world.rank]) == world.rank
    if measured.between and first and settings.calibration != NO_FILE:
        pair = measured.between[0][2]
        _measured(settings, wire_s=pair.one_way_s / 2, wire=pair.rate)


def _measured(settings: Settings, *, wire_s: float = 0.0, wire: float = 0.0) -> LoadedCalibration:
    """Measure, and keep the figures. A file that cannot be written is reported, and is no error.

    wire_s, wire: between hosts; 0: as they were. With them, figures that are there already stay.
    """
    import msgspec

    from unisono.commands.calibrate.measure import measure
    from unisono.engine.costs.machine import LoadedCalibration, cache_file, recall, save

    before = recall(settings).calibration
    calibration = before if wire and before.measured_here else measure()
    calibration = msgspec.structs.replace(
        calibration, wire_s=wire_s or before.wire_s, wire=wire or before.wire
    )
    try:
        file: Path | None = cache_file(settings)
    except OSError as error:  # no home directory
        return LoadedCalibration(calibration, "measured now", str(error))
    if file is None:
        return LoadedCalibration(calibration, "measured now, not kept: UNISONO_CALIBRATION=none")
    try:
        save(calibration, file)
    except OSError as error:
        print(f"unisono calibrate: not kept: {file}: {error.strerror}", file=sys.stderr)
        return LoadedCalibration(calibration, "measured now, not kept")
    return LoadedCalibration(calibration, str(file))


def lines(found: LoadedCalibration) -> list[str]:
    """The figures as text."""
    one = found.calibration
    caches = f"{_mib(one.cache_bytes)} of cache each, {_mib(one.shared_cache_bytes)} shared"
    return [
        f"{one.cores} cores, {caches}; measured {one.measured or 'never'}",
        f"{'':34}{'own cache':>12}{'shared cache':>14}{'memory':>10}   GB/s per core",
        *_rates("copying", one.copy),
        *_rates("adding f32", one.reduce),
        f"{'a core sees what another wrote after':42}{one.flag_s * 1e6:8.2f} us",
        f"{'a sleeper on a shared core runs after':42}{one.wake_s * 1e6:8.2f} us",
        f"{'twice as many ranks as cores have met after':44}{one.crowd_s * 1e6:6.2f} us",
        f"{'into memory that another core has read':42}{one.give / 1e9:8.1f} GB/s",
        f"{'out of what another core has written':42}{one.take / 1e9:8.1f} GB/s",
        f"{'a call from Python, one rank':42}{one.call_s * 1e6:8.2f} us",
        f"{'TCP over loopback, one way':42}{one.tcp_s * 1e6:8.2f} us, {one.tcp / 1e9:.1f} GB/s",
        *(
            [f"{'between hosts, one way':42}{one.wire_s * 1e6:8.2f} us, {one.wire / 1e9:.2g} GB/s"]
            if one.wire
            else []
        ),
        f"kept in {found.source}" if "/" in found.source else found.source,
    ]


def _rates(what: str, rates: MemoryBandwidth) -> list[str]:
    rows = ((f"{what}, one core", True), (f"{what}, all cores at once", False))
    levels = (("cache", 12), ("shared_cache", 14), ("memory", 10))
    return [
        f"{name:34}" + "".join(f"{rates.at(level, alone=alone) / 1e9:>{width}.1f}" for level, width in levels)
        for name, alone in rows
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
