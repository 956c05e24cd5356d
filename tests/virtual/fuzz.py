"""`fuzz.py PROGRAMS SEED`: random programs of 20 operations over several devices, against the CPU.

Every program runs twice: once on the CPU, once with each tensor on some virtual GPU. An operation on tensors
of one device must give the CPU's bits. One on tensors of two devices must raise, unless the odd one is a
number on the CPU. At the end nothing may be left in any device's books.
"""

import gc
import random
import sys
from collections.abc import Callable

from unisono import virtual

virtual.enable(4, "256M")

import torch  # noqa: E402

LENGTH = 20
DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cpu")
Pair = tuple[torch.Tensor, torch.Tensor]  # on the CPU, and where it is

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": torch.neg,
    "exp": lambda x: torch.exp(x.clamp(max=3)),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "t": lambda x: x.t(),
    "clone": torch.clone,
    "sum": lambda x: x.sum(0, keepdim=True),
    "sort": lambda x: x.sort(0)[0],
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "slice": lambda x: x[:2],
    "flip": lambda x: x.flip(0),
    "contiguous": lambda x: x.t().contiguous(),
    "double": lambda x: x.double().float(),
    "half": lambda x: x.half().float(),
    "view": lambda x: x.reshape(-1).view(-1, 1)[:4].expand(4, 4),
    "unbind": lambda x: x.unbind(0)[0].repeat(4, 1),
    "topk": lambda x: x.topk(1, 0)[0],
    "diag": lambda x: x[:, :1].expand(-1, 2),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 0)),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "mask": lambda x: x.masked_fill(x > 0.5, 2.0),
    "add_": lambda x: x.clone().add_(1),
    "max": lambda x: x.max(1, keepdim=True)[0],
    "norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "gather": lambda x: x[torch.zeros(2, dtype=torch.long)],
    "round": lambda x: (x * 3).round(),
    "split": lambda x: torch.cat(x.split(1)),
    "nonzero": lambda x: (x > 0).nonzero().float()[:3],
    "index_put": lambda x: x.clone().index_fill_(0, torch.zeros(1, dtype=torch.long, device=x.device), 5),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "cat": lambda x, y: torch.cat([x, y]),
    "mm": lambda x, y: x @ y,
    "add_": lambda x, y: x.clone().add_(y),
    "compare": lambda x, y: (x > y).float(),
    "atan2": torch.atan2,
}


def run(draw: random.Random) -> str:
    """Run one program; return what is wrong with it, "" if nothing is."""
    pool: list[Pair] = [made(draw) for _ in range(4)]
    for _ in range(LENGTH):
        kind = draw.random()
        if kind < 0.15:
            cpu, there = draw.choice(pool)
            pool.append((cpu, there.to(draw.choice(DEVICES))))
            continue
        chosen = UNARY if kind < 0.6 else BINARY
        name = draw.choice(list(chosen))
        pairs = [draw.choice(pool) for _ in range(1 if chosen is UNARY else 2)]
        wrong, result = compare(name, chosen[name], pairs)
        if wrong:
            return wrong
        if result is not None and 0 < result[0].numel() < 1000:
            pool.append(result)
    return ""


def made(draw: random.Random) -> Pair:
    shape = draw.choice([(4, 4), (4, 4), (2, 4), (1, 4), (4, 1)])
    cpu = torch.randn(shape)
    return cpu, cpu.to(draw.choice(DEVICES))


def compare(name: str, operation: Callable[..., torch.Tensor], pairs: list[Pair]) -> tuple[str, Pair | None]:
    """Run one operation both ways."""
    expected, error = attempt(operation, [pair[0] for pair in pairs])
    got, other = attempt(operation, [pair[1] for pair in pairs])
    places = {str(there.device) for _, there in pairs}
    if len(places) > 1 and not any(there.is_cpu and there.dim() == 0 for _, there in pairs):
        refused = other is not None and ("same device" in str(other) or error is not None)
        return ("" if refused else f"{name} took tensors of {sorted(places)}"), None
    if error is not None:
        same = other is not None and str(other) == str(error)
        return ("" if same else f"{name}: {error!r} on the CPU, {other!r} on {places}"), None
    if other is not None:
        return f"{name} on {places}: {other!r}", None
    if str(got.device) not in places:
        return f"{name} on {places} gave a tensor on {got.device}", None
    laid = all(
        cpu.stride() == there.stride() for cpu, there in pairs
    )  # a copy may be laid out in another way
    alike = got.shape == expected.shape and bits(got) == bits(expected)
    alike = alike and (not laid or got.stride() == expected.stride())
    return ("" if alike else f"{name} on {places} differs"), (expected, got)


def bits(x: torch.Tensor) -> bytes:
    return x.cpu().contiguous().numpy().tobytes()


def attempt(
    operation: Callable[..., torch.Tensor], arguments: list[torch.Tensor]
) -> tuple[torch.Tensor, Exception | None]:
    try:
        return operation(*arguments), None
    except Exception as error:
        return torch.empty(0), error


def main(programs: int, seed: int) -> int:
    wrong = 0
    for number in range(seed, seed + programs):
        torch.manual_seed(number)
        text = run(random.Random(number))
        if text:
            wrong += 1
            print(f"program {number}: {text}", flush=True)
    gc.collect()
    left = {device: torch.cuda.memory_allocated(device) for device in DEVICES[:3]}
    print(f"{programs} programs, {wrong} wrong, left in the books: {sum(left.values())} bytes")
    return int(wrong > 0 or any(left.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
