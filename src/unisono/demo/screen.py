"""The demo's output: a progress line, updated in place on a terminal, then the comparison."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, TextIO

from unisono import env

__all__ = ["Progress", "TrainingRecord", "comparison", "printable"]

SMOOTHED_STEPS = 20
SKIPPED_STEPS = 2
LINE_EVERY_STEPS = 25
LINES = 12  # at most, of a long run
FEW_STEPS = 10
CLEAR_LINE = "\r\x1b[K"


@dataclass
class TrainingRecord:
    """Everything rank 0 reported about one run."""

    name: str
    parameters: int = 0
    tokens_per_step: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    total: int = 0
    sample: str = ""
    others_cpu: float | None = None

    def take(self, record: dict[str, Any]) -> None:
        """Add one report."""
        kind = record["unisono_demo"]
        values = {name: value for name, value in record.items() if name != "unisono_demo"}
        if kind == "step":
            self.steps.append(values)
        else:
            for name, value in values.items():
                setattr(self, name, value)

    def median_of(self, name: str) -> float:
        """Median over the steps, without the first ones, which allocate."""
        return float(median(step[name] for step in self.steps[SKIPPED_STEPS:] or self.steps))

    def loss_after(self, steps: int) -> float:
        """Mean over ranks and the last of the first `steps` steps."""
        return fmean(self.losses[:steps][-SMOOTHED_STEPS:])

    @property
    def identical(self) -> bool:
        """Whether all ranks ended with the same bits."""
        return len(set(self.digests)) == 1


class Progress:
    """Shows the steps of one run: in place on a terminal, else as occasional lines."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.in_place = stream.isatty() and not env.dumb_terminal()
        self.drawn = False

    def show(self, record: TrainingRecord) -> None:
        """Draw the state after the newest step."""
        now = record.steps[-1]
        text = progress_text(record)
        if self.in_place:
            width = shutil.get_terminal_size().columns
            self._write(CLEAR_LINE + text[: width - 1])
            self.drawn = True
        elif now["step"] % max(LINE_EVERY_STEPS, now["steps"] // LINES) == 0 or now["step"] in (
            1,
            now["steps"],
        ):
            self.line(text)

    def line(self, text: str) -> None:
        """Write a line that stays; the progress line moves below it."""
        self.clear()
        self._write(text + "\n")

    def clear(self) -> None:
        """Remove the progress line."""
        if self.drawn:
            self._write(CLEAR_LINE)
            self.drawn = False

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


def progress_text(record: TrainingRecord) -> str:
    """One line on the progress of a run, averaged over the last steps; at most 80 columns."""
    recent = record.steps[-SMOOTHED_STEPS:]
    step_s, loss, nbytes = (fmean(step[name] for step in recent) for name in ("step_s", "loss", "nbytes"))
    share = fmean(step["exposed_s"] for step in recent) / step_s
    return (
        f"{record.name:<7} {recent[-1]['step']:>4}/{recent[-1]['steps']}"
        f" loss {loss:.3f}"
        f" {record.tokens_per_step / step_s / 1e3:5.1f} kB/s"
        f"  all-reduce {nbytes / step_s / 1e6:5.1f} MB/s, {share:3.0%} of time"
    )


def comparison(runs: Sequence[TrainingRecord]) -> str:
    """The table at the end, one column per run, and the difference of the losses."""
    common = min(len(run.losses) for run in runs)
    rows = [
        ("", *(run.name for run in runs)),
        ("steps", *(str(len(run.losses)) for run in runs)),
        ("step time, median", *(_ms(run.median_of("step_s")) for run in runs)),
        ("  kept waiting by communication", *(_ms_and_share(run, "exposed_s") for run in runs)),
        ("  all-reduce under way", *(_ms_and_share(run, "in_flight_s") for run in runs)),
        ("gradients reduced, per rank", *(_rate(run) for run in runs)),
        ("processors, share used by others", *(_share(run.others_cpu) for run in runs)),
        (f"loss after {common} steps, nats/byte", *(f"{run.loss_after(common):.4f}" for run in runs)),
        ("parameters equal on all ranks", *("yes, every bit" if run.identical else "NO" for run in runs)),
    ]
    lines = [f"{row[0]:<34}" + "".join(f"{cell:>20}" for cell in row[1:]) for row in rows]
    if len(runs) > 1:
        lines += ["", difference(runs[0], runs[1])]
    return "\n".join(lines)


def difference(first: TrainingRecord, second: TrainingRecord) -> str:
    """A line on the largest difference between two runs' losses.

    Both have the same initial weights and the same data. The sums of the gradients differ in the last bit,
    because the ranks' contributions are added in another order, and training amplifies that.
    """
    gaps = [abs(a - b) for a, b in zip(first.losses, second.losses, strict=False)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    few = min(FEW_STEPS, len(gaps))
    early = f"{max(gaps[:few]):.1e} in the first {few} steps"
    overall = f"{gaps[worst]:.1e} in all {len(gaps)} (at step {worst + 1})"
    return f"largest difference in loss, {first.name} to {second.name}: {early}, {overall}"


def printable(text: str) -> str:
    """Generated text with its indentation, and without control characters.

    Example: "\\ta\\x1b[2Jb\\n" -> "    a.[2Jb\\n".
    """
    return "".join(char if char.isprintable() or char == "\n" else "." for char in text.expandtabs(4))


def _share(share: float | None) -> str:
    return "not known" if share is None else f"{share:.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _ms_and_share(run: TrainingRecord, name: str) -> str:
    seconds = run.median_of(name)
    return f"{_ms(seconds)} ({seconds / run.median_of('step_s'):.0%})"


def _rate(run: TrainingRecord) -> str:
    return f"{run.median_of('nbytes') / run.median_of('step_s') / 1e6:.1f} MB/s"
