"""Where the numbers of a training script part on several ranks: what `unisono compare` records and reads.

    recorder  in each rank: what a step was made of, taken by hooks of PyTorch from outside the script
    records   the readings of a rank in a file, and those of a run
    parting   the first reading in which two runs differ by more than rounding
    causes    what such a difference means, in words

A script may mark a number that counts: `un.compare.note("accuracy", value)`. Without `unisono compare` that
does nothing.
"""

from __future__ import annotations

from .records import note

__all__ = ["note"]
