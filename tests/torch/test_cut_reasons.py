"""The reasons that a cut shows are the same in every run, whatever the order of its sets."""

import random

import pytest

torch = pytest.importorskip("torch")

from inside_parallel import prove_cut  # noqa: E402
from loops import each  # noqa: E402
from unisono.parallel.graph.indices import Index  # noqa: E402
from zoo.own import Mixer  # noqa: E402

IDS = torch.zeros(4, 8, dtype=torch.long)


@each("sequence", [False, True])
def test_reasons_do_not_depend_on_the_order_of_sets(sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = set()
    for seed in range(6):
        chance, known = random.Random(seed), dict[int, int]()

        def any_hash(index: Index, chance: random.Random = chance, known: dict[int, int] = known) -> int:
            return known.setdefault(id(index), chance.getrandbits(32))

        monkeypatch.setattr(Index, "__hash__", any_hash)
        texts.add(str(prove_cut(Mixer(), IDS, 2, sequence=sequence)))
    assert len(texts) == 1
