"""One rank of the demo's NumPy part: `unisono run -n 4 -m unisono.commands.demo.train_numpy --seconds 20`.

Data-parallel training with one all-reduce per step; then the last rank kills itself, and the others print
their errors. The model adds a row of logits for each of the bytes before a position.

Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", JMLR 2011 (AdaGrad).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time

import numpy as np
from numpy.typing import NDArray

import unisono as un
from unisono.commands.demo.corpus import read_corpus
from unisono.engine.group import Group

Floats = NDArray[np.float32]

VOCABULARY, CONTEXT, BATCH, RATE = 256, 4, 256, 0.3
CORPUS_BYTES = 8 << 20
ROUND_STEPS = 40
KILL_IN_S = 0.2


def slope(weights: Floats, contexts: NDArray[np.uint8], following: NDArray[np.uint8]) -> tuple[float, Floats]:
    """The mean cross-entropy in nats per byte, and its gradient.

    Shapes: weights and gradient [CONTEXT, 256, 256], contexts [batch, CONTEXT], following [batch].
    """
    rows = np.arange(len(following))
    logits: Floats = weights[np.arange(CONTEXT), contexts].sum(axis=1)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    loss = -float(np.log(shares[rows, following]).mean())
    shares[rows, following] -= 1
    one_hot = np.eye(VOCABULARY, dtype=np.float32)[contexts]
    sums = [one_hot[:, place].T @ shares for place in range(CONTEXT)]
    return loss, np.stack(sums) / np.float32(len(rows))


def train(world: Group, seconds: float) -> None:
    """Train; rank 0 prints the progress.

    Raises:
        SystemExit: the ranks ended with different parameters.
    """
    windows = np.lib.stride_tricks.sliding_window_view(
        np.frombuffer(read_corpus(CORPUS_BYTES), np.uint8), CONTEXT + 1
    )
    random, losses = np.random.default_rng(world.rank), []
    weights, squares = np.zeros((2, CONTEXT, VOCABULARY, VOCABULARY), np.float32)
    say(world, f"{weights.size:,} parameters, {BATCH * world.size:,} bytes of Python source per step")
    begin = time.perf_counter()
    while world.broadcast_object(time.perf_counter() - begin < seconds):  # the clock of rank 0
        for _ in range(ROUND_STEPS):
            chosen = windows[random.integers(len(windows), size=BATCH)]
            loss, gradient = slope(weights, chosen[:, :-1], chosen[:, -1])
            world.all_reduce(gradient, un.AVG)  # all the communication of a step
            squares += gradient * gradient
            weights -= np.float32(RATE) * gradient / (np.sqrt(squares) + np.float32(1e-8))
            losses.append(loss)
        step_ms = 1e3 * (time.perf_counter() - begin) / len(losses)
        say(world, f"step {len(losses):>5}   loss {losses[-1]:.3f}   {step_ms:.1f} ms a step")
    ends = np.array([losses[0], np.mean(losses[-20:])])
    world.all_reduce(ends, un.AVG)
    say(world, f"loss {ends[0]:.2f} -> {ends[1]:.2f} nats per byte in {len(losses)} steps")
    digests = set(world.all_gather_object(hashlib.sha256(weights.tobytes()).hexdigest()))
    say(world, f"parameters on {world.size} ranks: {'the same bits' if len(digests) == 1 else 'DIFFERENT'}")
    if len(digests) > 1:
        raise SystemExit("the ranks ended with different parameters")


def say(world: Group, text: str) -> None:
    """Print a line on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def lose_a_rank(world: Group) -> None:
    """The last rank ends itself by SIGKILL; the others print the error of the call that they are in."""
    last, x = world.size - 1, np.ones(1000, np.float32)
    say(world, f"now rank {last} is killed while the others wait for it in all_reduce")
    at = world.broadcast_object(time.monotonic() + KILL_IN_S, src=last)
    if world.rank == last:
        print(f"kill -9 {os.getpid()}", flush=True)
        time.sleep(max(0.0, at - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_reduce(x, un.AVG)
    except un.PeerLost as error:
        if error.rank != last:
            raise
        print(f"{(time.monotonic() - at) * 1e3:.0f} ms later: PeerLost: {error}", flush=True)


def main() -> None:
    """Join, train, lose a rank."""
    parser = argparse.ArgumentParser(prog="python -m unisono.commands.demo.train_numpy")
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    try:
        with un.init_process_group() as world:
            train(world, args.seconds)
            if world.size > 1:
                lose_a_rank(world)
    except KeyboardInterrupt:
        os._exit(130)  # at once: there is nothing to save


if __name__ == "__main__":
    main()
