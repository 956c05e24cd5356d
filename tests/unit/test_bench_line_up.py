"""Where the ranks of a measured side start from together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from unisono.commands.bench.start_barrier import StartBarrier, barrier_memory


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
