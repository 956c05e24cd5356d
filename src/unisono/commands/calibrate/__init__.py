"""`unisono calibrate`: measure the machine once, keep the figures, show them.

    measure     the measuring, in threads of this process: under two seconds

What the figures are and where they are kept: `unisono.engine.costs.machine`. Groups read them when
they are made.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.engine.costs.machine import LoadedCalibration, MemoryBandwidth
    from unisono.engine.environment.env import Settings

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--refresh", action="store_true", help="measure again though there are figures")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on standard output")


def main(args: argparse.Namespace) -> int:
    """Show the figures; measure them if there are none. Exit code: 0, or 2 for a malformed setting."""
    from unisono.engine.costs.machine import recall
    from unisono.engine.environment import env

    try:
        settings = env.read()
    except ValueError as error:
        print(f"unisono calibrate: {error}", file=sys.stderr)
        return 2
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


def _measured(settings: Settings) -> LoadedCalibration:
    """Measure, and keep the figures. A file that cannot be written is reported, and is no error."""
    from unisono.commands.calibrate.measure import measure
    from unisono.engine.costs.machine import LoadedCalibration, cache_file, save

    calibration = measure()
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
