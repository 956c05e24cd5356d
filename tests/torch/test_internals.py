"""PyTorch's private names: where they are, since when, and what happens without one."""

import ast
import json
import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import versions  # noqa: E402
from loops import each  # noqa: E402
from python_runs import fine  # noqa: E402
from unisono import _native  # noqa: E402
from unisono.torch_internals import MissingPrivateName, PrivateName, catalog, find, need, optional  # noqa: E402
from unisono.torch_internals.version_names import EARLIER_METHODS, method_of  # noqa: E402

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "src" / "unisono"
APART = {"torch_internals", "virtual"}  # virtual GPUs are made of PyTorch's insides
STANDARD = {"_exit", "_thread", "_current_frames", "_getframe", "_asdict", "_member_map_"}
TORCHFTS = {"_uuid"}
PYTESTS = {
    "_setupstate",
    "_tmp_path_factory",
    "_run_exitfuncs",
    "_rawentry",
}  # of pytest and atexit, in unisono.testing
NAMES = [name for found in catalog.names().values() for name in found]
OLDEST, NEWEST = (2, 12), (2, 15)


def minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


@pytest.mark.skipif(not OLDEST <= minor(torch.__version__) <= NEWEST, reason="a version nobody has tried yet")
@each("name", NAMES)
def test_a_name_is_there_in_the_versions_that_the_table_says(name: PrivateName) -> None:
    here = minor(torch.__version__)
    expected = minor(name.since or "0.0") <= here <= minor(name.until or "99.0")
    if name.build:
        expected = {"NCCL": torch.distributed.is_nccl_available()}[name.build]
    assert (find(name) is not None) == expected


def test_names_are_described_once() -> None:
    assert len({name.path for name in NAMES}) == len(NAMES)
    assert all(name.purpose and name.without for name in NAMES)
    assert not catalog.missing()


@each("name", EARLIER_METHODS)
def test_pytorchs_process_groups_have_a_method_under_its_newest_name_or_the_one_before(name: str) -> None:
    assert callable(method_of(torch.distributed.ProcessGroup, name))
    with pytest.raises(AttributeError):
        method_of(torch.distributed.ProcessGroup, "not_a_method")


def test_private_names_are_in_one_package() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
    ours = {name for tree in trees.values() for name in defined(tree)} | {path.stem for path in trees}
    ours |= set(dir(_native.Engine)) | set(dir(_native.GroupBase)) | set(dir(_native.RequestBase))
    outside = {path: tree for path, tree in trees.items() if not APART & set(path.relative_to(SOURCES).parts)}
    found = [f"{path}:{where}" for path, tree in outside.items() for where in private(tree, ours)]
    assert not found, "\n".join(found)


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines or imports from another of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.Dict):  # the attributes of type(name, bases, attributes)
            yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("unisono")):
            yield from (alias.name for alias in node.names)


def private(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Uses of private names that are neither ours nor the standard library's, as "line: name"."""
    known = ours | STANDARD | TORCHFTS | PYTESTS
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            names = [node.attr] if node.attr not in known else []
        for name in names:
            parts = name.split(".")
            if (
                any(part.startswith("_") and part not in ("__future__", "_pytest", "_code") for part in parts)
                and "unisono" not in parts
                and name not in STANDARD
            ):
                yield f"{node.lineno}: {name}"


def test_the_page_has_the_table_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    page = versions.PAGE.read_text()
    runpy.run_path(str(versions.NAMES))
    rows = capsys.readouterr().out
    assert versions.with_tables(page, json.loads(versions.RESULTS.read_text()), rows) == page


NO_PARENT = PrivateName("torch:Tensor._nothing", purpose="test", without="nothing works")


def test_a_name_that_is_needed_says_what_cannot_run() -> None:
    with pytest.raises(
        MissingPrivateName, match=rf"PyTorch {torch.__version__[:4]}.*torch.Tensor._nothing: nothing works"
    ):
        need(NO_PARENT)


def test_a_module_whose_state_is_another_is_refused_by_name() -> None:
    from unisono.torch_internals import fsdp

    with pytest.raises(MissingPrivateName, match=r"zero >= 1 .*_get_fsdp_state"):
        fsdp.unwrap(torch.nn.Linear(1, 1))


def test_a_name_that_is_optional_warns_once_that_something_is_off() -> None:
    with pytest.warns(RuntimeWarning, match="has no torch.Tensor._nothing: nothing works"):
        assert optional(NO_PARENT) is None


@pytest.mark.skipif("UNISONO_TEST_LONG" not in os.environ, reason="takes long; make test-long runs it")
def test_without_a_name_the_rest_works(tmp_path: Path) -> None:
    """On a PyTorch that lacks one name a feature works, or its error names it; nothing crashes or hangs."""
    paths = [name.path for name in NAMES if find(name) is not None]
    printed = fine(HERE / "programs" / "hidden_names.py", tmp_path, *paths)
    outcomes = [json.loads(line) for line in printed.splitlines()]
    assert [each["path"] for each in outcomes] == paths
    for outcome in outcomes:
        path = outcome["path"].replace(":", ".")
        assert outcome["codes"] == [0, 0], outcome
        for said in outcome["said"]:
            told = said.pop("warnings")
            wrong = {key: text for key, text in said.items() if text != "works" and path not in text}
            assert not wrong or path in told, (path, wrong)
