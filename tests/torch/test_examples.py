"""Every program in examples/: it asserts what it shows, here with few processes."""

import importlib.util
from pathlib import Path

import pytest

import suite
from effort import cases
from ports import reserved

EXAMPLES = suite.HERE.parents[1] / "examples"
LINES = 80
SHARED = {"plan_trainer.py", "timeline.py", "transformer.py"}
ELSEWHERE = {  # they need the launcher, or pytest
    "elastic_training.py": "test_parallel_elastic.py",
    "ddp_survives.py": "test_replicas_survive.py",
    "fsdp2_survives.py": "test_replicas_survive.py",
    "publish.py": "test_published_arrays.py",
    "test_on_ranks.py": "test_pytest_ranks.py",
}
# program, ranks, arguments; and a text that rank 0 or the last rank prints
RUNS = [
    ("ddp.py", 2, ["--epochs", "1"], "epoch 0: loss"),
    ("data_parallel.py", 3, [], "from one process's"),
    ("fsdp2.py", 3, [], "from one process's"),
    ("tensor_parallel.py", 2, [], "from one process's"),
    ("pipeline.py", 2, ["--schedule", "gpipe"], "from one process's"),
    ("pipeline.py", 4, ["--schedule", "1f1b"], "from one process's"),
    ("pipe.py", 1, [], "gpipe: bubble"),
    ("pipe.py", 2, [], "the Pipe goes on"),
    ("checkpoint.py", 2, ["checkpoint.pt"], "from one process's"),
    ("overlap.py", 2, [], "ms a step, ratio"),
    ("sampler.py", 3, [], "epoch 2: rank 0 sees"),
    ("metrics.py", 3, [], "on average"),
    ("one_process.py", 1, [], "from one process's"),
    ("eigenvector.py", 3, [], "largest eigenvalue"),
    ("low_rank_shards.py", 4, ["--steps", "8"], "all of it"),
    *cases([], long=[("low_rank_shards.py", 4, ["--steps", "24", "--shard", "4"], "all of it")]),
    ("language_model.py", 2, ["--seconds", "1"], "the same bits on 2 ranks"),
    ("elastic.py", 3, [], "largest eigenvalue"),
    ("serving.py", 3, [], "worker 2: 163840"),
    ("heat.py", 3, [], "as one process computes them"),
    ("hugging_face.py", 2, ["--plan", "zero"], "do not differ from one process's"),
    ("hugging_face.py", 2, ["--plan", "tensor"], "do not differ from one process's"),
    ("hugging_face.py", 2, ["--plan", "pipeline"], "do not differ from one process's"),
]
NEEDS = {"hugging_face.py": ("transformers", "accelerate")}  # packages that a clone may lack


def name_of(run: tuple[str, int, list[str], str]) -> str:
    """Example: ("pipeline.py", 4, ["--schedule", "gpipe"], ...) -> "pipeline-4-gpipe"."""
    program, size, arguments, _ = run
    return "-".join([program.removesuffix(".py"), str(size), *arguments[1:]])


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_example(forks: suite.Forks, tmp_path: Path, run: tuple[str, int, list[str], str]):
    program, size, arguments, _ = run
    for package in NEEDS.get(program, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with reserved() as port:
        job = ("programs.example", size, [program, str(port), *arguments])
        texts = forks.run(tmp_path, {"example": job})["example"]
    for rank, text in enumerate(texts):
        if "(ended with" in text or len(texts) != run[1]:
            pytest.fail("\n".join(texts), pytrace=False)
        if "one process's" in run[3] and "pipeline" not in run[0]:
            assert run[3] in text, f"rank {rank} compared nothing"
    assert run[3] in texts[0] + texts[-1]


def test_every_example_is_run_and_short():
    programs = {path.name for path in EXAMPLES.glob("*.py")} - SHARED
    assert programs == {run[0] for run in RUNS} | ELSEWHERE.keys()
    for program in programs:
        assert len((EXAMPLES / program).read_text().splitlines()) < LINES, program
