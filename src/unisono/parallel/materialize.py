"""A model on the meta device has shapes and no values. They come here, on the ranks that hold them.

    with torch.device("meta"):                    # allocates nothing
        model = Transformer(...)
    parallelize(model, plan, seed=0, ...)         # each rank: one group of modules at a time, cut, the next

Modules are initialised in groups, children first: a parent may overwrite what its children began with, as
GPT-2 does, but not what another group makes. A group is an entry of an `nn.Sequential` or `nn.ModuleList`,
or a module around and beside them. Random numbers are seeded for each module, from the seed and the module's
path. So a value depends neither on the plan nor on the other values of a rank, and no stage makes the values
of another one.

What a module does: `reset_parameters()`; `_init_weights(module)` of the nearest module above that has it,
as Hugging Face's models do; the user's function. This is the order of a constructor and `model.apply(init)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.torch_internals.training import module_at

from .generators import seed_of
from .gradients import cut_like
from .graph.fused import Split, like
from .structure import entries

Init = Callable[[nn.Module], Any]
Kept = Callable[[str, nn.Parameter], None]
RESETS = "reset_parameters", "_reset_parameters"  # the second is what nn.MultiheadAttention calls it
UNWRITTEN = 0xFD  # bytes of a table of integers that nobody has written; floating values are NaN


def materialize(model: nn.Module, *, seed: int | None = None, init: Init | None = None) -> nn.Module:
    """Give a model on the meta device its values in this process, and return it.

    They are those with which `parallelize(model, plan, seed=seed, init=init)` begins under every plan.

    Args:
        seed: of all random numbers; None: one that torch's generator draws.
        init: fills the parameters and buffers of one module; called after the module's own initialisation.
    Raises:
        ValueError: nothing says how a module begins; it says which module, and what to write.
    """
    initial = Initializer(model, seed=seed, init=init)
    initial.fill(model)
    return model


class _TensorSlot(NamedTuple):
    """Where a parameter or buffer without values is."""

    module: nn.Module
    name: str
    first: str  # the first path of this tensor in the model
    value: Tensor


class Initializer:
    """The initial values of a model on the meta device; of another model it does nothing.

    Attributes:
        device: the type of device on which the model is to be.
        seed: of all random numbers.
    """

    def __init__(self, model: nn.Module, *, seed: int | None = None, init: Init | None = None) -> None:
        if not isinstance(seed, int | None):
            raise TypeError(f"seed is a {type(seed).__name__}, expected a number or None")
        if init is not None and not callable(init):
            raise TypeError(f"init is a {type(init).__name__}, expected a function of one module")
        self._model, self._init = model, init
        self._meta: dict[str, Tensor] = {}  # by its path: every parameter and buffer without values
        self._first: dict[str, str] = {}  # every path of a tensor -> its first one
        found: dict[Tensor, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for name, value in _own(module):
                at = _join(path, name)
                self._first[at] = found.setdefault(value, at)
                if value.is_meta:
                    self._meta[at] = value
        real = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        self.device = next(real, torch.get_default_device()).type
        self.seed = int(torch.randint(2**62, (), device="cpu")) if seed is None and self else seed or 0
        self._ways = dict(_ways(model))
        self._groups = list(_groups(model)) if self else []
        self._group_of = {path: number for number, group in enumerate(self._groups) for path, _ in group}
        self._check(explicit=seed is not None or init is not None)

    def __bool__(self) -> bool:
        return bool(self._meta)

    def _check(self, *, explicit: bool) -> None:
        if not self:
            if explicit:
                raise ValueError(
                    "seed= and init= are for models on the meta device, and this one has its values. "
                    'Build it under `with torch.device("meta"):`, or leave them out'
                )
            return
        if self.device == "meta":
            raise ValueError('this call is inside `with torch.device("meta"):`; only the model belongs there')
        for path, module in self._model.named_modules():
            names = [name for name, value in _own(module) if value.is_meta]
            if names and not (self._init or path in self._ways or _reset_of(module)):
                raise ValueError(
                    f'"{path}" ({type(module).__name__}) is on the meta device and has no '
                    f"reset_parameters(): nothing says how {', '.join(names)} begin. Write this method, or "
                    "init=fn, where fn(module) fills one module's own parameters and buffers"
                )

    def fill(self, top: nn.Module, kept: Kept | None = None) -> None:
        """Give what is in `top` its values; what is cut on the tensor axis gets this rank's part.

        Args:
            kept: called with the first path and each new parameter, once its group is complete.
        """
        self.fill_own(top.modules(), kept)

    def fill_copy(self, copy: nn.Module) -> None:
        """Give a copy of the model the values that the model gets."""
        if self:
            Initializer(copy, seed=self.seed, init=self._init).fill(copy)

    def fill_own(self, modules: Iterable[nn.Module], kept: Kept | None = None) -> None:
        """Give these modules' own parameters and buffers their values, not those of modules in them."""
        made: dict[Tensor, Tensor] = {}  # what stands for it now: tied parameters stay one
        for number, places in sorted(self._wanted(modules).items()):
            self._fill(number, places, made)
            for first, value in {place.first: made[place.value] for place in places}.items():
                if kept is not None and isinstance(value, nn.Parameter):
                    kept(first, value)

    def _wanted(self, modules: Iterable[nn.Module]) -> dict[int, list[_TensorSlot]]:
        """What has no values in these modules, by the group that makes them."""
        inside, wanted = set(modules) if self else set(), dict[int, list[_TensorSlot]]()
        for path, module in self._model.named_modules():
            if module not in inside:
                continue
            inside.remove(module)
            for name, value in _own(module):
                if value.is_meta:
                    first = self._first.get(_join(path, name), _join(path, name))
                    wanted.setdefault(self._group(first), []).append(_TensorSlot(module, name, first, value))
        strange = [module for module in inside if any(value.is_meta for _, value in _own(module))]
        if strange:
            raise ValueError(
                f"pieces has parameters on the meta device that are not of the model, in a "
                f"{type(strange[0]).__name__}: make its module a part of the model"
            )
        return wanted

    def _group(self, path: str) -> int:
        while path not in self._group_of:  # the layers that stand for a fused one are new
            path = path.rpartition(".")[0]
        return self._group_of[path]

    def _fill(self, number: int, places: list[_TensorSlot], made: dict[Tensor, Tensor]) -> None:
        values = self._values(self._groups[number])
        for place in places:
            if place.value not in made:
                made[place.value] = _in_place_of(place.value, values[place.first])
            setattr(place.module, place.name, made[place.value])

    def _values(self, group: list[tuple[str, nn.Module]]) -> dict[str, Tensor]:
        """Make the values of one group, whole; leave its modules as they are."""
        known = {module: path for path, module in group}
        reached = dict.fromkeys(inner for _, module in group for inner in module.modules())
        tables: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, table) for module in reached for table in (module._parameters, module._buffers)
        ]
        before = [dict(table) for _, table in tables]
        try:
            mine: dict[str, tuple[dict[str, Any], str]] = {}
            for module, table in tables:
                for name, value in table.items():
                    at = _join(known[module], name) if module in known else None
                    if at in self._meta and self._first[at] == at:
                        table[name] = self._blank(self._meta[at])
                        mine[at] = table, name
                    elif value is not None:  # another group makes it, or it has its values: not to be touched
                        table[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._initialise(group)
            values = {at: table[name].detach() for at, (table, name) in mine.items()}
        finally:
            for (_, table), old in zip(tables, before, strict=True):
                table.update(old)
        for at, value in values.items():
            if value.is_meta or _unwritten(value):
                raise ValueError(
                    f'"{at}" has no values (or NaN) after the initialisation of its module, which is on the '
                    "meta device. Write them in its reset_parameters(), or in init=fn, where fn(module) "
                    "fills one module's own parameters and buffers"
                )
        for path, _ in group:
            now = module_at(self._model, path)
            if isinstance(now, Split):
                leaves = [leaf for leaf in now.fused if f"{path}.{leaf}" in values]
                values |= now.parts(path, {leaf: values.pop(f"{path}.{leaf}") for leaf in leaves})
        return values

    def _blank(self, meta: Tensor) -> Tensor:
        blank = torch.empty_like(meta, device=self.device)
        if blank.is_floating_point() or blank.is_complex():
            blank.fill_(float("nan"))
        elif blank.numel():
            storage: Any = blank.untyped_storage()  # fill_ is there, but PyTorch does not declare it
            storage.fill_(UNWRITTEN)
        return nn.Parameter(blank, meta.requires_grad) if isinstance(meta, nn.Parameter) else blank

    @torch.no_grad()
    def _initialise(self, group: list[tuple[str, nn.Module]]) -> None:
        cuda = [torch.cuda.current_device()] if self.device == "cuda" else []
        with torch.random.fork_rng(cuda), torch.device(self.device):
            for path, module in reversed(group):
                seed = seed_of(self.seed, path)
                torch.default_generator.manual_seed(seed)
                if cuda:
                    torch.cuda.manual_seed(seed)
                if (reset := _reset_of(module)) is not None:
                    reset()
                if path in self._ways:
                    self._ways[path](module)
                if self._init is not None and any(True for _ in _own(module)):
                    self._init(module)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own parameters and buffers."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((way for name in RESETS if callable(way := getattr(module, name, None))), None)


def _ways(module: nn.Module, path: str = "", above: Init | None = None) -> Iterator[tuple[str, Init]]:
    """Yield (path, function) of modules at or below one that has `_init_weights(module)`: the nearest."""
    here = getattr(module, "_init_weights", above)
    if here is not None:
        yield path, here
    for name, child in module.named_children():
        yield from _ways(child, _join(path, name), here)


def _groups(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield what is initialised together: (path, module), parents first. Each module is in one group."""
    units, seen = set(entries(model)), set[nn.Module]()

    def walk(path: str, module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
        around = module is model or isinstance(module, nn.ModuleDict)
        around = around or any(inner in units for inner in module.modules() if inner is not module)
        together = [(path, module)] if around and module not in units else module.named_modules(prefix=path)
        group = [(at, inner) for at, inner in together if inner not in seen]
        seen.update(inner for _, inner in group)
        if group:
            yield group
        if around and module not in units:
            for name, child in module.named_children():
                yield from walk(_join(path, name), child)

    yield from walk("", model)


def _unwritten(value: Tensor) -> bool:
    """Whether something in `value` is as `_blank` left it."""
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool(value.numel()) and bool((value.contiguous().view(-1).view(torch.uint8) == UNWRITTEN).all())


def _in_place_of(meta: Tensor, value: Tensor) -> Tensor:
    """Return the replacement of `meta`: a parameter if it is one, cut if it is cut."""
    value = cut_like(value, meta)
    return like(meta, value) if isinstance(meta, nn.Parameter) else value
