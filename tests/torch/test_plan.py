"""What does not go together in a plan: one table, which `Plan` refuses by and docs/plans.md shows."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import unisono.parallel as up  # noqa: E402
from loop_features.feature_cells import PLANS  # noqa: E402
from loops import each  # noqa: E402
from unisono.parallel.axes import NAMES  # noqa: E402
from unisono.parallel.plan import NEEDS, Need  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plans.md"
SET = dict.fromkeys(NAMES, 2) | {
    "swap": "disk", "compression": up.PowerSGD(), "local_steps": 2, "expert": 2, "elastic": True,
    "precision='autocast'": "autocast", "zero": 1,
    "precision": "bf16", "buffers": "own", "sequence": True, "sync_batch_norm": True, "keep_f32": ("norms",),
    "reduce": "low", "unit_scales": True,
}  # fmt: skip
"""A setting -> a value that is not its default."""


@each(("setting", "need"), [(setting, need) for setting, needs in NEEDS.items() for need in needs])
def test_each_row_is_refused_by_its_reason(setting: str, need: Need) -> None:
    more = {"data": 4, "shard": 2} if need.field == "zero" and setting == "local_steps" else {"data": 2}
    more |= {"tensor": 2} if need.field == "sequence" else {}
    chosen = {setting.partition("=")[0]: SET[setting], need.field: SET[need.field], **more}
    with pytest.raises(ValueError, match=re.escape(need.why)):
        up.Plan(**chosen)  # type: ignore[arg-type]


def test_each_field_is_described_and_each_axis_has_a_column_of_features() -> None:
    pages = "".join(page.read_text() for page in PAGE.parent.glob("*.md"))
    for name in up.Plan.__dataclass_fields__:
        line = re.search(rf"^        {name}: ", up.Plan.__doc__ or "", re.MULTILINE)
        assert line, f"Plan.{name} has no line under Args in the docstring of Plan"
        assert f"`{name}" in pages or f"{name}=" in pages, f"Plan.{name} stands in no page of docs/"
    for name in NAMES:
        assert any(getattr(plan, name) > 1 for plan in PLANS.values()), (
            f"{name}= has no column in docs/features.md: add a plan to PLANS of "
            "tests/torch/loop_features/feature_cells.py, and write the page"
        )


def test_the_page_shows_the_table() -> None:
    rows = [
        f"| `{setting}` | {' or '.join(f'`{need.field}={value!r}`' for value in need.values)} | {need.why} |"
        for setting, needs in NEEDS.items()
        for need in needs
    ]
    page = PAGE.read_text()
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/plans.md: ## What does not go together lacks\n" + "\n".join(missing)
    assert "\n".join(rows) in page, "docs/plans.md: ## What does not go together has rows in another order"
