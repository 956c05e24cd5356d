"""Power iteration that goes on when ranks die, and takes newcomers in.

    PAUSE_S=0.1 unisono run --elastic 2:4 --respawn 3 --token-file t examples/elastic.py     (kill -9 PID)
    unisono run --join HOST:PORT --token-file t examples/elastic.py            (an address that it prints)
    unisono run --elastic 2:4 --respawn 3 examples/elastic.py --lose-a-rank

Each rank multiplies its rows of a matrix by the current vector. The vector is the state: all have it, and a
newcomer gets it from one of them. After each change the rows are divided among the ranks that are there. With
--lose-a-rank one of them kills itself; `--respawn` replaces it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import numpy as np

import unisono as un

N, STEPS = 400, 200
PAUSE_S = float(os.environ.get("PAUSE_S", "0.01"))
NEW = "UNISONO_JOIN" in os.environ


def matrix() -> np.ndarray:
    """The same symmetric matrix on every rank; its largest eigenvalue is near N / 2."""
    found = np.random.default_rng(1).random((N, N))
    return (found + found.T) / 2


def iterate(group: un.Group, a: np.ndarray, state: dict[str, np.ndarray], step: int) -> int:
    """One multiplication, divided among the ranks; returns the number of the next one."""
    first, last = group.rank * N // group.size, (group.rank + 1) * N // group.size
    product = np.zeros(N)
    product[first:last] = a[first:last] @ state["x"]
    group.all_reduce(product)
    state["value"] = np.array(np.linalg.norm(product))
    state["x"] = product / state["value"]
    return step + 1


def main() -> None:
    """Find the largest eigenvalue."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lose-a-rank", action="store_true")
    lose = parser.parse_args().lose_a_rank and not NEW
    a = matrix()
    step, state = 0, {"x": np.ones(N) / np.sqrt(N), "value": np.array(0.0)}
    for group in un.elastic():
        with group:
            latest = np.argmax(group.all_gather_object(step))  # a rank may have missed the last step
            step, state = group.broadcast_object((step, state), int(latest))
            if group.rank == 0:
                names = "; ".join(f"former rank {one.rank} {one.why}, {one.last_seen}" for one in group.left)
                print(f"generation {group.generation}, step {step}: {group.size} ranks. {names}", flush=True)
            while step < STEPS:
                if lose and group.generation == 0 and group.rank == group.size - 1 and step == STEPS // 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                step = iterate(group, a, state, step)
                time.sleep(PAUSE_S)
                if step % 10 == 0 and group.waiting():
                    break
    expected = np.abs(np.linalg.eigvalsh(a)).max()
    assert np.isclose(state["value"], expected), (state["value"], expected)
    print(f"the largest eigenvalue is {float(state['value']):.6f}, found by {group.size} ranks", flush=True)


if __name__ == "__main__":
    main()
