"""The bench in this process: sizes, expectations, statistics, the table, records, wrong arguments."""

import argparse
import json
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from effort import HANG_S
from loops import each
from unisono.commands import bench
from unisono.commands.bench import cases, measure, noise, report, worker_group
from unisono.commands.bench.contenders import partner_of, required_passes
from unisono.commands.bench.libraries import choose_libraries
from unisono.commands.bench.measure import CaseResult, MeasurementFailure, Timing
from unisono.commands.bench.start_barrier import StartBarrier, barrier_memory
from unisono.commands.bench.worker import time_calls


def case(
    operation: str, count: int = 12, *, size: int = 3, op: str = "sum", dtype: str = "f32", root: int = 0
):
    return cases.BenchCase(operation, count, dtype, op, root, size)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


# ---- cases ------------------------------------------------------------------------------------------


@each(
    ("operation", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("send_recv", 1.0),
    ],
)
def test_bus_factor_for_four_ranks(operation: str, factor: float):
    assert cases.OPERATIONS[operation].bus_factor(4) == factor


def sweep(operation: str, first: int, last: int, factor: float, size: int, dtype: str = "f32") -> list[int]:
    found = cases.sweep(
        cases.OPERATIONS[operation],
        first=first,
        last=last,
        factor=factor,
        dtype=dtype,
        op="sum",
        root=0,
        ranks=size,
    )
    return [one.count for one in found]


def test_sizes_are_whole_elements_and_never_repeated():
    assert sweep("all_reduce", 4, 64, 4, 3) == [1, 4, 16]
    assert sweep("all_reduce", 1, 16, 2, 2) == [1, 2, 4]
    assert sweep("all_reduce", 4, 16, 1.3, 2) == [1, 2, 3]


def test_divided_operations_get_a_multiple_of_the_ranks():
    assert sweep("all_gather", 4, 64, 4, 3) == [3, 6, 18]
    assert sweep("all_to_all", 4, 4, 2, 3) == [3]


# ---- expectations -----------------------------------------------------------------------------------


def inputs(one: cases.BenchCase) -> list[np.ndarray | None]:
    """What every rank puts in, as `fill` writes it."""
    found = []
    for rank in range(one.ranks):
        buffers = cases.allocate(one, rank)
        cases.fill(one, rank, buffers)
        found.append(buffers.inp)
    return found


def test_ranks_put_in_different_things():
    first, second, third = inputs(case("all_reduce", 100))
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)


def test_what_an_operation_obliges_a_rank_to_move():
    assert required_passes(case("all_reduce", 12), 1) == [("update", 48)]
    assert required_passes(case("all_gather", 12), 1) == [("read", 16), ("write", 48)]
    assert required_passes(case("broadcast", 12, root=1), 0) == [("write", 48)]
    assert required_passes(case("reduce", 12), 2) == [("read", 48)]
    assert required_passes(case("send_recv", 12), 2) == []
    for operation in cases.OPERATIONS:
        assert all(nbytes >= 0 for _, nbytes in required_passes(case(operation), 0))


def test_an_odd_rank_out_has_no_part_in_ping_pong():
    one = case("send_recv", 9)
    np.testing.assert_array_equal(cases.expected(one, 1), inputs(one)[0])
    assert cases.expected(one, 2) is None
    assert [partner_of(rank, 5) for rank in range(5)] == [1, 0, 3, 2, None]


@each("dtype", ["f32", "i32", "f16"])
def test_wrong_values_are_counted(dtype: str):
    one = case("all_reduce", 10_000, dtype=dtype)
    buffers = cases.allocate(one, 1)
    buffers.inp[:] = cases.expected(one, 1)
    assert cases.count_wrong(one, 1, buffers) == 0
    buffers.inp[[0, 5000, 9999]] += 1
    assert cases.count_wrong(one, 1, buffers) == 3


def test_not_a_number_is_wrong():
    one = case("all_reduce", 10)
    buffers = cases.allocate(one, 0)
    buffers.inp[:] = np.nan
    assert cases.count_wrong(one, 0, buffers) == 10


def test_untouched_output_is_wrong():
    one = case("all_gather", 12)
    buffers = cases.allocate(one, 0)
    cases.fill(one, 0, buffers)
    assert cases.count_wrong(one, 0, buffers) == 12


def test_bf16_sums_are_exact():
    pytest.importorskip("ml_dtypes")
    one = case("all_reduce", 100, dtype="bf16", size=8)
    exact = sum(array.astype(np.float64) for array in inputs(one))
    np.testing.assert_array_equal(cases.expected(one, 0).astype(np.float64), exact)


# ---- timing and statistics --------------------------------------------------------------------------


def test_operations_that_need_it_are_lined_up_before_every_call():
    order = []
    time_calls(lambda: order.append("call"), 3, 1, lambda: order.append("lined up"))
    assert order == ["call"] + ["lined up", "call"] * 3


def test_calls_for_a_block():
    assert measure.calls_for(2.0, 50) == measure.MAX_CALLS
    assert measure.calls_for(1000.0, 50) == 50
    assert measure.calls_for(10_000_000.0, 50) == measure.MIN_CALLS


