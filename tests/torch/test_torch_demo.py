"""The demo: its parts one by one, then the real command on two ranks, and Ctrl-C."""

from __future__ import annotations

import argparse
import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.futures import Future

from unisono import demo
from unisono.demo import corpus, ddp, model, screen, train
from unisono.demo.communication import CommunicationClock, union_s
from unisono.demo.screen import Progress, TrainingRecord

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


def test_standard_library_is_there():
    text = corpus.read_corpus(1 << 20)
    assert len(text) == 1 << 20
    assert b"def " in text


def test_blocks_overlap_by_one():
    blocks = train.Blocks(b"abcdefg", 3)
    assert len(blocks) == 2
    assert [bytes(block.tolist()) for block in (blocks[0], blocks[1])] == [b"abcd", b"defg"]


SMALL = model.ModelSize(layers=1, width=8, heads=2, context=6)


def test_predictions_do_not_see_the_future():
    torch.manual_seed(0)
    gpt = model.GPT(SMALL)
    one, other = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 4, 9, 9]])
    torch.testing.assert_close(gpt.logits(one)[:, :4], gpt.logits(other)[:, :4])
    assert not torch.equal(gpt.logits(one)[:, 4], gpt.logits(other)[:, 4])


def test_an_untrained_model_knows_nothing():
    torch.manual_seed(0)
    loss = model.GPT(model.ModelSize())(torch.randint(256, (2, 129)))
    assert loss.item() == pytest.approx(5.545, abs=0.2)  # ln 256


def test_default_model_is_small():
    parameters = sum(parameter.numel() for parameter in model.GPT(model.ModelSize()).parameters())
    assert 1e6 < parameters < 2e6


def test_generation_goes_past_the_context_and_repeats_with_its_seed():
    torch.manual_seed(0)
    gpt = model.GPT(SMALL)
    texts = [model.generate(gpt, b"ab", 10, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert [len(text) for text in texts] == [12] * 3
    assert texts[0].startswith(b"ab")


def test_learning_rate_warms_up_and_falls():
    rates = [train.learning_rate(step, 100) for step in range(100)]
    assert rates[14] == pytest.approx(train.LEARNING_RATE / 2)
    assert max(rates) == pytest.approx(train.LEARNING_RATE)
    assert rates[99] < 0.06 * train.LEARNING_RATE
    assert rates[: train.PILOT_STEPS] == [train.learning_rate(step, 50) for step in range(train.PILOT_STEPS)]


# ---- communication ----------------------------------------------------------------------------------


def test_union_counts_overlap_once():
    assert union_s([(1, 3), (0, 2), (5, 6)]) == 4
    assert union_s([(0, 10), (2, 3)]) == 10
    assert union_s([]) == 0


class Bucket:
    def buffer(self) -> torch.Tensor:
        return torch.tensor([2.0, 4.0])


def test_clock_divides_sums_and_measures(monkeypatch: pytest.MonkeyPatch):
    future: Future[list[torch.Tensor]] = Future()

    class Work:
        def get_future(self):
            return future

    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, async_op: Work())
    clock = CommunicationClock(2)
    result = clock.all_reduce(Bucket())
    assert clock.in_flight_s() == 0
    time.sleep(0.01)
    future.set_result([torch.zeros(2)])
    assert result.wait().tolist() == [1.0, 2.0]
    assert clock.in_flight_s() >= 0.01
    assert clock.exposed_s(clock.last_start + 1.0) == pytest.approx(1.0 + clock.in_hook_s)
    assert clock.nbytes == 8
    clock.start_step()
    assert clock.in_flight_s() == clock.nbytes == 0


# ---- screen -----------------------------------------------------------------------------------------


def record(name: str, losses: list[float], digests: list[str] | None = None) -> TrainingRecord:
    made = TrainingRecord(name)
    made.take({"unisono_demo": "start", "parameters": 10, "tokens_per_step": 1000})
    for number, loss in enumerate(losses):
        times = {"step_s": 0.1, "exposed_s": 0.01, "in_flight_s": 0.02, "nbytes": 1_000_000}
        made.take({"unisono_demo": "step", "step": number + 1, "steps": len(losses), "loss": loss, **times})
    digests = digests or ["aa", "aa"]
    made.take(
        {"unisono_demo": "end", "losses": losses, "digests": digests, "total": len(losses), "sample": "x"}
    )
    return made


def test_progress_stays_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(stream)
    progress.show(record("Unisono", [3.0] * 3))
    assert stream.getvalue().startswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()
    progress.line("done")
    assert stream.getvalue().endswith("\r\x1b[Kdone\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_writes_some_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, terminal: bool):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(stream)
    run = record("Unisono", [3.0] * 60)
    steps, run.steps = run.steps, []
    for step in steps:
        run.steps.append(step)
        progress.show(run)
    lines = stream.getvalue().splitlines()
    assert [int(re.search(r" (\d+)/", line).group(1)) for line in lines] == [1, 25, 50, 60]
    assert " 10.0 kB/s" in lines[-1]
    assert "all-reduce  10.0 MB/s, 10% of time" in lines[-1]
    assert len(lines[-1]) < 80


def test_comparison_shows_the_largest_difference():
    text = screen.comparison([record("Unisono", [3.0] * 12), record("Gloo", [3.0] * 11 + [3.5])])
    assert "0.0e+00 in the first 10 steps, 5.0e-01 in all 12 (at step 12)" in text
    assert "100.0 ms" in text
    assert "20.0 ms (20%)" in text


def test_different_parameters_fail_the_demo(capsys: pytest.CaptureFixture[str]):
    assert ddp.report_digests([record("Unisono", [1.0], ["aa", "ab"])], Progress(sys.stdout)) == 1
    assert "DIFFERENT on 2 ranks" in capsys.readouterr().out
    assert ddp.report_digests([record("Unisono", [1.0])], Progress(sys.stdout)) == 0


def test_a_smaller_number_of_steps_is_explained():
    made, stream = TrainingRecord("Unisono"), io.StringIO()
    for number, total in enumerate([300, 300, 163, 163]):
        made.steps.append({"step": number + 1, "steps": total})
        ddp.tell_fewer_steps(made, 50.0, Progress(stream))
    assert stream.getvalue() == "Unisono: 163 of the 300 steps fit into 50 s\n"


def test_samples_cannot_upset_a_terminal():
    assert screen.printable("\ta\x1b[2Jb\n") == "    a.[2Jb\n"


# ---- the command ------------------------------------------------------------------------------------


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(words)


def test_without_torch_one_line_says_what_to_do(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("unisono.demo.find_spec", lambda name: None)
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


def test_a_failing_run_is_told_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("unisono.demo.ddp.BACKENDS", {"nonsense": "Nonsense"})
    assert demo.main(parsed("--only", "ddp", "-n", "2", "--backends", "nonsense", "--steps", "3")) == 1
    text = capsys.readouterr().out
    assert "nonsense" in text
    assert "the run over Nonsense failed" in text


@pytest.mark.parametrize("after", ["starting", " loss "])
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
    assert errors == "unisono demo: interrupted, all ranks ended\n"
    assert "Traceback" not in output
