"""Schedules in files, run by the engine: right sums, and wrong ones refused before a byte moves."""

from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un
from loops import each, everywhere
from unisono.errors import PlanError
from unisono.plans import make
from unisono.schedules import save
from unisono.schedules.recipe import Recipe, written


@each("name", ["a.xml", "a.goal", "a.0.et"])
@each("algorithm", ["ring", "halving_doubling", "double_tree", "one_shot"])
@everywhere
def test_all_reduce_by_a_file(name: str, algorithm: str, tmp_path: Path) -> None:
    if name.endswith(".et"):
        pytest.importorskip("google.protobuf")
    file = tmp_path / f"{algorithm}-{name}"
    save(make("all_reduce", algorithm, 3), file)

    def work(group: un.Group) -> None:
        for numel in (0, 1, 5, 4099, 100_000):
            for op, total in ((un.SUM, 6), (un.MAX, 3), (un.AVG, 2), (un.premul_sum(2.0), 12)):
                group.all_reduce(x := np.full(numel, group.rank + 1.0), op, algorithm=str(file))
                assert (x == total).all()

    ranks.threads(3, work)


@each(
    "collective, algorithm", [("all_gather", "bruck"), ("reduce_scatter", "ring"), ("all_to_all", "pairwise")]
)
@everywhere
def test_other_collectives_by_a_file(collective: str, algorithm: str, tmp_path: Path) -> None:
    file = tmp_path / f"{collective}.xml"
    save(make(collective, algorithm, 4), file)

    def work(group: un.Group) -> None:
        given = np.arange(4.0 * 33).reshape(4, 33) + 1000 * group.rank
        if collective == "all_gather":
            found = group.all_gather(given[0], algorithm=str(file))
            assert (found == [np.arange(33) + 1000 * rank for rank in range(4)]).all()
        elif collective == "all_to_all":
            found = group.all_to_all(given, algorithm=str(file))
            assert (found == [np.arange(33) + 33 * group.rank + 1000 * rank for rank in range(4)]).all()
        else:
            found = group.reduce_scatter(given, algorithm=str(file))
            assert (found == 4 * (np.arange(33) + 33 * group.rank) + 6000).all()

    ranks.threads(4, work)


PARTS = """<algo name="t" nchunksperloop="6" ngpus="2" coll="allgather" inplace="1">
<gpu id="0" i_chunks="3" o_chunks="6" s_chunks="0"><tb id="0" send="1" recv="1" chan="0">
<step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="3" depid="-1" deps="-1"/>
<step s="1" type="r" srcbuf="o" srcoff="3" dstbuf="o" dstoff="3" cnt="3" depid="-1" deps="-1"/>
</tb></gpu>
<gpu id="1" i_chunks="3" o_chunks="6" s_chunks="0"><tb id="0" send="0" recv="0" chan="0">
<step s="0" type="s" srcbuf="o" srcoff="3" dstbuf="o" dstoff="3" cnt="3" depid="-1" deps="-1"/>
<step s="1" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="3" depid="-1" deps="-1"/>
</tb></gpu>
</algo>
"""


@everywhere
def test_blocks_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "parts.xml"
    file.write_text(PARTS)

    def work(group: un.Group) -> None:
        for numel in (3, 300, 99_999):
            mine = np.arange(numel) + group.rank * numel
            assert (group.all_gather(mine, algorithm=str(file)).ravel() == np.arange(2 * numel)).all()
            apart = [np.zeros(numel, mine.dtype) for _ in range(2)]
            group.all_gather(apart, mine, algorithm=str(file))
            assert (np.concatenate(apart) == np.arange(2 * numel)).all()
        with pytest.raises(ValueError, match="cannot be cut into 3 equal chunks"):
            group.all_gather(np.ones(7), algorithm=str(file))
        group.barrier()

    ranks.threads(2, work)


def test_a_wrong_file_is_refused_on_every_rank_and_the_group_stays_usable(tmp_path: Path) -> None:
    right = tmp_path / "right.xml"
    save(make("all_reduce", "ring", 2), right)
    wrong = tmp_path / "wrong.xml"
    wrong.write_text(right.read_text().replace('type="rrc"', 'type="r"'))
    damaged = tmp_path / "damaged.xml"
    damaged.write_text(right.read_text()[:300])

    def work(group: un.Group) -> None:
        with pytest.raises(PlanError, match="refused before a byte has moved.*rank 0") as caught:
            group.all_reduce(np.ones(5), algorithm=str(wrong))
        assert "lacks the contribution of rank" in str(caught.value)
        with pytest.raises(ValueError, match=r"damaged\.xml:\d+: "):
            group.all_reduce(np.ones(5), algorithm=str(damaged))
        with pytest.raises(PlanError, match="a schedule of all_reduce, expected all_gather"):
            group.all_gather(np.ones(5), algorithm=str(right))
        with pytest.raises(FileNotFoundError):
            group.all_reduce(np.ones(5), algorithm=str(tmp_path / "none.xml"))
        with pytest.raises(ValueError, match="ends in"):
            group.all_reduce(np.ones(5), algorithm="file.zip")
        with pytest.raises(ValueError, match="codec= needs a named algorithm"):
            group.all_reduce(np.ones(5, np.float32), algorithm=str(right), codec="bf16")
        group.all_reduce(x := np.ones(5), algorithm=str(right))
        assert (x == 2).all()

    ranks.threads(2, work)


def test_a_schedule_of_another_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "three.xml"
    save(make("all_reduce", "ring", 3), file)

    def work(group: un.Group) -> None:
        with pytest.raises(PlanError, match="a schedule of 3 ranks, expected 2"):
            group.all_reduce(np.ones(5), algorithm=str(file))

    ranks.threads(2, work)


def test_ranks_with_different_files_get_a_mismatch(tmp_path: Path) -> None:
    for rank, algorithm in enumerate(("ring", "binomial")):
        (tmp_path / str(rank)).mkdir()
        save(make("all_reduce", algorithm, 2), tmp_path / str(rank) / "plan.xml")

    def work(group: un.Group) -> None:
        with pytest.raises(un.Mismatch, match=r"algorithm plan\.xml, plan "):
            group.all_reduce(np.ones(3), algorithm=str(tmp_path / str(group.rank) / "plan.xml"))

    ranks.threads(2, work)


def test_a_recipe_takes_groups_in_place_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "best.toml"
    file.write_text(written(Recipe("all_reduce", "hierarchical", 4, 0, (0, 0, 1, 1)), "for two hosts"))

    def work(group: un.Group) -> None:
        group.all_reduce(x := np.full(1000, group.rank + 1.0), algorithm=str(file))
        assert (x == 10).all()

    ranks.threads(4, work)
    file.write_text('collective = "all_reduce"\nalgorithm = "hierarchical"\nranks = 4\nhosts = "3x3"\n')
    with pytest.raises(PlanError, match="hosts are 9 ranks, expected 4"):
        from unisono.schedules import load

        load(file)