def timing(side: str, *rounds: float, wrong: int = 0) -> Timing:
    made = Timing(side, calls=3, wrong=wrong)
    for value in rounds:
        made.add(np.array([[value, value, 9 * value], [value / 2, value / 2, 10 * value]]))
    return made


def test_figures_are_medians_of_round_medians():
    made = timing("unisono", 1.0, 5.0, 2.0)
    assert made.p50_us == 2.0
    assert made.p99_us == 50.0


def test_the_slowest_rank_counts():
    made = Timing("unisono")
    made.add(np.array([[1.0, 5.0, 1.0], [4.0, 1.0, 4.0]]))
    assert made.rounds == [4.0]
    assert made.blocks == [3.0]
    assert made.rank0 == [1.0]


def test_ratio_is_the_median_of_the_rounds_ratios():
    line = CaseResult(case("all_reduce"), timing("unisono", 1.0, 4.0, 2.0), [])
    assert line.ratio(timing("gloo", 10.0, 10.0, 40.0)) == 0.1


def test_best_is_whoever_was_fastest_in_a_round():
    peers = [timing("gloo", 2.0, 8.0, 4.0), timing("mpich", 8.0, 2.0, 8.0), timing("limit", 0.1, 0.1, 0.1)]
    line = CaseResult(case("all_reduce"), timing("unisono", 1.0, 1.0, 1.0), peers)
    assert line.best_ratio() == 0.5
    assert CaseResult(case("all_reduce"), timing("unisono", 1.0), peers[2:]).best_ratio() is None
    assert "to best" in report.header("all_reduce", ["gloo", "limit", "mpich"])
    assert "to best" not in report.header("all_reduce", ["limit", "mpich"])


def test_bandwidths_use_1e9():
    line = CaseResult(case("all_reduce", 250_000, size=4), timing("unisono", 1000.0), [])
    assert line.algbw_gbps == pytest.approx(1.0)
    assert line.busbw_gbps == pytest.approx(1.5)


def test_noise_is_what_others_used():
    before = noise.CpuTicks(elapsed=0, used=0, ours=0)
    assert noise.others_share(before, noise.CpuTicks(elapsed=100, used=60, ours=55)) == 0.05
    assert noise.others_share(before, noise.CpuTicks(elapsed=100, used=50, ours=55)) == 0.0
    assert noise.others_share(before, before) == 0.0
    stolen = noise.CpuTicks(elapsed=100, used=60, ours=55, stolen=3)
    assert noise.CpuNoise(noise.others_share(before, stolen), 0.03).others == 0.05


def test_pace_is_a_median_and_a_range():
    pace = noise.CoreSpeed()
    pace.beat()
    assert pace.to_json()["median_us"] > 0
    pace.times_us, pace.line_ns = [100.0] * 9 + [300.0] * 2, []
    assert str(pace) == "a fixed piece of work took 100 us on a core, mostly 100 to 300"
    pace.line_ns = [40.0] * 6 + [240.0] * 5
    assert str(pace).endswith("; a store reached another core in 40 ns, mostly 40 to 240")


def test_report_says_whether_the_machine_was_quiet():
    assert "quiet machine" in report.noise_line(noise.CpuNoise(0.01, 0.0), 2)
    loud = report.noise_line(noise.CpuNoise(0.4, 0.15), 2)
    assert "NOT QUIET" in loud
    assert "25% of 2 cores" in loud
    assert "the host took 15.0%" in loud
    assert "not known" in report.noise_line(None, 2)


# ---- report -----------------------------------------------------------------------------------------


def test_columns_of_the_table_line_up():
    peers = [timing("gloo", 73_000.0)]
    line = CaseResult(case("all_reduce", 16 << 20), timing("unisono", 8000.0), peers, "two_shot", 7654.3)
    names, units = report.header("all_reduce", ["gloo"]).splitlines()[1:]
    text = report.row(line)
    assert names.split()[1:5] == ["size", "count", "type", "redop"]
    assert text.split()[:5] == ["67108864", "16777216", "f32", "sum", "-1"]
    assert len(text.split()) == 14
    assert len(names) == len(text) >= len(units)


def test_a_peer_without_figure_is_a_dash_and_a_reason():
    line = CaseResult(
        case("all_reduce"), timing("unisono", 1.0), [MeasurementFailure("gloo", "no such thing\nmore")]
    )
    assert report.row(line).split()[-2:] == ["-", "-"]
    assert report.reasons([line, line]) == ["# all_reduce: no such thing"]


def test_wrong_values_of_a_peer_are_told():
    line = CaseResult(case("reduce"), timing("unisono", 1.0), [timing("gloo", 1.0, wrong=3)])
    assert "gloo left wrong values" in report.reasons([line])[0]


