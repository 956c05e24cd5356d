"""Data-parallel training in NumPy: every step is one all_reduce of the gradient. Then a rank may be lost.

    unisono run -n 4 examples/language_model.py --lose-a-rank

The model adds a row of logits for each byte before a position, and learns Python's own source text by AdaGrad
(Duchi, Hazan, Singer, JMLR 2011). With --lose-a-rank the last rank kills itself; the others name it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sysconfig
import time
from pathlib import Path

import numpy as np

import unisono as un

VOCABULARY, CONTEXT, BATCH, RATE, ROUND = 256, 4, 256, np.float32(0.3), 40


def slope(weights: np.ndarray, contexts: np.ndarray, following: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss in nats per byte, and its gradient [CONTEXT, 256, 256]. contexts: [BATCH, CONTEXT]."""
    logits = weights[np.arange(CONTEXT), contexts].sum(axis=1)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    loss = -np.log(shares[np.arange(BATCH), following]).mean()
    shares[np.arange(BATCH), following] -= 1
    one_hot = np.eye(VOCABULARY, dtype=np.float32)[contexts]
    return float(loss), np.stack([one_hot[:, n].T @ shares for n in range(CONTEXT)]) / np.float32(BATCH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--lose-a-rank", action="store_true")
    args = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)
    with un.init_process_group() as world:
        random, losses = np.random.default_rng(world.rank), []
        weights, squares = np.zeros((2, CONTEXT, VOCABULARY, VOCABULARY), np.float32)
        begin = time.perf_counter()
        while world.broadcast_object(time.perf_counter() - begin < args.seconds):  # the clock of rank 0
            for _ in range(ROUND):
                chosen = windows[random.integers(len(windows), size=BATCH)]
                loss, gradient = slope(weights, chosen[:, :-1], chosen[:, -1])
                world.all_reduce(gradient, un.AVG)  # all the communication of a step
                squares += gradient * gradient
                weights -= RATE * gradient / (np.sqrt(squares) + np.float32(1e-8))
                losses.append(loss)
            if world.rank == 0:
                step_ms = 1e3 * (time.perf_counter() - begin) / len(losses)
                print(f"step {len(losses):>5}   loss {losses[-1]:.3f}   {step_ms:.1f} ms a step", flush=True)
        digests = set(world.all_gather_object(hashlib.sha256(weights.tobytes()).hexdigest()))
        assert len(digests) == 1
        if world.rank == 0:
            print(f"loss {losses[0]:.2f} -> {np.mean(losses[-20:]):.2f}, the same bits on {world.size} ranks")
        if args.lose_a_rank and world.rank == world.size - 1:
            print(f"kill -9 {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if args.lose_a_rank:
            world.barrier()


if __name__ == "__main__":
    main()
