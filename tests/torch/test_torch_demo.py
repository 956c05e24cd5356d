"""The demo: its parts one by one, then the real command on two ranks, and Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.commands import demo
from unisono.commands.demo import corpus, model

COMMAND = ["env", "--default-signal=INT", sys.executable, "-m", "unisono", "demo"]
COMMAND += ["--only", "ddp", "-n", "2", "--batch", "1"]


# ---- data and model ---------------------------------------------------------------------------------


def test_corpus_is_sorted_source_without_tests(tmp_path: Path):
    for name in ("b.py", "a.py", "test/c.py", "sub/site-packages/d.py", "e.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n    pass\n")
    assert corpus.read_corpus(1 << 20, tmp_path) == b"a.py\n\tpass\nb.py\n\tpass\n"
    assert corpus.read_corpus(6, tmp_path) == b"a.py\n\t"


def test_no_source_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nothing to learn from"):
        corpus.read_corpus(10, tmp_path)


SMALL = {"layers": 1, "width": 8, "heads": 2, "context": 6}


def test_predictions_do_not_see_the_future():
    torch.manual_seed(0)
    gpt = model.GPT(**SMALL)
    one, other = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 4, 9, 9]])
    torch.testing.assert_close(gpt.logits(one)[:, :4], gpt.logits(other)[:, :4])
    assert not torch.equal(gpt.logits(one)[:, 4], gpt.logits(other)[:, 4])


def test_generation_goes_past_the_context_and_repeats_with_its_seed():
    torch.manual_seed(0)
    gpt = model.GPT(**SMALL)
    texts = [model.generate(gpt, b"ab", 10, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert [len(text) for text in texts] == [12] * 3
    assert texts[0].startswith(b"ab")


# ---- comparison -------------------------------------------------------------------------------------


def record(losses: list[float]) -> dict[str, Any]:
    return {"losses": losses, "seconds": [0.1] * len(losses), "nbytes": 1_000_000}


def test_comparison_shows_the_largest_difference():
    text = demo.comparison({"Unisono": record([3.0] * 12), "Gloo": record([3.0] * 11 + [3.5])})
    assert "0.0e+00 in the first 10 steps, 5.0e-01 in all 12 (at step 12)" in text
    assert "100.0 ms" in text
    assert "10.0 MB/s" in text


def test_different_parameters_fail_the_demo(monkeypatch, capsys: pytest.CaptureFixture[str]):
    digests = ["aa", "aa"]

    def run_ranks(size: int, module: str, options: dict[str, Any], ends: Path) -> int:
        options["record"].write_text(json.dumps({**record([1.0]), "digests": digests}))
        return 0

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    words = ("--only", "ddp", "--backends", "unisono")
    assert demo.main(parsed(*words)) == 0
    assert "bit-identical on 2 ranks, sha256 aa" in capsys.readouterr().out
    digests[1] = "ab"
    assert demo.main(parsed(*words)) == 1
    assert "DIFFERENT on 2 ranks" in capsys.readouterr().out


def test_samples_cannot_upset_a_terminal():
    assert corpus.printable(b"\ta\x1b[2Jb\n") == "    a.[2Jb\n"


# ---- the command ------------------------------------------------------------------------------------


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def test_without_torch_one_line_says_what_to_do(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("unisono.commands.demo.find_spec", lambda name: None)
    assert demo.main(parsed("--only", "ddp")) == 2
    assert capsys.readouterr().err == "unisono demo: this needs PyTorch: pip install torch\n"


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert demo.main(parsed("--steps", "0")) == 2
    assert demo.main(parsed("--backends", "mpi")) == 2
    assert "--steps 0: must be positive" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_trains_over_unisono_and_agrees_with_gloo():
    done = subprocess.run(
        [*COMMAND, "--steps", "12", "--seconds", "60"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(text) for text in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert losses[0] > 5
    assert losses[-1] < losses[0]
    assert "over Unisono: bit-identical on 2 ranks" in done.stdout
    early = re.search(r"Unisono to Gloo: (\S+) in the first 10 steps", done.stdout)
    assert early is not None
    assert float(early.group(1)) < 1e-4
    assert "given 'def '" in done.stdout


def test_a_failing_run_is_told_and_ends():
    words = ["--seed", "99999999999999999999", "--backends", "unisono"]  # PyTorch refuses it
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert " failed" in done.stderr
    assert "the run over Unisono failed (exit code 1)" in done.stdout


@pytest.mark.parametrize("after", ["Gloo: ", " loss "])
def test_ctrl_c_is_clean(after: str):
    with subprocess.Popen(
        [*COMMAND, "--backends", "gloo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while after not in (line := process.stdout.readline()):
            assert line, process.communicate()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=15)
    assert process.returncode == 130
    assert errors.endswith("unisono demo: interrupted, all ranks ended\n")
    assert "train_ddp.py" not in output + errors  # Python's own start prints a traceback, too


def test_ctrl_c_is_clean_while_a_rank_imports_pytorch(tmp_path: Path):
    (tmp_path / "torch.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "unisono.commands.demo.train_ddp"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=15) == ("", "")
    assert process.returncode == 130
