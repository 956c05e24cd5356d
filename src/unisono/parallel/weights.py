"""The weights of a run by the names of the user's model: whole, one after the other on rank 0, or as pieces.

No rank holds more than one of them whole, but for what the caller keeps. What Hugging Face's
`save_pretrained` writes is streamed, too: a model of `transformers` gives its weights with its configuration,
one of `peft` its adapters only. Neither library is imported here: the model brings it.

Named pieces are for `unisono.publish`, and `subscribe(into=)`. Where several layers stand for a fused one,
their parameters are pieces of its parameter.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.engine.publishing.pieces import Piece
from unisono.torch.control_data import on_every_rank, on_rank_0, recv_data, send_data
from unisono.torch_internals.training import offsets

from .graph.fused import FusedLayer, Split
from .model_setup import ModelSetup
from .sharded_parameters import reshard
from .structure import plain_class

if TYPE_CHECKING:
    from .graph.fused import FusedLayer
    from .model_setup import ModelSetup

Weights = Iterator[tuple[str, "Tensor | None"]]
INDEX = "model.safetensors.index.json"  # Hugging Face's name


class _WeightSource(NamedTuple):
    """A parameter or a persistent buffer of some rank. source: the first rank that has it."""

    name: str
    source: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _sources(built: ModelSetup) -> list[_WeightSource]:
    """What the ranks of the plan hold, in one order. All ranks call this."""
    mine = {
        name: (tuple(value.shape), value.dtype)
        for name, value in [*built.named.items(), *built.buffers.items()]
    }
    told = on_every_rank(lambda: (dist.get_rank(), mine, [*built.buffers]), built.mesh.world)
    order: dict[str, None] = dict.fromkeys(built.names.values())
    found: dict[str, _WeightSource] = {}
    for rank, held, buffers in told:
        order |= dict.fromkeys(buffers)
        for name, kind in held.items():
            found.setdefault(name, _WeightSource(name, rank, *kind))
    return [found[name] for name in order if name in found]


def blanks_of(built: ModelSetup) -> dict[str, Tensor]:
    """The name of each parameter and persistent buffer -> a tensor on the meta device, of its shape and type.
    All ranks call this. Fused layers are as the user made them.
    """
    joiner = _Joiner(fused_layers(built.model))
    blanks = [(one.name, torch.empty(one.shape, dtype=one.dtype, device="meta")) for one in _sources(built)]
    pairs = (pair for name, blank in blanks for pair in joiner.take(name, blank))
    return {name: value for name, value in pairs if value is not None}


def weights_of(built: ModelSetup, value_of: Callable[[nn.Parameter], Tensor]) -> Weights:
    """Yield the name and the value of each parameter and persistent buffer. All ranks iterate to the end.

    A value is whole and on the CPU on rank 0, and None on the others. Fused layers are as the user made them.

    Args:
        value_of: the value of a parameter, wherever it is.
    """
    named, buffers = built.named, built.buffers
    joiner = _Joiner(fused_layers(built.model))
    for one in _sources(built):
        mine = named.get(one.name)
        local = buffers.get(one.name) if mine is None else value_of(mine)
        yield from joiner.take(one.name, _at_rank_0(built, local, one.source))


def _at_rank_0(built: ModelSetup, value: Tensor | None, source: int) -> Tensor | None:
    """Bring a value to rank 0, whole. source: the first rank that has it; the others may have it, too."""
    mesh = built.mesh
    whole: Tensor | None = None
    if mesh.outer is not None and mesh.outer.place("replica"):
        return None  # the first replica has the same values
    if value is not None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole.detach().contiguous()
    rank = dist.get_rank()
    if source == 0:
        return whole.to("cpu", copy=True) if rank == 0 and whole is not None else None  # the next step writes
    if rank == source:
        assert whole is not None
        send_data((tuple(whole.shape), whole.dtype), 0, mesh.world)
        dist.send(whole, 0, group=mesh.world)
    elif rank == 0:
        shape, dtype = recv_data(source, mesh.world)
        made = torch.empty(shape, dtype=dtype, device=mesh.axes.device_type)
        dist.recv(made, source, group=mesh.world)
        return made.cpu()
    return None


class _Joiner:
    """Puts the one in place of the several that stand for a fused layer."""

    def __init__(self, layers: list[FusedLayer]) -> None:
        self._of = parts_of(layers)
        self._parts: dict[str, dict[str, Tensor | None]] = {}

    def take(self, name: str, value: Tensor | None) -> Weights:
        """Take one; yield what is complete."""
        layer, leaf, _ = self._of.get(name, (None, "", 0))
        if layer is None:
            yield name, value
            return
        whole = f"{layer.path}.{leaf}"
        parts = self._parts.setdefault(whole, {})
        parts[name] = value
        if len(parts) == len(layer.names):
            values = [parts[part] for part in layer.parts(leaf)]
            del self._parts[whole]
            there = [part for part in values if part is not None]
            yield whole, layer.join(there).contiguous() if there else None


def export(weights: Weights, folder: Path, shard_bytes: int, about: Callable[[], object]) -> None:
    """Write weights as safetensors, in Hugging Face's layout. All ranks call this."""
    from safetensors.torch import save_file  # its absence is an error before a byte moves

    shards = _Shards(folder, shard_bytes, save_file)
    writer = FirstRankWriter(folder)
    for name, value in weights:
        if value is not None:
            writer.do(partial(shards.add, name, value))
    writer.do(shards.publish)
    writer.do(about)
    writer.end()


