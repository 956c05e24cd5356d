"""The library of virtual GPUs in the cache folder: no code that another user can have written is loaded."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.virtual import build

TORCH = Path("torch")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that were compiled, which are empty files."""
    made: list[Path] = []

    def compile_(torch: Path, library: Path, extra: tuple[str, ...]) -> None:
        library.unlink(missing_ok=True)
        library.touch(mode=0o700)
        made.append(library)

    monkeypatch.setattr(build, "_compile", compile_)
    return made


def built(cache: Path) -> Path:
    return build.build(TORCH, cache, "2.15.0")


def test_it_is_compiled_once_in_a_folder_of_this_user(tmp_path: Path, compiled: list[Path]) -> None:
    cache = tmp_path / "unisono"
    assert built(cache) == built(cache)
    assert len(compiled) == 1
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0


def others_may_write(library: Path) -> None:
    library.chmod(0o777)


def is_a_link(library: Path) -> None:
    library.rename(library.with_suffix(".away"))
    library.symlink_to(library.with_suffix(".away"))


def belongs_to_another(library: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    os.chown(library, 12345, 12345)


@pytest.mark.parametrize("change", [others_may_write, is_a_link, belongs_to_another])
def test_one_that_others_can_have_written_is_compiled_again(
    tmp_path: Path, compiled: list[Path], change: Callable[[Path], None]
) -> None:
    change(built(tmp_path))
    built(tmp_path)
    assert len(compiled) == 2


def test_a_folder_that_others_may_write_to_is_closed_to_them(tmp_path: Path, compiled: list[Path]) -> None:
    tmp_path.chmod(0o777)
    built(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_nothing_is_loaded_from_the_folder_of_another_user(tmp_path: Path, compiled: list[Path]) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(RuntimeError, match="belongs to user 12345.*XDG_CACHE_HOME"):
        built(tmp_path)
    assert not compiled


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path, compiled: list[Path]) -> None:
    library = built(tmp_path)
    library.unlink()
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    lock = tmp_path / (library.name + ".lock")
    lock.unlink(missing_ok=True)
    lock.symlink_to(mine)
    with pytest.raises(RuntimeError, match="cannot be used.*XDG_CACHE_HOME"):
        built(tmp_path)
    assert mine.read_text() == "mine"
