"""Many short cases of a test in one item, each with its own result.

`each` has the arguments of `pytest.mark.parametrize`. Use it for independent cases of some milliseconds. Use
parametrize where a case takes long, or needs fixtures of its own.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

Case = dict[str, Any]
Test = Callable[..., None]


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each value, in one item. A failure names its case, and the other cases still run.

    Several on one test make all combinations, as with parametrize.

    Args:
        names: "size", or "size, root", or ("size", "root").
        values: one value, or one tuple, for each case; or a `pytest.param`.
    """
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_case(keys, value) for value in values]
    assert cases, f"there are no cases of {names}"

    def decorate(test: Test) -> Test:
        others = getattr(test, "cases", [{}])
        inner = getattr(test, "inner", test)
        looped = _looped(inner, [one | other for one, other in itertools.product(cases, others)])
        vars(looped)["pytestmark"] = getattr(test, "pytestmark", [])
        return looped

    return decorate


def within(
    name: str, values: Iterable[Any], around: Callable[[Any], AbstractContextManager[Any]], gives: str = ""
) -> Callable[[Test], Test]:
    """Run a test once for each value, in one item, inside the context that `around(value)` makes.

    Write it next to the function, below any `each`.

    Args:
        name: the name of a value in the report of a failure.
        gives: the keys of the dict that the context gives. A test gets those that it has as parameters.
    """
    names = gives.split()

    def decorate(test: Test) -> Test:
        assert not hasattr(test, "cases"), f"write the one of {name} next to the function"
        parameters = inspect.signature(test).parameters

        @functools.wraps(test)
        def surrounded(**arguments: Any) -> None:
            with around(arguments.pop(name)) as given:
                test(**arguments, **{one: given[one] for one in names if one in parameters})

        kept = [one.replace(kind=one.KEYWORD_ONLY) for key, one in parameters.items() if key not in names]
        kept.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        vars(surrounded)["__signature__"] = inspect.Signature(kept)
        return each(name, values)(surrounded)

    return decorate


SPREADS = {"one host": {}, "apart": {"UNISONO_RANKS_PER_HOST": "1"}, "twos": {"UNISONO_RANKS_PER_HOST": "2"}}


def everywhere(test: Test) -> Test:
    """Run a test in one item with all ranks on one host, with one rank per host, and with two per host.

    The fixture `spread` makes an item of each of these: for tests that start processes.
    """
    return within("spread", SPREADS, lambda spread: mock.patch.dict(os.environ, SPREADS[spread]))(test)


def of_two(test: Test) -> Test:
    """Run a test of two ranks, which starts processes, on one host and on two: an item of each."""
    hosts = pytest.mark.parametrize("spread", ["one host", "apart"], indirect=True)
    return pytest.mark.usefixtures("spread")(hosts(test))


def _case(keys: list[str], value: Any) -> Case:
    if isinstance(value, type(pytest.param())):
        assert not value.marks, f"{value} has marks, which only parametrize knows"
        value = value.values[0] if len(keys) == 1 else value.values
    return dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True))


def _looped(test: Test, cases: list[Case]) -> Test:
    @functools.wraps(test)
    def run(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
        for case in cases:
            _run(functools.partial(test, **fixtures, **case), case, subtests)

    parameters = inspect.signature(test).parameters.values()
    fixtures = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters if one.name not in cases[0]]
    fixtures.append(inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY))
    vars(run).update(__signature__=inspect.Signature(fixtures), cases=cases, inner=test)
    return run


def _run(test: Test, case: Case, subtests: pytest.Subtests) -> None:
    """Run a case. Only a failing one becomes a subtest: each costs a report, and a message to xdist."""
    try:
        test()
    except pytest.skip.Exception as skipped:
        with subtests.test(**case):
            raise AssertionError(f"a case of `each` cannot be skipped: {skipped}") from skipped
    except (Exception, pytest.fail.Exception) as error:
        if "pytest-timeout" in str(error):
            raise  # nothing ends the next case in time
        with subtests.test(**case):
            raise
