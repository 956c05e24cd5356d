"""`unisono plan` as a user calls it, and the files it reads."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

import unisono as un
from inside_planner import shipped
from loops import each
from unisono.commands import cli
from unisono.planner import find_hardware, shape_of

CONFIGS = Path(__file__).parent / "configs"
GPT3 = "plan --layers 96 --hidden 12288 --heads 96 --vocab 51200 --sequence 2048"
ON_64 = f"{GPT3} --batch 64 --gpus 64 --hardware a100-80g"
ON_128 = f"{GPT3} --batch 128 --gpus 128 --hardware a100-80g"
A100 = (Path(__file__).parents[2] / "src/unisono/planner/shipped/a100-80g.toml").read_text()


def test_json_has_all_of_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{ON_64} --network selene --json".split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["seconds"] == pytest.approx(sum(record["time"].values()))
    assert record["memory_bytes"] == pytest.approx(sum(record["memory"].values()), abs=10)
    assert record["memory_bytes"] <= record["limit_bytes"]
    assert record["fits"] is True
    plan = record["plan"]
    assert plan["data"] * plan["context"] * plan["tensor"] * plan["pipeline"] == 64
    assert 100 < record["model_tflops_per_gpu"] <= record["tflops_per_gpu"] < 312
    assert record["limit"] in record["time"]
    assert record["bubble_seconds"] == record["time"]["bubble"]
    assert len(record["next_best"]) == 5
    assert record["collectives"][0]["seconds"] > 0
    assert {"change", "problem", "excess_bytes", "excess_s", "cause"} == set(record["refused"][0])
    assert record["network"] == "selene"


def test_one_plan_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    text = "tensor=8,pipeline=12,data=4,recompute=full"
    words = (
        f"{GPT3} --kv-heads 96 --ffn 49152 --batch 1536 --gpus 384 --hardware a100-80g --plan {text} --json"
    )
    assert cli.main(words.split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["plan"] == {
        "data": 4, "tensor": 8, "sequence": False, "pipeline": 12, "interleave": 1, "zero": 0,
        "micro_batch": 1, "recompute": "full", "context": 1, "expert": 1, "shard": 0, "schedule": "1f1b",
        "tail": 0, "swap": "none", "codec": "none", "order": [], "layers": [], "rows": [], "compute": "",
    }  # fmt: skip
    assert record["tflops_per_gpu"] == pytest.approx(4 / 3 * record["model_tflops_per_gpu"], rel=0.01)


def test_the_answer_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ON_64.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for word in ("a step", "GiB", "pipeline bubble", "limit:", "collectives", "next best", "one step away"):
        assert word in text


def test_models_are_read_from_config_files(capsys: pytest.CaptureFixture[str]) -> None:
    rest = "--batch 64 --gpus 8 --hardware v100-32g --json"
    assert cli.main(f"plan --model {CONFIGS / 'gpt2.json'} {rest}".split()) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 124_439_808
    words = f"plan --model {CONFIGS / 'llama3_8b.json'} --sequence 4096 --attention unfused {rest}"
    assert cli.main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_261_248


def test_less_memory_is_another_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(f"{ON_128} --memory 40G --json".split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["limit_bytes"] == 40_000_000_000
    assert record["memory_bytes"] <= 40_000_000_000
    assert cli.main(f"{GPT3} --batch 8 --gpus 8 --hardware a100-80g --memory 4G --json".split()) == 1
    printed = capsys.readouterr()
    assert "the smallest needs" in printed.err
    smallest = json.loads(printed.out)
    assert smallest["fits"] is False
    assert smallest["memory_bytes"] > smallest["limit_bytes"] == 4_000_000_000
    assert smallest["seconds"] > 0
    assert smallest["tflops_per_gpu"] > 0
    assert smallest["plan"]["data"] >= 1


@each(
    "words, message",
    [
        (f"{ON_64} --model {CONFIGS / 'gpt2.json'}", "--layers and --model"),
        (
            f"plan --model {CONFIGS / 'gpt2.json'} --family gpt --batch 8 --gpus 8 --hardware a100-80g",
            "--family",
        ),
        ("plan --batch 8 --gpus 8 --hardware a100-80g", "--layers is missing"),
        (f"{ON_64} --experts 8", "needs --top-k"),
        (f"{ON_64} --top-k 2", "--top-k needs --experts"),
        (f"{ON_64} --experts 8 --top-k 9", "top_k=9 is more than"),
    ],
)
def test_wrong_options_are_errors(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert cli.main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_experts_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Mixtral 8x7B, from its numbers and by its name."""
    numbers = "--layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 32000 --family llama"
    rest = "--sequence 4096 --batch 64 --gpus 8 --hardware h100-80g --plan expert=8,zero=1 --json"
    found = []
    for model in (f"{numbers} --experts 8 --top-k 2", "--model mixtral-8x7b"):
        assert cli.main(f"plan {model} {rest}".split()) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["parameters"] == 46_702_792_704
    assert found[0]["time"]["experts"] > 0


