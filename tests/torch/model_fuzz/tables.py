"""The operators of random programs, with their weights.

UP and DOWN mostly hold layers that can be cut; those of MIDDLE mostly leave the last dim as it is, so that
what lies between two layers can be cut, too.
"""

from collections.abc import Callable

from . import (
    attentions,
    discrete,
    factories,
    images,
    indexing,
    matrices,
    operators,
    spectra,
    structures,
    writes,
)
from .writer import Writer

Operator = Callable[[Writer], "str | list[str]"]
Table = dict[str, tuple[Operator, float]]

UP: Table = {
    "up": (operators.up, 10),
    "attention": (operators.attention, 4),
    "modules": (operators.modules, 1.5),
    "embedding": (operators.embedding, 1.5),
    "product": (operators.product, 1),
    "convolution": (operators.convolution, 2),
    "mixer": (operators.mixer, 1.5),
    "grouped": (attentions.grouped, 2.5),
    "crossed": (attentions.crossed, 1.5),
    "gated": (attentions.gated, 2.5),
    "filtered": (images.filtered, 2),
    "words": (discrete.words, 1.5),
    "pieced": (structures.pieced, 1.5),
    "elsewhere": (structures.elsewhere, 1),
    "around": (structures.around, 1.5),
}
DOWN: Table = {
    "down": (operators.down, 9),
    "mixer": (operators.mixer, 1),
    "again": (operators.again, 1),
    "tied": (operators.tied, 1),
    "head": (operators.head, 1),
    "convolution": (operators.convolution, 1),
    "with_value": (operators.with_value, 1),
    "outside": (structures.outside, 1),
    "keywords": (structures.keywords, 0.7),
    "containers": (structures.containers, 0.7),
    "gradient": (structures.gradient, 0.5),
    "filtered": (images.filtered, 0.7),
}
MIDDLE: Table = {
    "pointwise": (operators.pointwise, 5),
    "with_parameter": (operators.with_parameter, 4),
    "with_value": (operators.with_value, 4),
    "heads": (operators.heads, 4),
    "flatten": (operators.flatten, 3),
    "view": (operators.view, 1),
    "permute": (operators.permute, 3),
    "squeeze": (operators.squeeze, 3),
    "cut": (operators.cut, 4),
    "pick": (operators.pick, 2),
    "pad": (operators.pad, 2),
    "join": (operators.join, 2),
    "reduce": (operators.reduce, 4),
    "along": (operators.along, 3),
    "norm": (operators.norm, 2),
    "mask": (operators.mask, 1),
    "product": (operators.product, 1),
    "between": (operators.between, 1),
    "written": (operators.written, 2),
    "recorded": (operators.recorded, 0.3),
    "prelu": (operators.prelu, 0.7),
    "up": (operators.up, 1),
    "again": (operators.again, 0.5),
    "tied": (operators.tied, 0.5),
    "convolution": (operators.convolution, 0.7),
    "modules": (operators.modules, 0.3),
    "scattered": (indexing.scattered, 3),
    "gathered": (indexing.gathered, 3.5),
    "made": (factories.made, 3),
    "spectrum": (spectra.spectrum, 1.5),
    "algebra": (matrices.algebra, 2),
    "counted": (discrete.counted, 3),
    "overwritten": (writes.overwritten, 3.5),
    "resized": (images.resized, 3),
    "scanned": (attentions.scanned, 1.5),
    "outside": (structures.outside, 1),
    "gradient": (structures.gradient, 1),
    "keywords": (structures.keywords, 0.5),
    "elsewhere": (structures.elsewhere, 0.5),
    "containers": (structures.containers, 0.5),
}
OPERATORS: dict[str, Operator] = {
    name: operator for table in (UP, DOWN, MIDDLE) for name, (operator, _) in table.items()
} | {"experts": structures.experts}
