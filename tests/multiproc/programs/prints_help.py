"""Prints the help of every command."""

import contextlib

from unisono.commands.cli import COMMANDS, main

for command in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
