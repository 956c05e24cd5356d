"""What plans promise beside the losses. Checks of parallel/run_features.py and others, on two ranks."""

import functools
import importlib
import re
from pathlib import Path

import pytest

import suite
from loops import each
from unisono.parallel import Plan

RANKS = dict.fromkeys(
    ("errors", "meetings", "program_axes", "context_axes", "sequence_axes", "combined_table", "strategies",
     "part_swaps"),
    4,
)  # fmt: skip
ALONE = ("errors", "swaps")  # each check has processes: it ends process groups, or limits a process's memory
SWEPT = (
    "context_axes",
    "context_features",
    "context_masks",
    "context_programs",
    "predictions",
    "sequence_axes",
)
IN_SHORT: dict[str, list[str]] = {
    "compiled": ["check_what_is_refused"],
    "errors": [
        "check_a_pipeline_ends_and_a_new_run_goes_on",
        "check_one_data_rank_ends_the_run",
        "check_ranks_that_raise_at_different_places_end_the_run",
        "check_a_batch_that_one_rank_refuses_ends_the_run",
    ],
    "few_rows": ["check_a_rank_without_rows"],
    "fused_saves": ["check_a_layer_split_twice_keeps_the_names_of_the_model"],
    "meetings": [
        "check_one_local_step_of_sgd_is_data_parallelism",
        "check_replicas_are_equal_after_a_meeting",
        "check_buffers_are_averaged",
        "check_a_save_between_meetings_is_refused",
        "check_wide_parameters_keep_their_bits",
        "check_an_error_in_one_replica_ends_the_run_of_all",
    ],
    "part_swaps": [
        "check_losses_are_those_of_one_process",
        "check_checkpoints_go_between_plans",
        "check_values_are_in_memory_inside_mapped_alone",
    ],
    "plain_copies": ["check_a_plain_copy_has_the_weights", "check_models_that_get_no_weights"],
    "selective": ["check_losses_are_those_of_one_process"],
    "sequences": ["short", "short: no positions"],
    "rank_zero": [
        "check_what_rank_0_alone_does_for_the_model",
        "check_what_rank_0_alone_draws_and_writes",
        "check_a_hostile_checkpoint_runs_nothing",
        "check_all_ranks_load_the_step_of_rank_0",
    ],
    "unfrozen": [
        "check_a_short_training",
        "check_what_cannot_be_followed",
        "check_a_scalar_is_saved_thawed_and_loaded",
        "check_thawing_in_the_middle_is_refused",
        "check_freezing_in_the_middle",
        "check_a_new_run_trains_what_was_frozen",
    ],
}
"""Modules of which only the sweep runs everything -> what runs of them always."""
ELSEWHERE = {
    "chains": "test_parallel_layouts.py",
    "chosen": "test_planning.py",
    "compressed_runs": "test_parallel_compression.py",
    "compressed_units": "test_parallel_compression.py",
    "compression": "test_parallel_compression.py",
    "elastic_calls": "test_parallel_elastic.py",
    "expert_axis": "test_parallel_experts.py",
    "forecasts": "test_parallel_features.py",
    "metas": "test_parallel_meta.py",
}


def modules() -> list[str]:
    """List the modules with checks that no other test runs."""
    texts = {path.stem: path.read_text() for path in (suite.HERE / "parallel").glob("*.py")}
    found = [name for name, text in texts.items() if re.search(r"^def check_|^TABLE", text, re.M)]
    return sorted(set(found) - set(ELSEWHERE))


@functools.cache
def checks_of(module: str) -> list[str]:
    """Name every check and every row in a module of parallel/."""
    text = (suite.HERE / "parallel" / f"{module}.py").read_text()
    rows = importlib.import_module(f"parallel.{module}").TABLE if "\nTABLE" in text else ()
    return [*rows, *re.findall(r"^def (check_\w+)", text, re.MULTILINE)]


COMBINED = checks_of("combined_table")
IN_SHORT["combined_table"] = [check for check in COMBINED if check.startswith("short")]
ON_FOUR_RANKS = {
    "accumulations": ["check_calls_add_up_to_one_batch"],
    "batch_norms": [check for check in checks_of("batch_norms") if check.endswith("on four ranks")],
    "unfrozen": ["check_losses_are_those_of_one_process"],
}
ON_FOUR_RANKS["batch_norms"] += ["check_losses_are_those_of_one_process"]
OF_A_RUN = ["check_recorded_collectives_are_those_of_a_run", "check_a_difference_is_told_once_with_its_cause"]


