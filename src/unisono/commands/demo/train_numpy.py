"""One rank of the demo's NumPy part: `unisono run -n 4 -m unisono.commands.demo.train_numpy --seconds 20`.

Data-parallel training with one all-reduce per step; then the last rank kills itself, and the others print
their errors. The model embeds the bytes before a position; one hidden layer predicts the next byte.

Source: Bengio et al., "A Neural Probabilistic Language Model", JMLR 2003; Kingma and Ba, "Adam", 2015.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unisono as un
from unisono.commands.demo.corpus import printable, read_corpus
from unisono.engine.group import Group

__all__ = ["Adam", "NextByte", "main"]

Floats = NDArray[np.float32]

VOCABULARY, CONTEXT, EMBEDDED, HIDDEN = 256, 12, 16, 192
SHAPES = {
    "embedding": (VOCABULARY, EMBEDDED),
    "hidden_weight": (CONTEXT * EMBEDDED, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "out_weight": (HIDDEN, VOCABULARY),
    "out_bias": (VOCABULARY,),
}
NUMEL = [int(np.prod(shape)) for shape in SHAPES.values()]
CORPUS_BYTES, SAMPLE_BYTES, BATCH = 8 << 20, 300, 256
RATE, WARMUP_STEPS = 3e-3, 20
PILOT_STEPS = 10  # before the training: how many steps fit into the time?
LINES = 12  # that report progress
CALLS_BEFORE_THE_KILL = 100
KILL_IN_S = 0.2


def cut(flat: Floats) -> dict[str, Floats]:
    """The arrays of SHAPES as views of a flat one: one all-reduce takes the whole gradient."""
    parts = np.split(flat, np.cumsum(NUMEL)[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


class NextByte:
    """The model: `parameters`, and `gradient` after each call of `loss`, flat."""

    def __init__(self, seed: int) -> None:
        self.parameters, self.gradient = np.zeros((2, sum(NUMEL)), np.float32)
        self.of, self.slopes = cut(self.parameters), cut(self.gradient)
        rng = np.random.default_rng(seed)
        for name, scale in (("embedding", 1.0), ("hidden_weight", 0.07), ("out_weight", 0.007)):
            self.of[name][:] = scale * rng.standard_normal(SHAPES[name], np.float32)

    def loss(self, contexts: NDArray[np.uint8], following: NDArray[np.uint8]) -> float:
        """Mean cross-entropy in nats per byte. Shapes: contexts [batch, CONTEXT], following [batch]."""
        of, slopes, rows = self.of, self.slopes, np.arange(len(following))
        joined, hidden, shares = self._forward(contexts)
        loss = -float(np.log(shares[rows, following]).mean())
        shares[rows, following] -= 1
        shares /= len(following)
        np.matmul(hidden.T, shares, out=slopes["out_weight"])
        slopes["out_bias"][:] = shares.sum(axis=0)
        inner = (shares @ of["out_weight"].T) * (1 - hidden * hidden)
        np.matmul(joined.T, inner, out=slopes["hidden_weight"])
        slopes["hidden_bias"][:] = inner.sum(axis=0)
        one_hot = np.eye(VOCABULARY, dtype=np.float32)[contexts.reshape(-1)]
        outer = (inner @ of["hidden_weight"].T).reshape(-1, EMBEDDED)
        np.matmul(one_hot.T, outer, out=slopes["embedding"])
        return loss

    def generate(self, prompt: bytes, nbytes: int, *, temperature: float, seed: int) -> bytes:
        """Continue `prompt` by `nbytes` sampled bytes; the result includes the prompt."""
        rng, text = np.random.default_rng(seed), bytearray(prompt)
        for _ in range(nbytes):
            before = bytes(text[-CONTEXT:]).rjust(CONTEXT, b"\n")
            shares = self._forward(np.frombuffer(before, np.uint8)[None])[2][0].astype(np.float64)
            shares **= 1 / temperature
            text.append(int(rng.choice(VOCABULARY, p=shares / shares.sum())))
        return bytes(text)

    def _forward(self, contexts: NDArray[np.uint8]) -> tuple[Floats, Floats, Floats]:
        of = self.of
        joined: Floats = of["embedding"][contexts].reshape(len(contexts), -1)
        hidden: Floats = np.tanh(joined @ of["hidden_weight"] + of["hidden_bias"])
        logits: Floats = hidden @ of["out_weight"] + of["out_bias"]
        shares: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
        return joined, hidden, shares / shares.sum(axis=1, keepdims=True)


class Adam:
    """Adam over one flat array."""

    def __init__(self, parameters: Floats) -> None:
        self._parameters = parameters
        self._mean, self._square = np.zeros_like(parameters), np.zeros_like(parameters)
        self._steps = 0

    def step(self, gradient: Floats, rate: float) -> None:
        """Move the parameters against the gradient, in place."""
        self._steps += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.01 * (gradient * gradient - self._square)
        mean: Any = self._mean / (1 - 0.9**self._steps)
        square: Any = self._square / (1 - 0.99**self._steps)
        self._parameters -= rate * mean / (np.sqrt(square) + 1e-8)


def train(world: Group, seconds: float, seed: int) -> None:
    """Train; rank 0 prints the progress, and what the model writes.

    Raises:
        SystemExit: the ranks ended with different parameters.
    """
    data = np.frombuffer(read_corpus(CORPUS_BYTES), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(data, CONTEXT + 1)
    random, model = np.random.default_rng([seed, world.rank]), NextByte(seed)
    adam = Adam(model.parameters)

    def step(rate: float) -> float:
        chosen = windows[random.integers(len(windows), size=BATCH)]
        loss = model.loss(chosen[:, :-1], chosen[:, -1])
        world.all_reduce(model.gradient, un.AVG)  # all the communication of a step
        adam.step(model.gradient, rate)
        return loss

    begin = time.perf_counter()
    for _ in range(PILOT_STEPS):
        step(0.0)
    fitting = int(seconds * PILOT_STEPS / (time.perf_counter() - begin))
    steps = int(world.broadcast_object(max(PILOT_STEPS, fitting), src=0))
    say(
        world, f"{model.parameters.size:,} parameters, {BATCH * world.size:,} bytes of Python source per step"
    )
    losses, begin = [], time.perf_counter()
    for number in range(1, steps + 1):
        losses.append(step(RATE * min(number / WARMUP_STEPS, 1 - (number - 1) / steps)))
        if number == 1 or number % -(-steps // LINES) == 0:
            step_ms = 1e3 * (time.perf_counter() - begin) / number
            say(world, f"step {number:>5} of {steps}   loss {losses[-1]:.3f}   {step_ms:.1f} ms a step")
    digests = world.all_gather_object(hashlib.sha256(model.parameters.tobytes()).hexdigest())
    ends = np.array([losses[0], np.mean(losses[-20:])])
    world.all_reduce(ends, un.AVG)
    verdict = "the same bits" if len(set(digests)) == 1 else "DIFFERENT"
    say(world, f"loss {ends[0]:.2f} -> {ends[1]:.2f} nats per byte in {steps} steps")
    say(world, f"parameters on {world.size} ranks: {verdict}, sha256 {digests[0][:12]}")
    if len(set(digests)) > 1:
        raise SystemExit("the ranks ended with different parameters")
    if world.rank == 0:
        sample = model.generate(b"def ", SAMPLE_BYTES, temperature=0.8, seed=seed)
        say(world, f"what the model writes, given 'def ':\n\n{printable(sample)}\n")


def say(world: Group, text: str) -> None:
    """Print a line on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def lose_a_rank(world: Group) -> None:
    """The last rank ends itself by SIGKILL; the others print the error of the call that they are in."""
    last, x = world.size - 1, np.ones(1000, np.float32)
    say(world, f"now rank {last} is killed while the others wait for it in all_reduce")
    for _ in range(CALLS_BEFORE_THE_KILL):
        world.all_reduce(x, un.AVG)
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


def main() -> int:
    """Join, train, lose a rank."""
    parser = argparse.ArgumentParser(prog="python -m unisono.commands.demo.train_numpy")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        with un.init_process_group() as world:
            train(world, args.seconds, args.seed)
            if world.size > 1:
                lose_a_rank(world)
    except KeyboardInterrupt:
        os._exit(130)  # at once: there is nothing to save
    return 0


if __name__ == "__main__":
    sys.exit(main())
