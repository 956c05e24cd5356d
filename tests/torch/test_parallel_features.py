"""What plans promise beside the losses. Checks of parallel/run_features.py and others, on two ranks."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import suite
from loops import each
from unisono.parallel import Plan

MODULES = ("run_features", "backwards", "swaps", "errors", "refusals", "refused_calls")
MODULES += ("tensor_cuts", "model_traces", "outside_programs", "program_stages")
TABLES = ("tensor_table", "hugging_face_table", "model_table", "parameter_table", "structure_table")
TABLES += ("stage_table", "gradient_table", "call_table")
MODULES += (
    "outside_steps",
    "partial_writes",
    "rank_zero",
    "frozen",
    "kept_buffers",
    "masks",
    "cut_optimizers",
    "weights",
    "contexts",
    "new_groups",
)
LOOP = ("accumulations", "averages", "batch_norms", "kept_f32", "own_losses", "resumed", "utilization")
LOOP += ("batch_kinds", "autocasts", "loaders", "optimizer_scopes", "loss_means")
STAGES = ("fused_saves", "program_axes")


# Each of their checks has processes of its own: they end process groups, or limit the memory of a process.
ALONE = ("errors", "swaps")


def checks_of(module: str) -> list[str]:
    """Name every check and every row in a module of parallel/."""
    text = (suite.HERE / "parallel" / f"{module}.py").read_text()
    checks = [one.name for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    rows = importlib.import_module(f"parallel.{module}").TABLE if "\nTABLE" in text else ()
    return [*rows, *(name for name in checks if name.startswith("check_"))]


@pytest.mark.parametrize("module", [*TABLES, *MODULES])
def test_every_feature(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=4 if module == "errors" else 2)


@pytest.mark.parametrize("module", LOOP)
def test_the_loop(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    checks = [check for check in checks_of(module) if check not in ON_FOUR_RANKS]
    run_checks(forks, tmp_path, module, checks, ranks=2)


OF_A_RUN = [
    "check_recorded_collectives_are_those_of_a_run",
    "check_a_difference_is_told_once_with_its_cause",
]


@each(
    ("module", "checks", "ranks"),
    [
        ("forecasts", OF_A_RUN, 2),
        ("forecasts", [check for check in checks_of("forecasts") if check not in OF_A_RUN], 1),
    ],
)
def test_forecasts(forks: suite.Forks, tmp_path: Path, module: str, checks: list[str], ranks: int) -> None:
    run_checks(forks, tmp_path, module, checks, ranks=ranks)


@each(
    ("module", "checks"),
    [
        ("unfrozen", ["check_a_short_training", "check_what_cannot_be_followed"]),
        ("plain_copies", ["check_a_plain_copy_has_the_weights", "check_models_that_get_no_weights"]),
        ("few_rows", ["check_a_rank_without_rows"]),
    ],
)
def test_freezing_and_copies(forks: suite.Forks, tmp_path: Path, module: str, checks: list[str]) -> None:
    run_checks(forks, tmp_path, module, checks, ranks=2)


@pytest.mark.sweep
@each("module", ["unfrozen", "plain_copies", "few_rows"])
def test_freezing_and_copies_at_length(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=2)


@each("module", ["meetings"])
def test_replicas_that_meet(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=4)


@pytest.mark.sweep
@each("module", ["context_features", "context_masks", "context_programs", "context_axes"])
def test_sequences_that_are_cut(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=4 if module == "context_axes" else 2)


COMBINED = checks_of("combined_table")
SHORT = [check for check in COMBINED if check.startswith("short")]


def test_axes_together(forks: suite.Forks, tmp_path: Path) -> None:
    run_checks(forks, tmp_path, "combined_table", SHORT, ranks=4)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("check", [check for check in COMBINED if check not in SHORT])
def test_all_axes_together(forks: suite.Forks, tmp_path: Path, check: str) -> None:
    run_checks(forks, tmp_path, "combined_table", [check], ranks=4)


@pytest.mark.parametrize("module", STAGES)
def test_stages_of_a_program(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=4 if module == "program_axes" else 2)


ON_FOUR_RANKS = [check for check in checks_of("batch_norms") if check.endswith("on four ranks")]


@pytest.mark.sweep
@each(
    ("module", "checks"),
    [
        ("accumulations", ["check_calls_add_up_to_one_batch"]),
        ("batch_norms", ["check_losses_are_those_of_one_process", *ON_FOUR_RANKS]),
        ("unfrozen", ["check_losses_are_those_of_one_process"]),
    ],
)
def test_the_loop_on_four_ranks(forks: suite.Forks, tmp_path: Path, module: str, checks: list[str]) -> None:
    run_checks(forks, tmp_path, module, checks, ranks=4)


@each(
    ("module", "check"),
    [("selective", "check_losses_are_those_of_one_process"), ("compiled", "check_what_is_refused")],
)
def test_what_the_sweep_does_at_length(forks: suite.Forks, tmp_path: Path, module: str, check: str) -> None:
    run_checks(forks, tmp_path, module, [check], ranks=2)


@pytest.mark.sweep
@each("module", ["predictions", "selective", "compiled"])
def test_what_comes_out(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=2)


def test_sequences_that_tensor_ranks_share(forks: suite.Forks, tmp_path: Path) -> None:
    run_checks(forks, tmp_path, "sequences", ["short", "short: no positions"], ranks=2)


@pytest.mark.sweep
@each("module", ["sequences", "sequence_axes"])
def test_sequences_with_everything_else(forks: suite.Forks, tmp_path: Path, module: str) -> None:
    run_checks(forks, tmp_path, module, ranks=4 if module == "sequence_axes" else 2)


ELSEWHERE = {
    "chains": "test_parallel_layouts.py",
    "chosen": "test_planning.py",
    "compressed_runs": "test_parallel_compression.py",
    "compression": "test_parallel_compression.py",
    "elastic_places": "test_parallel_elastic.py",
    "elastic_refusals": "test_parallel_elastic.py",
    "expert_axis": "test_parallel_experts.py",
    "metas": "test_parallel_meta.py",
}


def test_every_module_of_checks_is_run() -> None:
    """A list of modules that no test uses runs nothing."""
    folder = suite.HERE / "parallel"
    modules = {
        path.stem for path in folder.glob("*.py") if re.search(r"^def check_|^TABLE", path.read_text(), re.M)
    }
    run = {
        case["module"]
        for test in globals().values()
        for case in getattr(test, "cases", ())
        if "module" in case
    }
    run |= {*TABLES, *MODULES, *LOOP, *STAGES, "combined_table"}
    assert modules - run == set(ELSEWHERE)
    for module, test in ELSEWHERE.items():
        assert module in (suite.HERE / test).read_text(), module


def passed(folder: Path, rank: int) -> int:
    """Count the checks that this rank has passed, see parallel/in_turn.py."""
    path = folder / f"passed{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def run_checks(
    forks: suite.Forks,
    folder: Path,
    module: str,
    names: list[str] | None = None,
    *,
    ranks: int,
) -> None:
    """Run checks of a module, all by default, in one set of processes; after one that fails in a new set."""
    left = checks_of(module) if names is None else list(names)
    failures = []
    while left:
        job = left[:1] if module in ALONE else left
        title = f"{module} {job[0]}"  # of its folder: two modules may have a check of one name
        what = {title: ("parallel.in_turn", ranks, [module, *job])}
        printed = forks.run(
            folder,
            what,
        )[title]
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
        ({"tensor": 2, "swap": "disk"}, "swap='disk' needs tensor=1, not 2: parts of matrices"),
        ({"context": 0}, "context is 0; it must be at least 1"),
        ({"context": "2"}, "context is '2', expected int"),
    ],
)
def test_illegal_plans_say_why(plan: dict, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        Plan(**plan)


def test_a_plan_says_what_differs() -> None:
    assert str(Plan(data=2, zero=1)) == "Plan(data=2, zero=1)"
    assert Plan(data=2, tensor=3, pipeline=4).ranks == 24


def test_a_run_that_nothing_refers_to_is_freed(forks: suite.Forks, tmp_path: Path) -> None:
    for printed in forks.run(tmp_path, {"freed": ("parallel.freed", 2, [])})["freed"]:
        assert "fine" in printed, printed
