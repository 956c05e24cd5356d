"""The times of a schedule's actions, predicted or measured; the bubble; pictures as text and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .schedule import Action, StageMessage

if TYPE_CHECKING:
    from .schedule import Schedule

__all__ = ["Span", "Timeline", "predict"]

COLOURS = {"F": "#7aa6c2", "B": "#d98e73", "I": "#d98e73", "W": "#a3b18a"}


class Span(NamedTuple):
    """One action on one rank, from start to end, in seconds."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Timeline:
    """Spans of all ranks of one pipeline."""

    def __init__(self, name: str, ranks: int, spans: Sequence[Span]) -> None:
        self.name, self.ranks, self.spans = name, ranks, list(spans)

    @property
    def span_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of rank-seconds in which no action ran: idle / (ranks * span)."""
        busy = sum(span.end_s - span.start_s for span in self.spans)
        return 1 - busy / (self.ranks * self.span_s)

    def text(self, width: int = 100) -> str:
        """One line for each rank: F as the digit of its micro-batch, backward as a letter, W as "w", idle as
        ".".
        """
        first = min(span.start_s for span in self.spans)
        scale = width / self.span_s
        lines = [["."] * width for _ in range(self.ranks)]
        for span in self.spans:
            columns = range(round((span.start_s - first) * scale), round((span.end_s - first) * scale))
            for column in columns:
                lines[span.rank][column] = _letter(span.action)
        rows = [f"rank {rank} |{''.join(line)}|" for rank, line in enumerate(lines)]
        return "\n".join([*rows, f"{self.name}: bubble {self.bubble:.1%} of {self.span_s:.3g} s"])

    def svg(self, width: int = 900, height: int = 24) -> str:
        """The picture as an SVG document."""
        first = min(span.start_s for span in self.spans)
        scale = width / self.span_s
        boxes = [
            f'<g><title>{span.action}: {span.end_s - span.start_s:.3g} s</title><rect x="{x:.2f}" y="{y}" '
            f'width="{w:.2f}" height="{height - 4}" fill="{COLOURS[span.action.kind]}" stroke="#fff"/>'
            f'<text x="{x + w / 2:.2f}" y="{y + height / 2 + 2}" text-anchor="middle">'
            f"{span.action.micro}</text></g>"
            for span in self.spans
            for x, w, y in [
                ((span.start_s - first) * scale, (span.end_s - span.start_s) * scale, span.rank * height)
            ]
        ]
        caption = f"{self.name}: bubble {self.bubble:.1%} of {self.span_s:.3g} s"
        bottom = self.ranks * height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 20}" font-size="10" '
            f'font-family="sans-serif">{"".join(boxes)}<text x="0" y="{bottom + 14}">{caption}</text></svg>\n'
        )


def _letter(action: Action) -> str:
    if action.kind == "W":
        return "w"
    return str(action.micro % 10) if action.kind == "F" else chr(ord("a") + action.micro % 22)


def predict(
    schedule: Schedule, seconds: Callable[[Action], float] | dict[str, float], message_s: float = 0.0
) -> Timeline:
    """Time `schedule` when each action takes `seconds` and each message between ranks `message_s`.

    Example: 1f1b with p = 2, m = 3, F and B 1 s each: 8 s, bubble 1/4.
    """
    cost = seconds if callable(seconds) else lambda action: seconds[action.kind]
    given: dict[StageMessage, tuple[float, int]] = {}  # its time of arrival, and the rank
    free, at, spans = [0.0] * schedule.ranks, [0] * schedule.ranks, []
    while any(at[rank] < len(order) for rank, order in enumerate(schedule.orders)):
        before = sum(at)
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                message = schedule.needs(action)
                if message is not None and message not in given:
                    break
                ready, source = given[message] if message is not None else (0.0, rank)
                start = max(free[rank], ready + (message_s if source != rank else 0.0))
                free[rank] = start + cost(action)
                spans.append(Span(rank, action, start, free[rank]))
                if handed := schedule.gives(action):
                    given[handed[0]] = (free[rank], rank)
                at[rank] += 1
        if sum(at) == before:
            raise ValueError(f"schedule {schedule.name} deadlocks; prove() says where")
    return Timeline(schedule.name, schedule.ranks, spans)
