"""`python -m unisono`: the same as the command `unisono`."""

from __future__ import annotations

from unisono.commands.cli import program

if __name__ == "__main__":
    program()
