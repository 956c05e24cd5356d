"""The signal at which a rank of the pytest plugin writes its stacks. An emulator has not all signals."""

import faulthandler
import os
from pathlib import Path

from unisono.testing.rank import STACKS


def test_a_process_writes_its_stacks_at_the_signal(tmp_path: Path) -> None:
    with open(tmp_path / "stacks", "w+") as file:
        faulthandler.register(STACKS, file=file)
        try:
            os.kill(os.getpid(), STACKS)
        finally:
            faulthandler.unregister(STACKS)
        file.seek(0)
        assert "in test_a_process_writes_its_stacks_at_the_signal" in file.read()
