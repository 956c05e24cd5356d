"""Imports a part of the package and looks at what came with it. Run by test_cli.py and test_codecs.py.

`imported_when_needed.py CASE`: a case is a function.
"""

import sys


def launcher() -> None:
    import unisono.commands.cli
    import unisono.commands.launch  # noqa: F401

    assert not {"numpy", "torch"} & set(sys.modules)


def codecs() -> None:
    import unisono

    assert not {"numpy", "torch", "unisono.codecs"} & set(sys.modules)
    assert unisono.codecs.bf16
    assert "torch" not in sys.modules


if __name__ == "__main__":
    globals()[sys.argv[1]]()
