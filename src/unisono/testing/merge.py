"""One report of a test from those of its ranks: causes in full, consequences in a line, equal ones once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

MOST_SHOWN = 4
"""The most different failures that are shown in full."""


class RankResult(NamedTuple):
    """How a test ended on one rank.

    Attributes:
        reports: pytest's.  printed: on stdout and stderr.
        missing: why the rank could not begin it.
        died: how the rank ended in it.
        hung: it did not end, and was killed: "limit" at the test's limit, "grace" because another one failed.
        stacks: where it then was.
        leave: what ends the whole session.
    """

    rank: int
    pid: int
    reports: list[Any] = []  # noqa: RUF012  (never changed)
    warnings: list[dict[str, Any]] = []  # noqa: RUF012
    printed: str = ""
    missing: str = ""
    died: str = ""
    hung: str = ""
    stacks: str = ""
    leave: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing has gone wrong here, and nothing was skipped."""
        return not self.died and not self.missing and all(report.passed for report in self.reports)


class _Failure(NamedTuple):
    """Why one rank failed. Failures are alike if their `key` is equal."""

    where: str
    key: object
    headline: str
    chain: list[Any]
    crash: ReprFileLocation | None = None


def merged(item: pytest.Item, outcomes: list[RankResult]) -> list[pytest.TestReport]:
    """The reports of a test, one for each phase, and for each subtest that failed somewhere."""
    phases: dict[tuple[str, str], list[tuple[RankResult, Any]]] = defaultdict(list)
    ended = [one for one in outcomes if one.died or one.missing]
    # A rank that has died may have let the set-up of another fail: that is one failure.
    in_setup = any(report.failed and report.when == "setup" for one in outcomes for report in one.reports)
    end = "setup" if in_setup else "call", ""
    if ended:
        phases[end] = []
    for one in outcomes:
        for report in one.reports:
            phases[report.when, str(getattr(report, "context", ""))].append((one, report))
    order = ("setup", "call", "teardown")
    made: list[pytest.TestReport] = []
    for when, context in sorted(phases, key=lambda phase: (order.index(phase[0]), not phase[1])):
        dead = ended if (when, context) == end else []
        report, has_cause = _report(item, when, phases[when, context], dead, outcomes)
        if not has_cause and when == "teardown" and not all(each.passed for each in made):
            report.outcome, report.longrepr = "passed", None  # what failed here follows from that
        if has_cause or when != "call" or not any(each.when == "setup" and not each.passed for each in made):
            made.append(report)
    parts = sum(1 for each in made if each.failed and hasattr(each, "context"))
    if parts and (whole := made[-2 if made[-1].when == "teardown" else -1]).passed:
        whole.outcome, whole.longrepr = "failed", f"contains {parts} failed subtest{'s' if parts > 1 else ''}"
    return made


def _report(
    item: pytest.Item,
    when: Any,
    found: list[tuple[RankResult, Any]],
    dead: list[RankResult],
    all_: list[RankResult],
) -> tuple[pytest.TestReport, bool]:
    """One report, and whether a rank has failed in this phase by itself. A failure comes before a skip."""
    size = len(all_)
    xfailed = [report for _, report in found if report.skipped and hasattr(report, "wasxfail")]
    skipped = [(one, report) for one, report in found if report.skipped and not hasattr(report, "wasxfail")]
    causes = [_of_end(one, size) for one in dead if one.hung == "limit"]
    causes += [_of_end(one, size) for one in dead if not one.hung]
    follow: list[_Failure] = []
    for one, report in found:
        if report.failed and not (xfailed and "[XPASS(strict)]" in str(report.longrepr)):
            follows = getattr(report, "consequence", False)
            (follow if follows else causes).append(_of_report(one, report, size))
    late = [_of_end(one, size) for one in dead if one.hung == "grace"]
    outcome: Any = "passed"
    longrepr: Any = None
    if not causes and (xfailed or skipped):
        outcome, longrepr = "skipped", xfailed[0].longrepr if xfailed else _reason(skipped, size)
    elif causes or late or follow:
        outcome, longrepr = "failed", _longrepr(causes + late or follow, follow if causes + late else [])
    said = [tuple(pair) for _, report in found for pair in report.user_properties]
    made = (type(found[0][1]) if found else pytest.TestReport)(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=longrepr,
        when=when,
        sections=_sections(found, all_) if outcome == "failed" or when == "call" else [],
        duration=max((report.duration for _, report in found), default=0.0),
        start=min((report.start for _, report in found), default=0.0),
        stop=max((report.stop for _, report in found), default=0.0),
        user_properties=[pair for number, pair in enumerate(said) if pair not in said[:number]],
    )
    for name in ("context", "wasxfail"):
        values = [getattr(report, name) for _, report in found if hasattr(report, name)]
        if values and (name == "context" or outcome != "failed"):
            setattr(made, name, values[0])
    return made, bool(causes)


