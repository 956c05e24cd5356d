"""Every public name of torch.cuda works, differs, or is refused with a reason; as the page says."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "virtual-gpus-names.md"


pytestmark = pytest.mark.parametrize("machine", [2], indirect=True)


@pytest.fixture(scope="module")
def tried(machine: Any) -> dict[str, Any]:
    """Call every name, once for all tests."""
    ended = machine.run(HERE / "names.py", size=1, arguments=["--json"])
    assert ended.codes == [0], ended.text
    found: dict[str, Any] = json.loads(ended.printed[0].splitlines()[-1])
    return found


def test_no_name_is_missing_fails_or_crashes(tried: dict[str, Any]):
    rows = tried["rows"]
    wrong = [row for row in rows if row[2] not in ("works", "differs", "refused")]
    assert not wrong
    assert not [row for row in rows if row[2] == "refused" and not row[3]]


@pytest.mark.skipif(
    "+cpu" not in importlib.metadata.version("torch"), reason="the page is about the CPU build"
)
def test_the_page_is_as_generated(tried: dict[str, Any]):
    assert tried["page"] == PAGE.read_text(), (
        "run: python tests/virtual/names.py > docs/reference/virtual-gpus-names.md"
    )