def test_record_is_json_and_complete():
    line = CaseResult(case("broadcast", root=1), timing("unisono", 1.0), [timing("gloo", 2.0)])
    record = json.loads(
        json.dumps(report.to_json([line], {"rounds": 1}, noise.CpuNoise(0.5, 0.1), 2, noise.CoreSpeed()))
    )
    assert record["noise"] == {"others_cpu_share": 0.5, "stolen_cpu_share": 0.1, "quiet": False, "pace": {}}
    found = record["lines"][0]
    assert found["operation"] == "broadcast"
    assert found["peers"]["gloo"]["ratio"] == 0.5
    assert found["nbytes"] == 48


# ---- arguments --------------------------------------------------------------------------------------


@each(
    ("words", "complaint"),
    [
        (["all_reduce", "-b", "8", "-e", "4"], "-b 8 is more than -e 4"),
        (["all_reduce", "-b", "four"], "-b four"),
        (["all_reduce", "-b", "0"], "at least one byte"),
        (["all_reduce", "-f", "1"], "factor must be more than 1"),
        (["all_reduce", "-n", "0"], "at least one rank"),
        (["all_reduce", "--dtype", "f8"], "unknown dtype 'f8'"),
        (["all_reduce", "--op", "mean"], "unknown --op mean"),
        (["all_reduce", "--op", "avg", "--dtype", "i32"], "no meaning for i32"),
        (["all_reduce", "--op", "bxor"], "needs an integer dtype"),
        (["broadcast", "--root", "2"], "ranks are 0 to 1"),
        (["send_recv", "-n", "1"], "needs -n 2"),
        (["all_reduce", "--against", "mpi"], "unknown peer 'mpi': choose from gloo, memcpy"),
    ],
)
def test_bad_arguments_are_one_line(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    assert bench.main(parsed(*words)) == 2
    text = capsys.readouterr().err
    assert complaint in text
    assert text.count("\n") == 1


def test_missing_torch_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("unisono.commands.bench.libraries.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"gloo needs the package torch: pip install torch"):
        choose_libraries("memcpy,gloo")


@each("text", ["f32", "float32", "FLOAT", "Float32"])
def test_a_dtype_has_its_usual_spellings(text: str):
    assert cases.dtype_name(text) == "f32"


# ---- a run's record in other forms: CSV, the OSU benchmarks' columns, a picture ----


RECORD = {
    "lines": [
        {
            "operation": "broadcast", "nbytes": 8, "count": 2, "dtype": "f32", "ranks": 2, "p50_us": 1.5,
            "p99_us": 3.0, "block_us": 2.0, "wrong": 0,
            "peers": {"mpich": {"p50_us": 3.0, "p99_us": 4.0, "ratio": 0.5, "wrong": 0},
                      "gloo": {"error": "no"}},
        }
    ]
}  # fmt: skip


def test_csv_has_a_row_per_library():
    assert report.to_csv(RECORD).splitlines()[1:] == [
        "broadcast,8,2,f32,2,unisono,1.5,3.0,,0,0.0053,0.0053",
        "broadcast,8,2,f32,2,mpich,3.0,4.0,0.5,0,0.0027,0.0027",
        "broadcast,8,2,f32,2,gloo,,,,,,",
    ]


def test_osu_has_size_latency_and_both_bandwidths():
    line = {**RECORD["lines"][0], "operation": "all_reduce", "nbytes": 4000, "ranks": 4}
    assert report.to_osu(RECORD).splitlines()[-1].split() == ["8", "2.00", "0.0040", "0.0040"]
    assert report.to_osu({"lines": [line]}).splitlines()[-1].split() == ["4000", "2.00", "2.0000", "3.0000"]
    barrier = {**line, "operation": "barrier", "count": 0}
    assert report.to_osu({"lines": [barrier]}).splitlines()[-1].split() == ["4000", "2.00"]


def test_plot_writes_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    # A process of its own: matplotlib keeps its fonts open.
    program = Path(__file__).parent / "programs" / "plots_a_record.py"
    words = [sys.executable, str(program), json.dumps(RECORD), str(tmp_path / "out.png")]
    subprocess.run(words, check=True, timeout=HANG_S)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# ---- where the ranks of a measured side start from together ----


def test_line_up_releases_all_ranks_together():
    with barrier_memory(3) as place:
        ranks = [StartBarrier(place, rank, 3) for rank in range(3)]
    come: list[int] = []

    def walk(rank: int) -> list[int]:
        seen = []
        for _ in range(50):
            come.append(rank)
            ranks[rank]()
            seen.append(len(come))
        return seen

    with ThreadPoolExecutor(3) as pool:
        for seen in pool.map(walk, range(3)):
            assert all(count >= 3 * (number + 1) for number, count in enumerate(seen))


# ---- the bench's end of a worker's connection ----


def test_a_worker_that_stops_in_its_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "GAP_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        stopped = worker_group.WorkerGroup("memcpy", 1)
        stopped.connections, stopped.pids = [worker_group.connection_over(ours)], [4121]
        theirs.sendall(struct.pack("!i", 100) + b"{")
        with pytest.raises(
            worker_group.BenchError, match=r"memcpy rank 0/1 \(pid 4121\) .*the middle of its answer"
        ):
            stopped.ask({"do": "check"})
