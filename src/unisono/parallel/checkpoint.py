"""Checkpoints by PyTorch's DCP: any plan loads what any other saved. A crash during a save leaves the
previous one whole.

A folder holds `step-00000020`, `step-00000040`, ... What is being written is called `.partial` until all
ranks are done. Names are those of the user's model, so ranks, stages and cuts do not show in a checkpoint.
Under Plan(local_steps=...) replicas have optimizer states of their own: that of the first one has the usual
names, those of the others begin with `replica.N`.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from unisono.torch.checkpoint_work import CheckpointWork
from unisono.torch.control_data import on_rank_0
from unisono.torch_internals.checkpoints import CheckpointReader
from unisono.torch_internals.training import offsets

from .compression.reducer import CompressionCheckpoint
from .gradients import local
from .graph.fused import FusedLayer
from .mesh import new_group
from .outer_optimizer import OuterOptimizer
from .sharded_parameters import reshard
from .weights import parts_of

JSON = "json:"
"""Before the name of what an optimizer's state has and is no tensor, such as a count of steps."""

dcp: Any = torch.distributed.checkpoint  # its names are there, but PyTorch does not declare them exported


@runtime_checkable
class WeightAverage(Protocol):
    """What is saved beside a run with a value for each parameter."""

    def tensors(self) -> dict[str, Tensor]:
        """By the names of parameters, cut as they are; a load fills them."""
        ...