def _reason(skipped: list[tuple[RankResult, Any]], size: int) -> Any:
    """Where and why the first of these ranks has skipped the test."""
    one, report = skipped[0]
    path, line, reason = report.longrepr
    return path, line, f"{reason} (rank {one.rank} of {size})" if len(skipped) < size else reason


def _of_report(one: RankResult, report: Any, size: int) -> _Failure:
    where = f"rank {one.rank} of {size} (pid {one.pid})"
    longrepr, crash = report.longrepr, getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        text = str(longrepr).strip("\n")
        headline = text.partition("\n")[0] if report.when != "call" else text.rpartition("\n")[2]
        return _Failure(where, text, headline, [_text(text + "\n")])
    chain = list(getattr(longrepr, "chain", None) or [(longrepr.reprtraceback, crash, None)])
    key = getattr(report, "fault", "") or (crash.path, crash.lineno, crash.message)
    return _Failure(where, key, crash.message.partition("\n")[0], chain, crash)


def _of_end(one: RankResult, size: int) -> _Failure:
    stacks = f"Its stacks then:\n{one.stacks or '(it wrote none)'}\n" if one.hung else ""
    text = f"{one.missing}\n" if one.missing else stacks
    where = f"rank {one.rank} of {size} (pid {one.pid})"
    return _Failure(
        where,
        (one.died, text),
        one.died or one.missing.strip().rpartition("\n")[2].removeprefix("E ").strip(),
        [_text(text)],
    )


def _longrepr(causes: list[_Failure], follow: list[_Failure]) -> ExceptionChainRepr:
    """Of causes that are alike, the first in full."""
    alike: dict[object, list[_Failure]] = defaultdict(list)
    for cause in causes:
        alike[cause.key].append(cause)
    chain: list[Any] = []
    for number, same in enumerate(alike.values()):
        others = f"; likewise {', '.join(each.where for each in same[1:])}" if same[1:] else ""
        chain.append(_text(f"\n=== {same[0].where}: {same[0].headline}{others}\n"))
        chain += same[0].chain if number < MOST_SHOWN else []
    lines = [f"=== {each.where} then failed, too: {each.headline}\n" for each in follow]
    first = causes[0]
    message = f"{first.where.partition(' (')[0]}: {first.headline}"
    crash = ReprFileLocation(
        *((first.crash.path, first.crash.lineno) if first.crash is not None else ("", 0)), message
    )
    return ExceptionChainRepr([*chain, (_text("\n" + "".join(lines))[0], crash, None)])


def _text(text: str) -> tuple[ReprTraceback, None, None]:
    return ReprTraceback([ReprEntryNative([text])], None, "native"), None, None


def _sections(found: list[tuple[RankResult, Any]], all_: list[RankResult]) -> list[tuple[str, str]]:
    """What ranks printed, and what pytest's plugins have kept of each, such as logs."""
    sections = [(f"Captured output of rank {one.rank} (stdout, stderr)", one.printed) for one in all_]
    for one, report in found:
        sections += [(f"{name} of rank {one.rank}", text) for name, text in report.sections]
    return [(name, text) for name, text in sections if text]