class FirstRankWriter:
    """Rank 0 writes, and its error is raised on all ranks, when all of them have done their part."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: Exception | None = None

    def do(self, write: Callable[[], object]) -> None:
        """Call this on rank 0, unless it has failed before."""
        if dist.get_rank() == 0 and self._error is None:
            try:
                write()
            except Exception as error:  # noqa: BLE001  (raised by `end`)
                self._error = error

    def end(self) -> None:
        """Raise RuntimeError where rank 0 has failed. All ranks call this."""
        on_rank_0(self._raise)

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"rank 0 could not write {self._folder}: {self._error!r}") from self._error


class _Shards:
    """Files of at most so many bytes of weights; they get their names once all of them are there."""

    def __init__(self, folder: Path, shard_bytes: int, save: Callable[..., object]) -> None:
        self._folder, self._limit, self._save = folder, shard_bytes, save
        self._kept: dict[str, Tensor] = {}
        self._nbytes = self._total = 0
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, value: Tensor) -> None:
        if self._kept and self._nbytes + value.nbytes > self._limit:
            self._write()
        self._kept[name] = value
        self._nbytes += value.nbytes
        self._total += value.nbytes

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"model-{len(self._written) + 1:05}.partial"
        self._save(self._kept, path, metadata={"format": "pt"})
        self._written.append((path, [*self._kept]))
        self._kept.clear()
        self._nbytes = 0

    def publish(self) -> None:
        """Write the rest; then remove the files of an earlier model, which a reader would take first."""
        self._write()
        where: dict[str, str] = {}
        for number, (path, inside) in enumerate(self._written, 1):
            final = self._folder / f"model-{number:05}-of-{len(self._written):05}.safetensors"
            final = self._folder / "model.safetensors" if len(self._written) == 1 else final
            path.rename(final)
            where |= dict.fromkeys(inside, final.name)
        index = self._folder / INDEX
        if len(self._written) > 1:
            text = json.dumps({"metadata": {"total_size": self._total}, "weight_map": where}, indent=2)
            index.write_text(text)
        else:
            index.unlink(missing_ok=True)
        for old in (*self._folder.glob("model-*-of-*.safetensors"), self._folder / "model.safetensors"):
            if old.name not in where.values():
                old.unlink(missing_ok=True)


# ---- copies into a plain model ----


@torch.no_grad()
def copy_weights(weights: Weights, model: nn.Module | None, built: ModelSetup) -> None:
    """Fill a plain model of each rank. All ranks call this.

    Args:
        weights: whole on rank 0, None on other ranks.
        model: None: this rank wants none.
    Raises:
        ValueError: the model of some rank is another one; on all ranks.
    """
    blanks, mesh = blanks_of(built), built.mesh
    places: dict[str, list[Tensor]] = {}

    def find() -> None:
        try:
            places.update({} if model is None else _places(model, blanks, built.names))
        except ValueError as error:
            raise ValueError(f"copy_to: the model of rank {dist.get_rank()} {error}") from error

    on_every_rank(find, mesh.everyone.world)
    for name, value in weights:
        sent = torch.empty_like(blanks[name], device=mesh.axes.device_type)
        if value is not None:
            sent.copy_(value)
        dist.broadcast(sent, src=0, group=mesh.everyone.world)
        for place in places.get(name, ()):
            place.copy_(sent)


def _places(
    model: nn.Module, blanks: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, list[Tensor]]:
    """Where each weight goes in a plain model."""
    if any(isinstance(value, DTensor) for value in model.parameters()):
        raise ValueError("belongs to a run. Make another one as the first was made")
    found: dict[str, list[Tensor]] = {}
    for path, value in model.state_dict(keep_vars=True).items():
        name = path if path in blanks else names.get(path, path)
        if name not in blanks:
            raise ValueError(f"has {path!r}, which the model of the run has not")
        if value.shape != blanks[name].shape:
            raise ValueError(f"has {path!r} of shape {[*value.shape]}, and the run {[*blanks[name].shape]}")
        if value.is_meta:
            raise ValueError(
                f"has {path!r} on the meta device, where it has no memory. Make the model without "
                'torch.device("meta")'
            )
        found.setdefault(name, []).append(value)
    missing = [name for name in blanks if name not in found]
    if missing:
        raise ValueError(f"has no {missing[0]!r}, which the model of the run has ({len(missing)} missing)")
    return found


# ---- what save_pretrained writes ----


def save_pretrained(
    built: ModelSetup, weights: Callable[[], Weights], folder: Path, shard_bytes: int
) -> None:
    """See `Run.save_pretrained`. `weights`: of the run."""
    model, blanks = built.model, blanks_of(built)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    adapters = _adapters(model, blanks)
    if adapters is None:
        kept = ((name, value) for name, value in weights() if name not in ignored)
        export(kept, folder, shard_bytes, lambda: write_configuration(model, folder))
        return
    found = {name: value for name, value in weights() if value is not None and name in adapters}
    library: Any = model
    writer = FirstRankWriter(folder)
    writer.do(lambda: library.save_pretrained(folder, state_dict=found))
    writer.end()


def write_configuration(model: nn.Module, folder: Path) -> None:
    """Write the model's configurations, as far as it has any, with the name of its class and its type."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [plain_class(model).__name__]
        config.dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)


