"""Another spelling of train.py, with the ways of `unisono.parallel` and what they are compared with.

python benchmarks/parallel.py --ranks 2 --model 10M
python benchmarks/parallel.py --ranks 2 --model 10M --memory
"""

from __future__ import annotations

import importlib.util
import sys

import train

if __name__ == "__main__":
    zero = importlib.util.find_spec("deepspeed") is not None
    ways = [way for way in (*train.THEIRS, *train.OURS) if zero or not way.startswith("zero")]
    train.main(["--ways", ",".join(ways), *sys.argv[1:]])