class RunState:
    """What a rank saves: its parameters, buffers, optimizer state, and the run's own numbers.

    Args:
        about: the run's own numbers, equal on all ranks; becomes JSON.
        elsewhere: values of parameters that are not where the parameter is.
        kept: the buffers of compressed gradients; None: there are none.
        fused: layers for which several stand.
        replica: this rank's, among those whose optimizers differ.
        outer: of replicas that train on their own.
        averages: name of an average of the weights -> its value for each parameter.
    """

    def __init__(
        self,
        root: nn.Module,
        named: dict[str, nn.Parameter],
        buffers: dict[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        about: dict[str, Any],
        elsewhere: dict[nn.Parameter, Tensor] | None = None,
        kept: CompressionCheckpoint | None = None,
        fused: Sequence[FusedLayer] = (),
        *,
        replica: int = 0,
        outer: OuterOptimizer | None = None,
        averages: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._fused = fused
        self._root, self._named, self._buffers = root, named, buffers
        self._optimizers, self.about = optimizers, about
        self._elsewhere, self._kept = elsewhere or {}, kept
        self._averages = {
            f"average.{average}.{name}": (name, value)
            for average, values in (averages or {}).items()
            for name, value in values.items()
        }
        self._outer, self._moments_at = outer, f"replica.{replica}.optimizer" if replica else "optimizer"

    def _values(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        found = {f"model.{name}": self.value(p) for name, p in self._named.items()}
        return found | {f"buffers.{name}": buffer for name, buffer in self._buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name. Hyperparameters and the run's numbers are JSON, as bytes."""
        reshard(self._root)
        found = self._values()
        for name, group, state in self._trained():
            found[f"options.{name}"] = _bytes({key: value for key, value in group.items() if key != "params"})
            for key, value in state.items():
                written = (key, value) if isinstance(value, Tensor) else (JSON + key, _bytes(value))
                found[f"{self._moments_at}.{name}.{written[0]}"] = written[1]
        found |= {} if self._outer is None else self._outer.tensors()
        found |= {key: value for key, (_, value) in self._averages.items()}
        about = self.about | {"fused": [layer.about() for layer in self._fused]}
        return found | {"run": _bytes(about)} | ({} if self._kept is None else self._kept.tensors())

    def load(self, folder: Path, *, beside: Iterable[str] = ()) -> set[str]:
        """Fill all of it from a checkpoint that any plan saved. Other ranks need not call this.

        Args:
            beside: names of objects that have to be saved beside the run.
        Returns: the names of the saved parameters that this rank has not taken.
        """
        reshard(self._root)
        reader = CheckpointReader(folder)
        described = reader.read_metadata()
        others = self._others(reader, beside)
        moved = dict(others.moved(self._named))
        wanted = self._values()
        for name in moved:
            del wanted[f"model.{name}"]
        wanted["run"] = _room(described, "run")
        moments_at = self._moments_at
        if not any(key.startswith(f"{moments_at}.") for key in described.state_dict_metadata):
            moments_at = "optimizer"  # saved by fewer replicas, or none that trained on its own
        outer = {} if self._outer is None else self._outer.tensors()
        wanted |= {key: value for key, value in outer.items() if key in described.state_dict_metadata}
        averages = {key: it for key, it in self._averages.items() if key in described.state_dict_metadata}
        wanted |= {key: value for key, (name, value) in averages.items() if name not in moved}
        saved = described.state_dict_metadata
        for name, _, _ in self._trained():
            frozen = f"model.{name}" in saved and f"options.{name}" not in saved
            if name in moved or frozen:
                continue
            wanted[f"options.{name}"] = _room(described, f"options.{name}")
            wanted |= _moments(described, f"{moments_at}.{name}", self.value(self._named[name]))
        kept = [] if self._kept is None else self._kept.wanted(described.state_dict_metadata)
        wanted |= {key: _room(described, key) for key in kept}
        missing = [key for key in wanted if key not in described.state_dict_metadata]
        if missing:
            raise ValueError(
                f"{folder} has no {missing[0]!r} ({len(missing)} missing): it is of another model"
            )
        _read(wanted, reader)
        for name, sources in moved.items():
            wanted |= self._made(reader, others, name, sources, moments_at)
        for key, (name, value) in self._averages.items():
            if name in moved:
                begin = key.removesuffix(name)
                fill_part(value, others.made(name, _whole(reader, begin, moved[name])))
            elif key not in averages:  # frozen there: its average is its value
                local(value).copy_(local(self.value(self._named[name])))
        self._take(wanted, moments_at)
        if self._kept is not None:
            self._kept.take({key: wanted[key] for key in kept})
        taken = {source for name in self._named for source in moved.get(name, [name])}
        return {key.removeprefix("model.") for key in saved if key.startswith("model.")} - taken

    def _others(self, reader: CheckpointReader, beside: Iterable[str]) -> FusedNames:
        """How the names of the checkpoint differ from those of this model."""
        described = reader.read_metadata()
        run = {"run": _room(described, "run")}
        _read(run, reader)
        found = _value(run["run"])
        saved = found.get("also", {})
        for name in beside:
            if name not in saved:
                raise ValueError(
                    f"the checkpoint has no {name!r}; it has {', '.join(saved) or 'nothing'} beside"
                )
        there = [FusedLayer(**about) for about in found.get("fused", [])]
        return FusedNames(self._fused, there, lambda name: f"model.{name}" in described.state_dict_metadata)

    def _made(
        self,
        reader: CheckpointReader,
        others: FusedNames,
        name: str,
        sources: list[str],
        moments_at: str,
    ) -> dict[str, Tensor]:
        """Fill a parameter from those that stand for it in the checkpoint; return its optimizer state."""
        whole, described = partial(_whole, reader, sources=sources), reader.read_metadata()
        value = self.value(self._named[name])
        fill_part(value, others.made(name, whole("model.")))
        found: dict[str, Tensor] = {}
        saved = described.state_dict_metadata
        if f"options.{sources[0]}" in saved and any(name == one for one, _, _ in self._trained()):
            found[f"options.{name}"] = whole("options.")[0]
            begin = f"{moments_at}.{sources[0]}."
            for key in [key.removeprefix(begin) for key in saved if key.startswith(begin)]:
                parts = whole(f"{moments_at}.", suffix=f".{key}")
                if parts[0].dim() > 0 and parts[0].shape == _room(described, f"model.{sources[0]}").shape:
                    found[f"{moments_at}.{name}.{key}"] = torch.zeros_like(value, dtype=parts[0].dtype)
                    fill_part(found[f"{moments_at}.{name}.{key}"], others.made(name, parts))
                else:
                    found[f"{moments_at}.{name}.{key}"] = parts[0]
        return found

    def values(self) -> dict[str, Tensor]:
        """What `tensors` has, but for what is JSON."""
        return {name: one for name, one in self.tensors().items() if not _is_json(name)}

    def here(self) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, bytes]]:
        """What `tensors` has, for a rank that shall have the same: (name, dtype, shape) of each tensor, and
        what is JSON.
        """
        found, tensors = self.tensors(), self.values()
        written = {name: bytes(value.tolist()) for name, value in found.items() if name not in tensors}
        return [(name, str(one.dtype), tuple(one.shape)) for name, one in tensors.items()], written

    def room(
        self, kinds: Sequence[tuple[str, str, tuple[int, ...]]], sharded: Container[str] = ()
    ) -> dict[str, Tensor]:
        """Tensors to be filled with those of another rank's `here`: values in place, moments anew.

        Args:
            sharded: names of those that are cut as their parameters are.
        """
        own = self._values()
        for name, dtype, shape in kinds:
            kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
            if name not in own and name in sharded:
                parameter = self._named[name.removeprefix(f"{self._moments_at}.").rpartition(".")[0]]
                own[name] = torch.zeros_like(self.value(parameter), dtype=kind)
            elif name not in own:
                own[name] = torch.empty(shape, dtype=kind)
        return own

    def take_from(self, filled: dict[str, Tensor], written: dict[str, bytes], *, options: bool) -> None:
        """Take what `room` gave, filled. options: also the settings of the optimizers."""
        read = {name: torch.frombuffer(bytearray(text), dtype=torch.uint8) for name, text in written.items()}
        self._take(filled | read, self._moments_at, options=options)

    def _take(self, loaded: dict[str, Tensor], moments_at: str, *, options: bool = True) -> None:
        self.about = _value(loaded["run"])
        for name, group, state in self._trained():
            if f"options.{name}" not in loaded:
                state.clear()  # frozen there: it begins anew
                continue
            for key, value in _value(loaded[f"options.{name}"]).items() if options else ():
                group[key] = tuple(value) if isinstance(value, list) else value
            start = f"{moments_at}.{name}."
            state.update(
                _state_entry(key.removeprefix(start), v) for key, v in loaded.items() if key.startswith(start)
            )
        if self._outer is not None:
            self._outer.load(loaded)

    def _trained(self) -> list[tuple[str, dict[str, Any], Any]]:
        """(name, its group of the optimizer, its optimizer state) of each parameter the optimizer has."""
        names = {id(parameter): name for name, parameter in self._named.items()}
        return [
            (names[id(p)], group, optimizer.state[p])
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def value(self, parameter: nn.Parameter) -> Tensor:
        """The values of a parameter, wherever they are."""
        found = self._elsewhere.get(parameter)
        return parameter.data if found is None else found


def _whole(reader: CheckpointReader, prefix: str, sources: list[str], suffix: str = "") -> list[Tensor]:
    keys = [f"{prefix}{source}{suffix}" for source in sources]
    room = {key: _room(reader.read_metadata(), key) for key in keys}
    _read(room, reader)
    return [room[key] for key in keys]


def _read(wanted: dict[str, Tensor], reader: CheckpointReader) -> None:
    """Fill tensors. Each rank reads by itself: ranks would pickle what they tell each other."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
            dcp.load(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as failed:  # no Exception: it would pass by callers
        error, _ = next(iter(failed.failures.values()))
        where = f"rank {dist.get_rank()}: {error!r}" if dist.is_initialized() else repr(error)
        raise ValueError(f"{reader.path} cannot be read ({where}): it is damaged") from failed


def states(name: str, thing: Any) -> Any:
    """The state of an object that is saved beside the run, as JSON has it; `state_of` gives it back."""
    try:
        state = _plain(thing.state_dict())
        json.dumps(state)
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(
            f"save: {name!r} is a {type(thing).__name__} whose state cannot be saved ({error}): it needs a "
            "state_dict() of numbers, strings, lists, tuples and dicts"
        ) from error
    return state


PAIRS, TUPLE = "pairs:", "tuple:"
"""The one key of a table that stands for what JSON lacks: a dict whose keys are no strings, and a tuple."""


def _plain(value: Any) -> Any:
    """A value of which JSON changes nothing. JSON writes the key 2 as "2", and a scheduler then misses it."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and [*value] not in ([PAIRS], [TUPLE]):
            return {key: _plain(one) for key, one in value.items()}
        return {PAIRS: [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [_plain(one) for one in value]}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def state_of(plain: Any) -> Any:
    """The state that `states` has made JSON of."""
    if isinstance(plain, list):
        return [state_of(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if [*plain] == [TUPLE]:
        return tuple(state_of(plain[TUPLE]))
    pairs = state_of(plain[PAIRS]) if [*plain] == [PAIRS] else plain.items()
    return {key: one if [*plain] == [PAIRS] else state_of(one) for key, one in pairs}


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _is_json(name: str) -> bool:
    return name == "run" or name.startswith("options.") or name.rpartition(".")[2].startswith(JSON)


def _state_entry(key: str, value: Tensor) -> tuple[str, Any]:
    """A part of an optimizer's state, and its name there."""
    return (key.removeprefix(JSON), _value(value)) if key.startswith(JSON) else (key, value)


def _value(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def _room(described: Metadata, key: str) -> Tensor:
    """An empty tensor as the checkpoint describes it."""
    item = described.state_dict_metadata.get(key)
    if not isinstance(item, TensorStorageMetadata):
        raise ValueError(f"the checkpoint has no {key!r}: it is of another model, or no run saved it")
    return torch.empty(item.size, dtype=item.properties.dtype)


def _moments(described: Metadata, start: str, parameter: Tensor) -> dict[str, Tensor]:
    """Room for the optimizer state of one parameter, whose names begin so; cut as the parameter is."""
    found = {}
    for key, item in described.state_dict_metadata.items():
        if key.rpartition(".")[0] == start and isinstance(item, TensorStorageMetadata):
            found[key] = room = _room(described, key)
            if room.shape == parameter.shape and parameter.dim() > 0:
                found[key] = torch.zeros_like(parameter, dtype=room.dtype)
    return found


# ---- fused layers ----


class FusedNames:
    """Reads parameters, and their optimizer state, by the names that this model has, whatever those of the
    checkpoint are: some plans have several layers in place of one, see graph/fused.py.

    | the checkpoint has | the model has | what is read |
    |---|---|---|
    | attn.in_proj_weight | attn.q.weight, attn.k.weight, attn.v.weight | the one, and a part of it is taken |
    | attn.q.weight, attn.k.weight, attn.v.weight | attn.in_proj_weight | all three, one after the other |

    A layer is read whole by each rank that has a part of it, one after the other.

    Args:
        here, there: fused layers of this model, and of the one that was saved.
        saved: whether the checkpoint has a parameter of this name.
    """

    def __init__(
        self, here: Iterable[FusedLayer], there: Iterable[FusedLayer], saved: Callable[[str], bool]
    ) -> None:
        self._parts = parts_of(here)
        self._there = {f"{layer.path}.{leaf}": (layer, leaf) for layer in there for leaf in layer.leaves}
        self._saved = saved

    def sources(self, name: str) -> list[str]:
        """The saved parameters of which this one is made; empty: there are none."""
        layer, leaf, _ = self._parts.get(name, (None, "", 0))
        if self._saved(name) and (layer is None or not self._other(layer, leaf)):
            return [name]
        whole = name if layer is None else f"{layer.path}.{leaf}"
        if self._saved(whole):
            return [whole]
        found = self._there.get(whole)
        return [] if found is None else found[0].parts(found[1])

    def _other(self, layer: FusedLayer, leaf: str) -> bool:
        """Whether the saved model has other layers in place of this one."""
        found = self._there.get(f"{layer.path}.{leaf}")
        return found is not None and found[0].about() != layer.about()

    def made(self, name: str, values: list[Tensor]) -> Tensor:
        """The whole parameter `name`, from those that `sources` names."""
        layer, leaf, place = self._parts.get(name, (None, "", 0))
        whole = name if layer is None else f"{layer.path}.{leaf}"
        value = self._there[whole][0].join(values) if len(values) > 1 else values[0]
        return value if layer is None else layer.cut(place, value)

    def moved(self, names: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
        """Those of `names` that are not saved as they are, with what they are made of."""
        for name in names:
            sources = self.sources(name)
            if sources and sources != [name]:
                yield name, sources


def fill_part(value: Tensor, whole: Tensor) -> None:
    """Give a parameter, or this rank's part of one, its values from a whole one."""
    if isinstance(value, DTensor):
        begins, local = offsets(value), value.to_local()
        for dim, (begin, size) in enumerate(zip(begins, local.shape, strict=True)):
            whole = whole.narrow(dim, begin, size) if size else whole[:0]
        value = local
    if value.numel():
        value.copy_(whole)


# ---- the folder ----


class CheckpointWriter:
    """Saves of one run, one at a time."""

    def __init__(self, group: Any = None) -> None:
        """group: of all ranks, for the saves only; None: made at the first one."""
        self._group = group
        self._pending: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def save(self, state: RunState, folder: Path, step: int, *, keep: int | None, background: bool) -> None:
        """Write `folder/step-N`; all ranks call this. In the background it writes the values at the time of
        the call.

        Raises:
            RuntimeError: a rank could not write.    OSError: rank 0 could not make or rename the folder.
        """
        self.wait()
        if self._group is None:
            self._group = new_group()
        final = path_of(folder, step)
        partial = final.with_suffix(".partial")
        on_rank_0(lambda: _empty(partial), self._group)
        work = CheckpointWork(state.tensors, partial, self._group)
        if not background:
            work.write(lambda: _publish(partial, final, keep))
            return
        work.copy()
        self._pending = threading.Thread(target=self._finish, args=(work, partial, final, keep))
        self._pending.start()

    def wait(self) -> None:
        """Wait for the save in the background; raise its error."""
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failed:
            raise self._failed.pop()

    def _finish(self, work: CheckpointWork, partial: Path, final: Path, keep: int | None) -> None:
        try:
            work.write(lambda: _publish(partial, final, keep))
        except BaseException as error:  # noqa: BLE001  (raised by wait, in the caller's thread)
            self._failed.append(error)


def _empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, keep: int | None) -> None:
    """Rename the folder after all ranks have written, and delete old checkpoints.

    At every moment there is a whole checkpoint that `newest` finds: an earlier one of the same step is
    moved aside first, and deleted last.
    """
    aside = _aside(final)
    if final.exists():
        _delete(aside)  # of a save that was interrupted after its last rename
        final.rename(aside)
    partial.rename(final)
    _delete(aside)
    # Later steps are of a run that was continued from an earlier one: this one is not what they replace.
    earlier = [one for one in _steps(final.parent) if _step_of(one) <= _step_of(final)]
    for old in earlier[:-keep] if keep else []:
        _delete(old)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after so many steps is."""
    return folder / f"step-{step:08}"


def newest(folder: Path) -> Path:
    """Return the newest whole checkpoint in `folder`, or `folder` if it is one."""
    if _is_whole(folder):
        return folder
    steps = _steps(folder)
    if not steps:
        raise FileNotFoundError(f"{folder} has no checkpoint: no step-N that was written to its end")
    return steps[-1]


def _steps(folder: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    finals = {path.with_suffix("") for path in folder.glob("step-*")}
    named = [path for path in finals if re.fullmatch(r"step-\d{8,}", path.name)]  # a copy has another name
    found = (final if _is_whole(final) else _aside(final) for final in sorted(named, key=_step_of))
    return [path for path in found if _is_whole(path)]


def _step_of(path: Path) -> int:
    """The number of a checkpoint's step."""
    return int(path.stem.removeprefix("step-"))


def _is_whole(path: Path) -> bool:
    return (path / ".metadata").exists()  # written last, deleted first


def _aside(final: Path) -> Path:
    """Where a checkpoint is while another one of the same step takes its place."""
    return final.with_suffix(".old")


def _delete(path: Path) -> None:
    (path / ".metadata").unlink(missing_ok=True)  # the rest is no longer a checkpoint
    shutil.rmtree(path, ignore_errors=True)
