"""Optimizers of PyTorch whose parameters are cut: bits as with DTensors, weights as in one process."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.plain_training import local
from parallel.run_features import in_group, made, whole

STEPS = 2
SHARDED, CUT = up.Plan(data=2, zero=3), up.Plan(tensor=2)
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2),
    "AdamW, foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=1e-2, t0=1),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-2),
}


def trained(plan: up.Plan, make: Callable[[Any], optim.Optimizer]) -> up.Run:
    run = made("mlp", plan, make)
    for batch in run.shard(models.vector_batches(STEPS, 4)):
        run.step(batch)
    return run


def on_dtensors(make: Callable[[Any], optim.Optimizer]) -> Callable[[Any], optim.Optimizer]:
    """The same optimizer with a hook, which reads each parameter as the run has it."""

    def hooked(parameters: Any) -> optim.Optimizer:
        optimizer, parameters = make(parameters), list(parameters)
        optimizer.register_step_pre_hook(lambda it, *_: same_parameters(it, parameters))
        return optimizer

    return hooked


def same_parameters(optimizer: optim.Optimizer, parameters: list[Tensor]) -> None:
    here = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in here} == {id(p) for p in parameters}


def check_parts_have_the_bits_of_dtensors(folder: Path) -> None:
    """Fused kernels and Rprop (2.12) refuse some DTensors; the check against one process has them."""
    usual = ["Adam, amsgrad", "NAdam"]
    others = [name for name in OPTIMIZERS if "fused" not in name and name not in (*usual, "Rprop")]
    names = swept(usual, others)
    cases = [(SHARDED, name) for name in names] + [(CUT, "AdamW, foreach")]
    for plan, name in cases:
        one, other = trained(plan, OPTIMIZERS[name]), trained(plan, on_dtensors(OPTIMIZERS[name]))
        again = whole(other)
        assert all(torch.equal(value, again[key]) for key, value in whole(one).items()), (plan, name)
        for mine, its in zip(one.trained.values(), other.trained.values(), strict=True):
            state, expected = one.optimizer.state[mine], other.optimizer.state[its]
            assert state.keys() == expected.keys(), (plan, name)
            for key, value in state.items():
                like = expected[key]
                assert isinstance(value, DTensor) == isinstance(like, DTensor), (plan, name, key)
                assert getattr(value, "placements", None) == getattr(like, "placements", None)
                assert torch.equal(local(value), local(like)), (plan, name, key)


def check_weights_are_those_of_one_process(folder: Path) -> None:
    start = models.make("mlp")
    cases = [(SHARDED, "SGD, fused"), (SHARDED, "AdamW, fused"), (CUT, "SGD, fused"), (SHARDED, "Rprop")]
    for plan, name in cases:
        alone = copy.deepcopy(start)
        optimizer = OPTIMIZERS[name](alone.parameters())
        for x, y in models.vector_batches(STEPS, 4):
            optimizer.zero_grad()
            models.CASES["mlp"].loss(alone(x), y).backward()
            optimizer.step()
        for key, value in whole(trained(plan, OPTIMIZERS[name])).items():
            expected = alone.get_parameter(key)
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4, msg=f"{plan} {name} {key}")


def check_settings_and_groups_stay(folder: Path) -> None:
    """A schedule changes the groups that the optimizer has; a step leaves them and the parameters there."""

    def groups(parameters: up.Parameters) -> optim.Optimizer:
        biases = [p for name, p in parameters.named.items() if name.endswith("bias")]
        others = [p for name, p in parameters.named.items() if not name.endswith("bias")]
        return optim.AdamW([{"params": biases, "lr": 0.0}, {"params": others}], lr=0.1)

    for plan in (SHARDED, CUT):
        run = made("mlp", plan, groups)
        assert run.optimizer is not None
        kept, params = run.optimizer.param_groups, [g["params"] for g in run.optimizer.param_groups]
        schedule = optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.0)
        before = whole(run)
        for number, batch in enumerate(run.shard(models.vector_batches(2, 4))):
            run.step(batch)
            after = whole(run)
            for name, value in after.items():
                moved = number == 0 and not name.endswith("bias")
                assert torch.equal(value, before[name]) == (not moved), (plan, name, number)
            schedule.step()
            before = after
        assert run.optimizer.param_groups is kept
        assert all(g["params"] is one for g, one in zip(kept, params, strict=True))
        assert all(p.grad is None for p in run.trained.values())
        assert all(local(p.detach()).grad is None for p in run.trained.values())


def check_an_optimizer_of_ones_own_gets_what_the_run_has(folder: Path) -> None:
    """Its step may need whole tensors: it steps DTensors."""
    seen: list[bool] = []

    class Own(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(all(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]))
            return super().step(closure)

    run = made("mlp", SHARDED, lambda p: Own(p, lr=0.1))
    run.step(next(iter(run.shard(models.vector_batches(1, 4)))))
    assert seen[-1] and seen.count(True) == 1, seen  # before it, a copy has stepped small tensors


def main(rank: int, size: int, folder: Path, name: str) -> None:
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    in_group(rank, size, folder, globals()[name])