def _adapters(model: nn.Module, blanks: Mapping[str, Tensor]) -> set[str] | None:
    """The names of what a model of `peft` saves; None: it is a model of another kind."""
    peft: Any = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        asked = {id(blank): name for name, blank in blanks.items()}
        states = [peft.get_peft_model_state_dict(model, dict(blanks), one) for one in model.peft_config]
        return {asked[id(value)] for state in states for value in state.values() if id(value) in asked}
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"save_pretrained: the {plain_class(model).__name__} got adapters by add_adapter. Make it by "
            "peft.get_peft_model, whose adapters are saved alone; or use run.state_dict()"
        )
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        raise ValueError(
            f"save_pretrained: a {plain_class(model).__name__} has no configuration of Hugging Face, which "
            "from_pretrained needs. Use run.export(folder), or run.state_dict()"
        )
    return None


# ---- fused layers ----


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    """The layers of a model for which several stand."""
    return [module.layer(path) for path, module in model.named_modules() if isinstance(module, Split)]


def parts_of(layers: Iterable[FusedLayer]) -> dict[str, tuple[FusedLayer, str, int]]:
    """Name of a parameter of one of the several -> (layer, parameter of the one, place in it)."""
    return {
        name: (layer, leaf, place)
        for layer in layers
        for leaf in layer.leaves
        for place, name in enumerate(layer.parts(leaf))
    }


class RunRanks:
    """The ranks of a run, as a publication uses a group."""

    def __init__(self, built: ModelSetup) -> None:
        self._world = built.mesh.world
        self.rank, self.size = dist.get_rank(self._world), dist.get_world_size(self._world)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks, which are plain data."""
        return on_every_rank(lambda: obj, self._world)


def pieces_of(built: ModelSetup, value_of: Callable[[Any], Tensor]) -> dict[str, list[Piece]]:
    """What this rank holds of each parameter and persistent buffer."""
    reshard(built.units.root)
    values = [(name, value_of(one)) for name, one in built.named.items()]
    return _pieces([*values, *built.buffers.items()], fused_layers(built.model))


def _pieces(values: Iterable[tuple[str, Tensor]], fused: list[FusedLayer]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    parts = parts_of(fused)
    for name, value in values:
        sharded = isinstance(value, DTensor)
        here = value.to_local() if isinstance(value, DTensor) else value
        offset, shape = list(offsets(value)) if sharded else [0] * value.dim(), list(value.shape)
        layer, leaf, place = parts.get(name, (None, "", 0))
        if layer is not None:
            if layer.turned and len(shape) == 2:
                here, offset, shape = here.t(), offset[::-1], shape[::-1]
            dim = len(shape) - 1 if layer.turned else 0
            offset[dim] += sum(layer.sizes[:place])
            shape[dim] = sum(layer.sizes)
            name = f"{layer.path}.{leaf}"
        if here.numel() or not value.numel():
            found.setdefault(name, []).append(Piece(here, tuple(offset), tuple(shape)))
    return found
