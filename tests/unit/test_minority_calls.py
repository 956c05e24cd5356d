"""Who called something else than most, in words."""

from loops import each
from unisono.engine.diagnosis.call_text import odd_ones
from unisono.engine.diagnosis.report import CallDescription

SUM = CallDescription("all_reduce", ("float64[4]", "SUM", "algorithm=ring"))
MAX = CallDescription("all_reduce", ("float64[4]", "MAX", "algorithm=ring"))
OTHER = CallDescription("broadcast", ("float64[4]", "root=0", "algorithm=direct"))


@each(
    ("calls", "said"),
    [
        ([SUM, SUM, OTHER], "rank 2 called broadcast, the others all_reduce"),
        ([MAX, SUM, SUM], "rank 0 called all_reduce with MAX, the others with SUM"),
        ([SUM, MAX, SUM, MAX, SUM], "ranks 1, 3 called all_reduce with MAX, the others with SUM"),
        ([SUM, None, OTHER, SUM], "rank 2 called broadcast, most others all_reduce"),
        ([SUM, OTHER], ""),  # who is to say which of two is odd
        ([SUM, SUM, MAX, OTHER], ""),  # as many as the rest
        ([SUM, SUM, SUM, MAX, OTHER], ""),  # two odd ones, each in its own way: the table says it better
        ([SUM, SUM], ""),
        ([None, None], ""),
    ],
)
def test_minority_calls_are_named(calls: list[CallDescription | None], said: str) -> None:
    def name(*ranks: int) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    assert odd_ones(calls, name) == said
