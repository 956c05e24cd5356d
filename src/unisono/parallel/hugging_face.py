"""Writes what Hugging Face's `save_pretrained` writes, streamed: rank 0 holds one file's weights at most.

A model of `transformers` gives its weights with its configuration, one of `peft` its adapters only. Neither
library is imported here: the model brings it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .plain_class import plain_class
from .weights import FirstRankWriter, export

__all__ = ["save_pretrained", "write_configuration"]

Weights = Callable[[], Iterator[tuple[str, "Tensor | None"]]]


def save_pretrained(
    model: nn.Module, weights: Weights, blanks: Mapping[str, Tensor], folder: Path, shard_bytes: int
) -> None:
    """See `Run.save_pretrained`.

    Args:
        weights: of the run.
        blanks: each of them on the meta device, by its name.
    """
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
    """The names of what a model of `peft` saves; None: it is a model of another kind.

    Raises:
        ValueError: it is a model of no kind that has `save_pretrained`.
    """
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