@pytest.mark.parametrize("module", [module for module in modules() if module not in SWEPT])
def test_every_feature(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    checks = IN_SHORT.get(module, checks_of(module))
    checks = [check for check in checks if not check.endswith("on four ranks")]
    run_checks(forks, tmp_path, module, checks, ranks=RANKS.get(module, 2))


@pytest.mark.sweep
@pytest.mark.parametrize("module", [*SWEPT, *(module for module in IN_SHORT if module != "combined_table")])
def test_every_feature_at_length(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=RANKS.get(module, 2))


@pytest.mark.sweep
@pytest.mark.parametrize("module", ON_FOUR_RANKS)
def test_features_on_four_ranks(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ON_FOUR_RANKS[module], ranks=4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("check", [check for check in COMBINED if not check.startswith("short")])
def test_all_axes_together(forks: suite.Forks, tmp_path: Path, check: str) -> None:
    run_checks(forks, tmp_path, "combined_table", [check], ranks=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_forecasts(forks: suite.Forks, tmp_path: Path, ranks: int) -> None:
    others = [check for check in checks_of("forecasts") if check not in OF_A_RUN]
    run_checks(forks, tmp_path, "forecasts", OF_A_RUN if ranks == 2 else others, ranks=ranks)


def test_checks_that_other_tests_run() -> None:
    for module, test in ELSEWHERE.items():
        assert module in (suite.HERE / test).read_text(), module


def passed(folder: Path, rank: int) -> int:
    """Count the checks that this rank has passed, see parallel/in_turn.py."""
    path = folder / f"passed{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def run_checks(
    forks: suite.Forks, folder: Path, module: str, names: list[str] | None = None, *, ranks: int
) -> None:
    """Run checks of a module, all by default, in one set of processes; after one that fails in a new set."""
    left = checks_of(module) if names is None else list(names)
    failures = []
    while left:
        job = left[:1] if module in ALONE else left
        title = f"{module} {job[0]}"  # of its folder: two modules may have a check of one name
        what = {title: ("parallel.in_turn", ranks, [module, *job])}
        printed = forks.run(folder, what)[title]
        done = min(passed(folder / title, rank) for rank in range(ranks))
        if any("(ended with" in text for text in printed):
            failures += [f"{module}: {' '.join(job[done : done + 1]) or 'after all checks'}", *printed]
            done = min(done + 1, len(job))
        left = left[done:]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)


@pytest.mark.slow
@pytest.mark.sweep  # a busy machine idles between actions, too
@pytest.mark.parametrize("ranks", [2, 4])
def test_measured_bubbles_are_the_formulas(forks: suite.Forks, tmp_path: Path, ranks: int) -> None:
    printed = forks.run(tmp_path, {"bubbles": ("parallel.bubbles", ranks, [])})["bubbles"]
    print(printed[0])
    if any("(ended with" in text for text in printed):
        pytest.fail("\n".join(printed), pytrace=False)


@each(
    ("plan", "says"),
    [
        ({"data": 0}, "data is 0"),
        ({"sequence": True}, "sequence=True cuts sequences over the tensor ranks"),
        ({"tensor": 2, "sequence": 1}, "sequence is 1, expected bool"),
        ({"zero": 4}, "zero is 4; it must be one of 0, 1, 2, 3"),
        ({"data": 4, "zero": 1, "shard": 3}, "4 data ranks cannot be cut into groups of shard=3"),
        ({"data": 4, "shard": 2}, "shards nothing"),
        ({"pipeline": 2, "schedule": "zbv", "zero": 2}, "use zero=1, or schedule 1f1b"),
        ({"pipeline": 2, "schedule": "zb-h1", "recompute": True}, "use 1f1b with recompute"),
        ({"pipeline": 2, "stages_per_rank": 2}, "1f1b has 1 stage on each rank"),
        ({"pipeline": 2, "cuts": (3, 2)}, "must be 1 growing numbers"),
        ({"pipeline": 2, "cuts": (0,)}, "leaves the first stage no piece"),
        ({"pipeline": 2, "cuts": (1.5,)}, "expected a tuple of int"),
        ({"pipeline": 2, "cuts": 3}, "cuts is 3, expected a tuple of int"),
        ({"data": 2.0}, "data is 2.0, expected int"),
        ({"data": "2"}, "data is '2', expected int"),
        ({"zero": True}, "zero is True, expected int"),
        ({"micro_batches": float("nan")}, "micro_batches is nan, expected int"),
        ({"data": 4, "zero": 1, "shard": 2.0}, "shard is 2.0, expected int or None"),
        ({"local_steps": 2}, "needs two replicas at least: data=1"),
        ({"data": 2, "local_steps": 0}, "local_steps is 0; it must be at least 1"),
        ({"data": 2, "local_steps": True}, "local_steps is True, expected int or None"),
        ({"data": 2, "local_steps": 2, "zero": 1}, "zero=1 without shard= makes one of all data ranks"),
        (
            {"data": 2, "local_steps": 2, "outer": "adam"},
            "outer is 'adam'; it must be one of 'average', 'nest",
        ),
        ({"data": 2, "local_steps": 2, "outer": ["average"]}, r"outer is \['average'\]; it must be one of"),
        ({"recompute": "no"}, "recompute is 'no', expected True, False or 'selective'"),
        ({"clip": "1"}, "clip is '1', expected float or None"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"swap": 3}, "swap is 3, expected 'disk'"),
        ({"pipeline": 2, "schedule": "zb-h1", "swap": "disk"}, "swap='disk' brings no parameters back"),
        ({"context": 0}, "context is 0; it must be at least 1"),
        ({"context": "2"}, "context is '2', expected int"),
        ({"expert": 0}, "expert is 0; it must be at least 1"),
        ({"expert": 2.0}, "expert is 2.0, expected int"),
        ({"data": 3, "expert": 2}, "expert=2 does not divide data=3"),
        ({"expert": 2}, "expert=2 does not divide data=1"),
        ({"data": 2, "context": 2, "expert": 3}, "expert=3 does not divide data=2 x context=2"),
        (
            {"data": 6, "expert": 3, "zero": 1, "shard": 2},
            "neither of shard=2 and expert=3 divides the other",
        ),
    ],
)
def test_illegal_plans_say_why(plan: dict, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        Plan(**plan)


def test_a_plan_says_what_differs() -> None:
    assert str(Plan(data=2, zero=1)) == "Plan(data=2, zero=1)"
    assert Plan(data=2, tensor=3, pipeline=4).ranks == 24