HUGE = "9" * 40
WRONG = {
    "--batch": ("0", "-1", "1.5", "nan", HUGE),
    "--gpus": ("0", "-8", "x", HUGE),
    "--layers": ("0", "-1", "nan", HUGE),
    "--hidden": ("0", "7", HUGE),
    "--heads": ("0", "5", HUGE),
    "--kv-heads": ("-1", "7", HUGE),
    "--ffn": ("-1", HUGE),
    "--vocab": ("0", HUGE),
    "--sequence": ("0", "-1", HUGE),
    "--hardware": ("", "/nowhere.toml", "/tmp", "a100", "./"),
    "--hosts": ("1xa100-80g", "/nowhere.toml", "x", f"{HUGE}xa100-80g"),
    "--network": ("nowhere", "/nowhere.toml", "/tmp"),
    "--memory": ("0", "-1", "nan", "inf", "80Q", "1e30", f"{HUGE}G", "500G"),
    "--compute": ("", "fp8", "int8", "bf16,bf16", ",", "nan"),
    "--reduce": ("", "bf16", "nan"),
    "--overlap": ("", "maybe", "1"),
    "--codecs": (",", "int4", "none", "rank0", "rank9999"),
    "--imbalance": ("0", "-1", "nan", "inf", "1e300", "x"),
    "--dispatch": ("", "all"),
    "--routed-hosts": ("1", "-1", "nan", HUGE),
    "--family": ("", "bert"),
    "--attention": ("", "flash"),
    "--experts": ("0", "-1", "8", HUGE),
    "--plan": (",", "data", "data=", "data=0", "data=-1", f"data={HUGE}", "zero=4", "compute=fp8", "order=1"),
    "--fix": (",", "tail=99", "layers=1", "rows=1", "compute=f32", "tensor=7", "sequence=1"),
    "-o": ("trade.png", "/nowhere/trade.svg"),
}


@each("option, value", [(option, value) for option, values in WRONG.items() for value in values])
def test_a_wrong_value_is_one_clear_line(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    numbers = "--layers 4 --hidden 64 --heads 4 --vocab 99 --sequence 8"
    words = f"plan {numbers} --batch 8 --gpus 8 --hardware a100-80g"
    try:
        code = cli.main([*words.split(), f"{option}={value}" if option != "-o" else option + value])
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("usage: ")]
    assert code in (1, 2)
    assert len(lines) == 1
    assert lines[0].startswith("unisono plan: ")
    assert not printed.out


def test_several_types_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest of each type alone is the fastest of all; 8 bits take other memory."""
    rest = "--model llama3-8b --sequence 8192 --batch 64 --gpus 8 --hardware h100-80g --json"
    fixed = "--fix context=1,tensor=1,shard=0,pipeline=1"
    found = {}
    for types in ("bf16", "fp8", "f32", "bf16,fp8,f32"):
        assert cli.main(f"plan {rest} {fixed} --compute {types}".split()) == 0
        found[types] = json.loads(capsys.readouterr().out)
    alone = [record for types, record in found.items() if "," not in types]
    best = min(alone, key=lambda record: record["seconds"])
    together = found["bf16,fp8,f32"]
    assert together["seconds"] == best["seconds"]
    assert together["memory_bytes"] == best["memory_bytes"]
    assert together["compute"] == together["plan"]["compute"] == "fp8"
    assert together["candidates"] == sum(record["candidates"] for record in alone)
    assert {"compute=bf16", "compute=f32"} < {each_["change"] for each_ in together["refused"]}


@each("option", ["--context 2", "--gpu 8", "--layers ten", "--seq 8"])
def test_unknown_options_are_errors(capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(f"{ON_64} {option}".split())
    assert ended.value.code == 2


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ON_64.split()[:1], "--model", "/nowhere.json", *ON_64.split()[11:]]) == 1
    assert "/nowhere.json" in capsys.readouterr().err


def test_the_trade_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trade.svg"
    rest = "--batch 8 --gpus 8 --hardware v100-32g --json"
    assert cli.main(f"plan --model gpt2-xl {rest} -o {file}".split()) == 0
    record = json.loads(capsys.readouterr().out)
    root = ElementTree.parse(file).getroot()
    names = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert names[0].startswith(f"{record['candidates']:,} plans")
    assert len(names) > 20
    chosen = record["plan"]
    assert any(f"data={chosen['data']},tensor={chosen['tensor']}" in name for name in names[1:])
    for words, message in (
        (f"{ON_64} --plan tensor=8 -o {file}", "give one or the other"),
        (f"{ON_64} -o trade.png", "expected a name that ends in .svg"),
    ):
        assert cli.main(words.split()) == 2
        assert message in capsys.readouterr().err


class Page(HTMLParser):
    """Tags that are open, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "circle", "line"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_has_all_and_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "choice.html"
    assert (
        cli.main(f"plan --model gpt2-xl --batch 8 --gpus 8 --hardware v100-32g --json -o {file}".split()) == 0
    )
    record = json.loads(capsys.readouterr().out)
    page = Page()
    page.feed(file.read_text())
    page.close()
    text = " ".join(page.text)
    assert page.open == page.loaded == []
    assert "<script" not in file.read_text()
    for title in (
        "Time over memory",
        "A step",
        "Memory",
        "Collectives of a rank",
        "Next best",
        "One step away",
    ):
        assert title in text
    assert all(neighbour["change"] in text for neighbour in record["refused"])
    assert f"{record['memory_bytes'] / 2**30:.2f} GiB of {record['limit_bytes'] / 2**30:.2f} GiB" in text


