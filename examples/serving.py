"""A scheduler and its workers: requests go to all workers, weights to those that want the newest.

    unisono run -n 3 examples/serving.py

Rank 0 schedules. The others read each batch in place, in shared memory, and sleep while there is none.
"""

from __future__ import annotations

import numpy as np

import unisono as un

BATCHES, ROWS, WIDTH = 5, 64, 512


def schedule(batches: un.Queue, weights: un.Queue) -> None:
    """Put each batch once for all workers, and sometimes new weights."""
    for number in range(BATCHES):
        if number % 2 == 0:
            weights.put({"version": number, "weights": np.full(WIDTH, float(number + 1))})
        batches.put({"number": number, "version": number - number % 2, "rows": np.ones((ROWS, WIDTH))})


def work(batches: un.Queue, weights: un.Queue) -> list[float]:
    """Compute with views of the writer's arrays; they are read-only."""
    outputs: list[float] = []
    newest = weights.get()
    for batch in batches:
        while newest["version"] < batch["version"]:
            newest = weights.get()
        outputs.append(float((batch["rows"] @ newest["weights"]).sum()))
        assert not batch["rows"].flags.writeable
    return outputs


def main() -> None:
    with un.init_process_group() as world:
        batches, weights = world.queue(bytes=4 << 20), world.queue(bytes=1 << 20, keep="latest")
        with weights, batches:
            if world.rank == 0:
                schedule(batches, weights)
            else:
                outputs = work(batches, weights)
                assert len(outputs) == BATCHES
                assert outputs[-1] >= ROWS * WIDTH * float(BATCHES)
                print(f"worker {world.rank}: {outputs[-1]:.0f}")


if __name__ == "__main__":
    main()
