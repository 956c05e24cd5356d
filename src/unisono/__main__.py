"""`python -m unisono`: the same as the command `unisono`."""

from __future__ import annotations

import sys

from unisono.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
