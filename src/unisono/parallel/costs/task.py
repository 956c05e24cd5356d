"""What is to be trained, for a prediction: a model, its loss and optimizer, a batch; and what is found."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.parallel.batches import rows_of
from unisono.parallel.build import forget_caches
from unisono.parallel.graph.capture import CaptureError, Recorder
from unisono.parallel.graph.containers import mapped
from unisono.parallel.graph.cut import Cut, KnownCuts
from unisono.parallel.graph.program import Graph, writes_of
from unisono.parallel.graph.proof import prove
from unisono.parallel.graph.shapes import Shapes, searches_packed_texts, single_texts
from unisono.parallel.loss_check import UnchangedLoss
from unisono.parallel.loss_weights import own_loss
from unisono.parallel.model_buffers import statistics_stand_apart
from unisono.parallel.optimizers import Optimizer, Parameters
from unisono.parallel.precision import BATCH_NORM
from unisono.parallel.structure import ModelStructure, chained, structure_of

from .trace import TracedRows

if TYPE_CHECKING:
    from unisono.parallel.planning.memory_account import MemoryPeak


@dataclass
class TrainingTask:
    """A model and everything else that decides what a step computes.

    Raises:
        ValueError: the sample has no rows, or its tensors disagree.
    """

    model: nn.Module  # as `parallelize` takes it
    sample: Any  # a batch, (inputs, targets), of any number of rows; without `loss` the inputs alone
    batch: int  # rows of a step, of all ranks
    optimizer: Optimizer | None  # likewise; None: as Adam
    loss: Callable[[Any, Any], Any] | None
    pieces: Sequence[nn.Module] | None = None
    cuts: dict[str, str] | None = None
    counts: bool = False  # the loss returns (sum, count)
    on_gpu: bool = False  # it is to train on GPUs, which this machine need not have: their allocator counts
    traces: TracedRows = field(default_factory=TracedRows)  # that all who ask have recorded
    peaks: dict[Hashable, MemoryPeak] = field(default_factory=dict)  # that dry runs found
    _cuts: KnownCuts = field(default_factory=KnownCuts)
    _graphs: dict[int, Graph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = rows_of(self.sample)
        self._unchanged = UnchangedLoss(self.loss or own_loss)
        real = (value.device for value in self.model.parameters() if not value.is_meta)
        self.device_type = next(real, torch.get_default_device()).type

    @property
    def memory_type(self) -> str:
        """The type of device whose allocator counts. The shapes may be on another one."""
        return "cuda" if self.on_gpu else self.device_type

    @property
    def own_loss(self) -> bool:
        """Whether the model computes its loss."""
        return self.loss is None

    def counted_loss(self, output: Any, targets: Any) -> Any:
        """The loss that a run computes. Call `restore` after the last step."""
        return self._unchanged(output, targets)

    def restore(self) -> None:
        """Give parameters that the loss has of its own the gradients that they had."""
        self._unchanged.restore()

    def shapes(self) -> Shapes:
        """A copy without values; its `also` are the pieces. Like a run, it keeps no keys and values."""
        made = Shapes(self.model, self.pieces)
        forget_caches(made.model)
        return made

    def structure(self, model: nn.Module, pieces: Any, *, staged: bool = False) -> ModelStructure:
        """Its parts; of a copy, too. staged: see `structure_of`."""
        return structure_of(model, pieces, self.cuts, staged=staged, own_loss=self.own_loss)

    def inputs_of(self, batch: Any) -> Any:
        """What the model is called with."""
        return batch if self.own_loss else batch[0]

    def blank_batch(self, rows: int, shapes: Shapes) -> tuple[Any, Any]:
        """(inputs, targets) of so many rows, without values, on the device of the model."""

        def blank(tensor: Tensor) -> Tensor:
            with shapes.mode:
                return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device_type)

        made = mapped(self.sample, blank)
        return (made, ()) if self.own_loss else made

    def cut(
        self,
        parts: int,
        rows: int,
        *,
        sequence: bool,
        in_pieces: bool = False,
        opened: frozenset[str] = frozenset(),
        single: bool = False,
    ) -> Cut:
        """How the tensor axis cuts the model. It is found once.

        Args:
            rows: on which it is proved.    in_pieces: its stages are runs of pieces.
            opened: modules that span stages of a pipeline.
            single: of a model that takes each row for one text.
        Raises:
            CaptureError: it cannot.
        """

        def find() -> Cut:
            shapes, forward = self.shapes(), None
            inputs = self.blank_batch(rows, shapes)[0]
            structure = self.structure(shapes.model, shapes.also)
            if in_pieces:
                shapes, forward = Shapes(shapes.model, structure.pieces), chained(spreads=structure.spreads)
            with single_texts(single):
                cut = prove(
                    shapes,
                    inputs,
                    parts,
                    forward=forward,
                    kinds=structure.kinds,
                    opened=opened,
                    sequence=sequence,
                )
            if not cut.dims:
                raise CaptureError(f"tensor={parts} cuts nothing of the model")
            return cut

        single = single and searches_packed_texts()
        return self._cuts.of((parts, sequence, in_pieces, opened, single), find)

    def graph(self, rows: int) -> Graph:
        """The program of the model on so many rows, with its loss left out. It is recorded once.

        Raises:
            CaptureError: it cannot be recorded.
        """
        if rows not in self._graphs:
            shapes = self.shapes()
            inputs = self.blank_batch(rows, shapes)[0]
            self._graphs[rows] = Recorder(shapes).run(shapes.model, inputs)
        return self._graphs[rows]

    def changed_buffer(self, rows: int) -> str:
        """A buffer that a forward changes, which recomputation would change twice; "": there is none.

        A BatchNorm moves its statistics in the first forward only: see unit_hooks.py.
        """
        batch_norms = ((path, one) for path, one in self.model.named_modules() if isinstance(one, BATCH_NORM))
        norms = {path: one for path, one in batch_norms if one.track_running_stats and one.training}
        apart = {path for path, module in norms.items() if statistics_stand_apart(module)}
        if len(apart) < len(norms):
            return f"{next(path for path in norms if path not in apart)}.running_mean"
        graph = self.graph(rows)
        buffers = {
            graph.values[n].storage: name
            for name, n in graph.names.items()
            if graph.values[n].kind == "buffer" and name.rpartition(".")[0] not in apart
        }
        written = [graph.values[before].storage for node in graph.nodes for before, _ in writes_of(node)]
        return next((buffers[storage] for storage in written if storage in buffers), "")

    @cached_property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes of the parameters, of those that are trained, and of the moments that are kept of these."""
        values = [*self.model.parameters()]
        held = sum(value.nbytes for value in values)
        trained = sum(value.nbytes for value in values if value.requires_grad)
        return held, trained, self._moments()

    def _moments(self) -> int:
        """Bytes that the optimizer keeps in the shapes of parameters; 0: it does not step without values."""
        model = self.shapes().model
        named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if self.optimizer is None:
            return 0
        try:
            made = self.optimizer(Parameters(named))
            optimizers = made if isinstance(made, (list, tuple)) else [made]
            for value in named.values():
                value.grad = torch.empty_like(value)
            for each in optimizers:
                each.step()
        except Exception:  # noqa: BLE001  a dry run says what is wrong
            return 0
        held = [(value, kept) for each in optimizers for value, kept in each.state.items()]
        return sum(
            each.nbytes
            for value, kept in held
            for each in kept.values()
            if isinstance(each, Tensor) and each.shape == value.shape
        )

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(value.numel() for value in self.model.parameters())