def test_a_page_is_escaped() -> None:
    gpu = find_hardware("a100-80g")
    efficiency = msgspec.structs.replace(gpu.efficiency, source="1 < 2 <i>")
    gpu = msgspec.structs.replace(gpu, name="A & B <b>", efficiency=efficiency)
    shape = shape_of(layers=2, hidden=64, heads=4, vocab=512, sequence=64)
    page = un.plan(shape, batch=8, gpus=8, hardware=gpu, memory=1 << 20, plan="data=8").html()
    assert "DOES NOT FIT" in page
    for raw in ("<b>", "<i>", "A & B", "1 < 2"):
        assert raw not in page
    parser = Page()
    parser.feed(page)
    assert parser.open == []


# ---- hardware ----------------------------------------------------------------------------------------------


@each("name", shipped())
def test_shipped_hardware_is_complete(name: str) -> None:
    hardware = find_hardware(name)
    assert hardware.name == name
    assert hardware.inside.bytes_per_s > hardware.between.bytes_per_s
    assert hardware.usable_bytes < hardware.memory_bytes
    assert hardware.efficiency.source


def test_four_are_shipped() -> None:
    assert shipped() == ["a100-40g", "a100-80g", "h100-80g", "v100-32g"]


@each(
    "old, new, message",
    [
        ("ranks = 8", "ranks = 0", "ranks"),
        ("ranks = 8", "ranks = 8\nwatts = 400", "watts: is unknown"),
        ('memory = "80 GiB"', 'memory = "80 gigs"', "is no size"),
        ('memory = "80 GiB"', "", "lacks memory"),
        ('reserved = "4 GiB"', 'reserved = "80 GiB"', "expected less than the memory"),
        ("overlap = false", 'overlap = "no"', "expected true or false"),
        ("bf16 = 312e12", "bf16 = 0", "is 0, expected 1e+06"),
        ("bf16 = 312e12", "fp4 = 1e15", "fp4: is unknown"),
        ("bf16 = 312e12", "fp8 = 1e15", "needs bf16 before it"),
        ("attention = 0.60", "attention = 1.2", "expected a share"),
        ('rate = "300 GB/s"', "", "inside: lacks rate"),
        ("matrix = 0.756", "matrix = 1.2", "expected a share"),
        ("matrix = 0.756", "", "lacks matrix"),
        ("bf16 = 312e12", "bf16 = 1e-300", "expected 1e+06 to 1e+24 FLOP/s"),
        ('memory_rate = "2039 GB/s"', "memory_rate = 1e-300", "bytes per second"),
        ('latency = "2.7 us"', 'latency = "1e30 s"', "expected 0 to 60 s"),
        ('name = "a100-80g"', "name = [1]", "expected a text"),
        ('source = "', 'source = 4 # "', "expected a text"),
        ("[flops]", "[flops", ":"),
    ],
)
def test_wrong_files_name_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in A100
    file = tmp_path / "mine.toml"
    file.write_text(A100.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"mine\.toml:\d+") as raised:
        find_hardware(file)
    assert message in str(raised.value)


def test_a_file_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(A100.replace('"80 GiB"', '"40 GiB"').replace('name = "a100-80g"\n', ""))
    assert cli.main(f"{GPT3} --batch 128 --gpus 128 --hardware {file} --json".split()) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["hardware"] == "mine"
    assert record["limit_bytes"] == 36 << 30
