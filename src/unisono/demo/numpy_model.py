"""A byte-level language model in NumPy, with a hand-written gradient, and Adam.

The bytes before a position are embedded and concatenated; one hidden layer predicts the next byte.

Source: Bengio et al., "A Neural Probabilistic Language Model", JMLR 2003; Kingma and Ba, "Adam", 2015.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Adam", "NextByte"]

Floats = NDArray[np.float32]

VOCABULARY = 256
CONTEXT = 12
EMBEDDED = 16
HIDDEN = 192
SHAPES = {
    "embedding": (VOCABULARY, EMBEDDED),
    "hidden_weight": (CONTEXT * EMBEDDED, HIDDEN),
    "hidden_bias": (HIDDEN,),
    "out_weight": (HIDDEN, VOCABULARY),
    "out_bias": (VOCABULARY,),
}


class Flat:
    """One array that holds arrays of all SHAPES: one all-reduce takes the whole gradient."""

    def __init__(self) -> None:
        self.array: Floats = np.zeros(sum(int(np.prod(shape)) for shape in SHAPES.values()), np.float32)
        self.parts: dict[str, Floats] = {}
        start = 0
        for name, shape in SHAPES.items():
            stop = start + int(np.prod(shape))
            self.parts[name] = self.array[start:stop].reshape(shape)
            start = stop


class NextByte:
    """The model: `parameters`, and `gradient` after each call of `loss`."""

    def __init__(self, seed: int) -> None:
        self.parameters, self.gradient = Flat(), Flat()
        rng = np.random.default_rng(seed)
        for name, part in self.parameters.parts.items():
            if name.endswith(("weight", "embedding")):
                scale = 1.0 if name == "embedding" else part.shape[0] ** -0.5
                part[:] = rng.standard_normal(part.shape, np.float32) * np.float32(scale)
        self.parameters.parts["out_weight"] *= 0.1

    def loss(self, contexts: NDArray[np.uint8], following: NDArray[np.uint8]) -> float:
        """Mean cross-entropy in nats per byte. Shapes: contexts [batch, CONTEXT], following [batch]."""
        of, grad, batch = self.parameters.parts, self.gradient.parts, len(following)
        joined, hidden, shares = self._forward(contexts)
        rows = np.arange(batch)
        loss = -float(np.log(shares[rows, following]).mean())
        shares[rows, following] -= 1
        shares /= batch
        np.matmul(hidden.T, shares, out=grad["out_weight"])
        grad["out_bias"][:] = shares.sum(axis=0)
        inner = (shares @ of["out_weight"].T) * (1 - hidden * hidden)
        np.matmul(joined.T, inner, out=grad["hidden_weight"])
        grad["hidden_bias"][:] = inner.sum(axis=0)
        outer = (inner @ of["hidden_weight"].T).reshape(-1, EMBEDDED)
        one_hot = np.zeros((len(outer), VOCABULARY), np.float32)
        one_hot[np.arange(len(outer)), contexts.reshape(-1)] = 1
        np.matmul(one_hot.T, outer, out=grad["embedding"])
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
        of = self.parameters.parts
        joined: Floats = of["embedding"][contexts].reshape(len(contexts), -1)
        hidden: Floats = np.tanh(joined @ of["hidden_weight"] + of["hidden_bias"])
        logits: Floats = hidden @ of["out_weight"] + of["out_bias"]
        shares: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return joined, hidden, shares


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
