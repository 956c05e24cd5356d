"""How far predictions were off on this machine: `unisono bench` keeps it, `unisono doctor` shows it."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from unisono.engine.costs.machine import cache_file
from unisono.engine.environment.env import Settings

__all__ = ["FAR", "ForecastErrors", "PredictedCase", "keep", "kept", "summary", "text"]

FAR = 0.25
"""A prediction that is further off than this share of the measured time counts as far off."""


class PredictedCase(msgspec.Struct, frozen=True):
    """A measured call and its prediction."""

    name: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_us / self.measured_us - 1


class ForecastErrors(msgspec.Struct, frozen=True):
    """The predictions of one run of `unisono bench`.

    Attributes:
        date: of the run.  by: what has predicted: "the cost model", or a network.
        cases: how many there were.  far: how many were far off.  worst: the one that was furthest off.
    """

    date: str
    by: str
    cases: int
    far: int
    worst: PredictedCase


_decode = msgspec.json.Decoder(ForecastErrors).decode


def summary(cases: list[PredictedCase], by: str) -> ForecastErrors | None:
    """What there is to say about some cases; None without any."""
    if not cases:
        return None
    far = sum(abs(case.error) > FAR for case in cases)
    worst = max(cases, key=lambda case: max(case.error, 1 / (1 + case.error) - 1))
    return ForecastErrors(datetime.now(timezone.utc).strftime("%Y-%m-%d"), by, len(cases), far, worst)


def text(errors: ForecastErrors) -> str:
    """One line about it."""
    line = f"predicted by {errors.by}: {errors.far} of {errors.cases} are off by more than {FAR:.0%}"
    if not errors.far:
        return line
    worst = errors.worst
    return (
        f"{line}, the worst {worst.name}: {worst.measured_us:.4g} us measured, "
        f"{worst.predicted_us:.4g} us predicted"
    )


def _file(settings: Settings) -> Path | None:
    file = cache_file(settings)
    return None if file is None else file.with_name(f"forecasts-{file.name}")


def keep(errors: ForecastErrors, settings: Settings) -> None:
    """Keep it beside the calibration. What cannot be written is not kept."""
    with contextlib.suppress(OSError):
        file = _file(settings)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_bytes(msgspec.json.encode(errors))


def kept(settings: Settings) -> ForecastErrors | None:
    """What the last run has kept; None if there is nothing, or it is damaged."""
    try:
        file = _file(settings)
        return None if file is None else _decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
