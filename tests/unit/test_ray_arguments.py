"""`unisono.ray` without Ray: what is wrong with the arguments is said before Ray is looked for."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import unisono.ray
from loops import each
from unisono.errors import RendezvousError


def train(world: Any) -> None:
    raise AssertionError("nothing is to be started")


@each(
    ("arguments", "error", "text"),
    [
        ({"fn": 3}, TypeError, "fn is a int, expected a function"),
        ({"num_workers": 0}, ValueError, "num_workers is 0, expected 1.."),
        ({"num_workers": 1.5}, TypeError, "num_workers is 1.5, expected a whole number"),
        ({"args": 3}, TypeError, "args is a int, expected a list"),
        ({"kwargs": [1]}, TypeError, "kwargs is a list, expected Mapping"),
        ({"num_cpus": -1}, ValueError, "a worker's CPU is -1, expected a number from 0"),
        ({"num_gpus": float("inf")}, ValueError, "a worker's GPU is inf"),
        ({"num_gpus": True}, ValueError, "a worker's GPU is True"),
        ({"num_cpus": 0}, ValueError, "needs no resource at all"),
        ({"resources": {"CPU": 2}}, ValueError, "resources names CPU: give num_cpus instead"),
        ({"resources": {"disk": "2"}}, ValueError, "a worker's disk is '2'"),
        ({"placement_strategy": "NEAR"}, ValueError, "'NEAR', expected one of PACK, SPREAD"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"runtime_env": "x"}, TypeError, "runtime_env is a str, expected Mapping"),
        ({"reproducible": 1}, TypeError, "reproducible is a int, expected True or False"),
    ],
)
def test_run(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        unisono.ray.run(**{"fn": train, "num_workers": 2, **arguments})


@each(
    ("arguments", "error", "text"),
    [
        ({"name": ""}, ValueError, "name is empty"),
        ({"name": 3}, TypeError, "name is a int"),
        ({"rank": 2}, ValueError, "rank is 2, expected 0..1"),
        ({"rank": -1}, ValueError, "rank is -1"),
        ({"world_size": 0}, ValueError, "world_size is 0"),
        ({"timeout": "x"}, TypeError, "timeout"),
    ],
)
def test_join(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {"name": "learners", "rank": 0, "world_size": 2, **arguments}
    name = given.pop("name")
    with pytest.raises(error, match=text):
        unisono.ray.join(name, **given)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ray on a cluster of two CPUs, none of which becomes free; which bundles were given back."""
    given_back: list[str] = []
    bundles = SimpleNamespace(wait=lambda timeout_s: False)
    util = SimpleNamespace(
        placement_group=lambda needs, strategy: bundles,
        remove_placement_group=lambda group: given_back.append("ours" if group is bundles else "another"),
    )
    ray = SimpleNamespace(
        util=util,
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2.0, "memory": 1e9},
        available_resources=lambda: {"CPU": 0.0, "memory": 1e9},
    )
    for name, module in (("ray", ray), ("ray.util", util), ("ray.util.scheduling_strategies", util)):
        monkeypatch.setitem(sys.modules, name, module)
    return given_back


def test_a_placement_group_has_a_bundle_for_every_worker(removed: list[str]) -> None:
    with pytest.raises(TypeError, match="placement_group is a int, expected one of Ray's"):
        unisono.ray.run(train, 2, placement_group=3)
    one = SimpleNamespace(bundle_specs=[{"CPU": 1}])
    with pytest.raises(ValueError, match="placement_group has 1 bundles, expected one for each of 2"):
        unisono.ray.run(train, 2, placement_group=one)
    assert removed == []


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"unisono.ray needs Ray: pip install 'unisono\[ray\]'"):
        unisono.ray.run(train, 2)
    with pytest.raises(ImportError, match="needs Ray"):
        unisono.ray.join("learners", rank=0, world_size=2)


def test_a_cluster_that_is_too_small_is_told_at_once(removed: list[str]) -> None:
    full = "no room for 2 workers .* within 300 s.*the cluster has {'CPU': 2.0}.*{'CPU': 0.0} are free"
    with pytest.raises(RendezvousError, match=full):  # a warning would be an error: 2 CPU are enough
        unisono.ray.run(train, 2, timeout=300)
    with (
        pytest.warns(RuntimeWarning, match="4 workers need 4 CPU, the cluster has 2: waiting up to 300 s"),
        pytest.raises(RendezvousError, match="no room for 4 workers"),
    ):
        unisono.ray.run(train, 4, timeout=300)
    assert removed == ["ours", "ours"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("GetTimeoutError", "Ray has not started the actor where they meet"),
        ("RayError", "others gave up earlier"),
    ],
)
def test_without_an_answer_no_rank_is_called_missing(
    monkeypatch: pytest.MonkeyPatch, error: str, text: str
) -> None:
    """The actor where ranks meet had not begun, and the text said that others had given up."""
    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    for name in ("GetTimeoutError", "ActorDiedError", "ActorUnavailableError"):
        setattr(exceptions, name, type(name, (exceptions.RayError,), {}))
    answers = iter([exceptions.GetTimeoutError(), getattr(exceptions, error)()])

    def get(*_: object, **__: object) -> None:
        raise next(answers)

    board = MagicMock()
    ray = SimpleNamespace(
        remote=lambda _: board, get=get, exceptions=exceptions, is_initialized=lambda: True, util=MagicMock()
    )
    for name, module in (("ray", ray), ("ray.util", ray.util), ("ray.util.scheduling_strategies", ray.util)):
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RendezvousError, match=text) as raised:
        unisono.ray.join("learners", rank=1, world_size=2, timeout=0.01)
    assert raised.value.missing == ()
