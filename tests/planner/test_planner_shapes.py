"""Shapes: parameters of published models, what the ranks of a tensor axis have, config files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inside_planner import read_shape
from loops import each
from unisono.planner import TransformerShape, shape_of

CONFIGS = Path(__file__).parent / "configs"
GPT3 = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "sequence": 2048}
LLAMA_405B = {
    "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248, "vocab": 128256,
    "sequence": 8192,
}  # fmt: skip


@each(
    "shape, parameters",
    [
        (read_shape(CONFIGS / "gpt2.json"), 124_439_808),
        (read_shape(CONFIGS / "llama3_8b.json", 8192), 8_030_261_248),
        (read_shape(CONFIGS / "qwen2_0.5b.json", 2048), 494_032_768),
        (shape_of("llama", **LLAMA_405B), 405_853_388_800),
        (read_shape("llama3-405b", 8192), 405_853_388_800),
        (read_shape("llama3-70b", 8192), 70_553_706_496),
        (read_shape("llama3-8b", 8192), 8_030_261_248),
        (read_shape("mistral-7b", 8192), 7_241_732_096),
        (read_shape("gpt2"), 124_439_808),
        (read_shape("gpt2-medium"), 354_823_168),
        (read_shape("gpt2-large"), 774_030_080),
        (read_shape("gpt2-xl"), 1_557_611_200),
        (read_shape("mixtral-8x7b", 4096), 46_702_792_704),
        (read_shape("qwen3-8b", 4096), 8_190_735_360),
        (read_shape("qwen3-30b-a3b", 4096), 30_532_122_624),
        (read_shape("deepseek-v3", 4096), 671_026_404_352),
        (read_shape("gemma-7b", 4096), 8_537_680_896),
        (read_shape("phi-2", 2048), 2_779_683_840),
    ],
)
def test_parameters_are_those_of_the_published_models(shape: TransformerShape, parameters: int) -> None:
    assert shape.parameters == parameters


def test_flops_are_those_of_the_paper() -> None:
    """Narayanan et al., 2021, equation 3: all activations are computed again."""
    shape = shape_of("gpt", **GPT3)
    batch, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    expected = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert shape.step_flops(batch, "full") == pytest.approx(expected, rel=1e-12)


@each("family", ["gpt", "llama"])
@each("tensor", [1, 2, 4, 8])
def test_the_parts_of_tensor_ranks_make_the_whole(family: str, tensor: int) -> None:
    shape = shape_of(family, **{**GPT3, "kv_heads": 8})
    assert shape.cuts(tensor)
    assert shape.matrices(tensor) * tensor == shape.matrices()
    assert shape.table(tensor) * tensor == shape.table()


def test_ranks_share_a_key_head_where_there_are_fewer() -> None:
    shape = shape_of("llama", **LLAMA_405B)
    assert shape.cuts(16)
    assert shape.keys(16) == shape.keys(8) == shape.head
    assert not shape.cuts(3)


@each(
    "changes, message",
    [
        ({"layers": 0}, "layers"),
        ({"hidden": 100}, "not a multiple of heads"),
        ({"kv_heads": 7}, "kv_heads"),
        ({"attention": "flash"}, "attention"),
        ({"biases": "some"}, "biases"),
        ({"family": "bert"}, "no family"),
        ({"vocab": -1}, "vocab"),
        ({"positions": 1024}, "sequence=2048 is longer than the table of positions, 1024 rows"),
    ],
)
def test_numbers_that_no_transformer_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(**{**GPT3, **changes})


@each("changes", [{"layers": 1.5}, {"heads": "96"}, {"gated": 1}])
def test_values_of_other_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        shape_of(**{**GPT3, **changes})


@each(
    "changes, message",
    [
        ({"model_type": "mixtral"}, "lacks num_local_experts"),
        ({"model_type": "t5"}, "only decoders are planned"),
        ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss'"),
        ({"model_type": "deepseek_v3"}, "lacks n_routed_experts"),
        ({"model_type": "qwen3"}, "lacks head_dim"),
        ({"model_type": "bert"}, "no encoders. unisono.parallel.plan chooses for any other model"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm=True is not planned"),
        ({"model_type": "gemma2", "head_dim": 256, "sliding_window": 1024}, "sliding_window=1024 is shorter"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "4096"}, "hidden"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not planned"),
        ({"model_type": "mistral", "sliding_window": 2047}, "sliding_window=2047 is shorter"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
    ],
)
def test_configs_that_are_not_understood_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((CONFIGS / "llama3_8b.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=message) as raised:
        read_shape(tmp_path, 2048)
    assert str(file) in str(raised.value)


@each("text, message", [("[1]", "expected an object"), ("{", "no JSON"), ('{"model_type": "gpt2"}', "lacks")])
def test_files_that_are_no_configs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_shape(tmp_path / "config.json", 8)


def test_windows_that_hold_the_sequence_are_planned(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "llama3_8b.json").read_text())
    for kind, window in (
        ("mistral", {"sliding_window": 2048}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind, **window}))
        assert read_shape(tmp_path, 2048).sequence == 2048


def test_mistral_without_heads_of_keys_is_refused(tmp_path: Path) -> None:
    """Hugging Face takes 8 there, for llama as many as heads."""
    config = json.loads((CONFIGS / "llama3_8b.json").read_text())
    del config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path, 2048).key_heads == 32
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    with pytest.raises(ValueError, match="lacks num_key_value_heads"):
        read_shape(tmp_path, 2048)


def test_a_model_longer_than_its_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="gpt2: sequence=4096 is longer than the table of positions"):
        read_shape("gpt2", 4096)


def test_other_types_are_no_files() -> None:
    with pytest.raises(TypeError, match="file is a int"):
        read_shape(5)  # type: ignore[arg-type]


def test_a_folder_needs_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert read_shape("mine").parameters == 124_439_808


def test_names_that_are_not_shipped_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no model 'gpt5': expected a config.json, or one of gpt2, "):
        read_shape("gpt5")


def test_a_config_without_a_length_needs_one() -> None:
    with pytest.raises(ValueError, match="--sequence"):
        read_shape(CONFIGS / "llama3_8b.json")


def test_experts_of_qwen3_as_transformers_4_and_5_write_them(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 131, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }  # fmt: skip
    found = []
    for more in ({"num_experts": 4, "head_dim": 16}, {"num_local_experts": 4}):  # 64 / 4 is 16
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        found.append(read_shape(tmp_path, 8))
    assert found[0].parameters == found[1].parameters
    assert all(shape.experts.count == 4 for shape in found if shape.experts)
