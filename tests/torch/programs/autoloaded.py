"""`autoloaded.py MODULE...`: imports these, then PyTorch, and says what is registered and loaded of Unisono.

Run by test_replace.py.
"""

import importlib
import sys

ENGINE = ("unisono._native", "unisono.engine.group", "msgspec")


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    import torch

    assert torch.ones(1).item() == 1
    registered = "UNISONO" in torch.distributed.Backend._plugins
    print(registered, [name for name in sys.modules if name.startswith(ENGINE)])


main()
