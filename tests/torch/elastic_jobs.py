"""Jobs of elastic training that tests run, and what they check of each."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import suite
from launching import Launcher, launching
from parallel.elastic_training import BATCH, PER_EPOCH, SAMPLES, logs

JOB = suite.HERE / "programs" / "elastic_job.py"


@contextlib.contextmanager
def elastic_launching(folder: Path) -> Iterator[Launcher]:
    """A launcher whose programs import what is beside this file."""
    with launching(folder) as made:
        paths = [str(suite.HERE), made.environ["PYTHONPATH"]]
        made.environ["PYTHONPATH"] = os.pathsep.join(paths)
        yield made


class Job:
    """What the processes of a job have written."""

    def __init__(self, folder: Path, output: str) -> None:
        self.folder, self.output = folder, output
        self.logs = logs(folder)

    def kept(self, key: str) -> list[dict[str, Any]]:
        return [line for log in self.logs for line in log if key in line]

    def changes(self) -> list[dict[str, Any]]:
        """Each change once; those who saw it have seen the same."""
        found = max(([line for line in log if "change" in line] for log in self.logs), key=len)
        assert all(line in found for line in self.kept("change"))
        return found

    def losses(self) -> dict[int, tuple[float, str]]:
        """The loss of each step, and the state after it: the same on all ranks."""
        found: dict[int, tuple[float, str]] = {}
        # others may have had a step that did not count
        ended = [log for log in self.logs if log and "done" in log[-1]]
        states: dict[int, str] = {}
        for line in (line for log in ended for line in log if "random" in line):
            assert states.setdefault(line["step_of_state"], line["random"]) == line["random"], line
        for line in (line for log in ended for line in log if "loss" in line):
            one = line["loss"], line["digest"]
            assert found.setdefault(line["step"], one) == one, (line, found[line["step"]])
        return found

    def check_samples(self, *, undone: bool = False) -> None:
        """Each sample of an epoch is in one step that was completed, once.

        Args:
            undone: an update counts only if no later one of the same step has taken its place.
        """
        steps = len(self.losses())
        epoch: Counter[int] = Counter()
        for step in range(1, steps + 1):
            attempts = {line["generation"] for line in self.kept("update") if line["update"] == step}
            assert undone or len(attempts) == 1, f"step {step} was updated in generations {attempts}"
            generation = max(attempts)
            samples = Counter(
                sample
                for line in self.kept("attempt")
                if (line["attempt"], line["generation"]) == (step, generation)
                for sample in line["samples"]
            )
            assert samples.total() == BATCH, (step, samples)
            epoch += samples
            if step % PER_EPOCH == 0:
                assert epoch == Counter(range(SAMPLES))
                epoch.clear()


def run_job(launcher: Launcher, *args: str, flags: tuple[str, ...] = ()) -> Job:
    folder = launcher.folder / "job"
    folder.mkdir()
    ranks = args[0]
    found = launcher.run(JOB, "--elastic", f"1:{ranks}", *flags, args=(str(folder), *args))
    assert found.returncode == 0, found.stdout + found.stderr
    return Job(folder, found.stdout + found.stderr)


def run_forks(forks: suite.Forks, folder: Path, *args: str, left: int, plan: Any, **environ: Any) -> Job:
    """The same of ranks that no launcher replaces, of which `left` end well."""
    place, ranks = folder / "job", folder / "ranks"
    place.mkdir()
    ranks.mkdir()
    size = int(args[0])
    environ |= {"PLAN": json.dumps({**plan})}
    printed = forks.run_program(ranks, size, JOB, str(place), *args, dead=size - left, **environ)
    return Job(place, "".join(printed))


def check_truth(forks: suite.Forks, job: Job, *, tolerance: float | None = None, **plan: Any) -> None:
    """After each change losses and states equal those of a run begun with its ranks, on one host.

    Args:
        tolerance: of losses; None: all are equal bit for bit.
    """
    changes = job.changes()
    ends = [*(change["steps"] for change in changes[1:]), len(job.losses())]
    for change, until in zip(changes, ends, strict=True):
        if change["state"] > 0 and until > change["steps"]:  # otherwise no checkpoint has it
            check_stretch(forks, job, change, until, tolerance, plan)


def check_stretch(
    forks: suite.Forks, job: Job, change: dict[str, Any], until: int, tolerance: float | None, plan: Any
) -> None:
    """Compare the steps after a change, up to another step, see `check_truth`."""
    losses, state, after = job.losses(), change["state"], change["steps"]
    name = f"from-{state}-{after}"
    arguments = [str(job.folder), str(state), str(until), json.dumps(plan)]
    what = {name: ("parallel.elastic_training", change["size"], arguments)}
    printed = forks.run(job.folder.parent, what)[name]
    again = logs(job.folder.parent / name)
    assert len(again) == change["size"], "\n".join(printed)
    for lines in again:
        assert [one["step"] for one in lines] == [*range(state + 1, until + 1)]
        for one in lines:
            ours, truth = losses[one["step"]], (one["loss"], one["digest"])
            close = tolerance is not None and abs(ours[0] - truth[0]) < tolerance
            assert one["step"] <= after or ours == truth or close, (one["step"], ours, truth, printed)


CASES = suite.HERE / "programs" / "elastic_cases.py"


def steps(launcher: Launcher, name: str, ranks: int, *more: str, flags: tuple[str, ...] = ()) -> list[Any]:
    """What all ranks have printed after each step, which is the same on all of them; then the other lines."""
    found = launcher.run(CASES, "--elastic", f"1:{ranks}", *flags, args=(name, str(ranks), *more))
    output = found.stdout + found.stderr
    assert found.returncode == 0, output
    return told_in(output)


def steps_of_forks(
    forks: suite.Forks, folder: Path, name: str, *more: str, dead: int = 0, **plan: Any
) -> Any:
    """The same of two ranks that no launcher replaces; `dead`: of them."""
    folder.mkdir()
    environ = {"PLAN": json.dumps(plan)}
    return told_in("".join(forks.run_program(folder, 2, CASES, name, "2", *more, dead=dead, **environ)))


def told_in(output: str) -> list[Any]:
    lines = [line[line.index("{") :] for line in output.splitlines() if '"step"' in line]
    told: dict[int, Any] = {}
    for one in map(json.loads, lines):
        assert told.setdefault(one["step"], one) == one, output
    assert [*sorted(told)] == [*range(1, len(told) + 1)]
    return [[told[step] for step in sorted(told)], output]
