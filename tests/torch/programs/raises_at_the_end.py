"""A daemon thread's callback raises as the interpreter ends. PyTorch's C++ takes the GIL to free the error.

Run by test_torch_launch.py. The callback is C code: the main thread gets no GIL until it raises.
"""

import operator
import sys
import threading
import time
from functools import partial, reduce
from itertools import chain, repeat

import torch

import unisono.torch.process_group  # noqa: F401

future: torch.futures.Future[object] = torch.futures.Future()
raises = chain(repeat(1, 30_000_000), map(int, ["not a number"]))
last = future.then(partial(reduce, operator.is_, raises))
sys.setswitchinterval(100)
threading.Thread(target=future.set_result, args=(None,), daemon=True).start()
time.sleep(0.01)
