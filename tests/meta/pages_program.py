"""Runs the Python blocks of pages on this rank: those of one page one after the other, in one namespace.

Arguments: pages. A block is compiled with its page's name and its place there: a traceback names both.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from pages import blocks


def about_torch(text: str) -> bool:
    """Whether a block needs PyTorch: it imports it, or trains by a plan of `unisono.parallel as up`."""
    return "torch" in text or "unisono.parallel" in text or "up." in text


def main(names: list[str]) -> None:
    for name in names:
        page = Path(name)
        space: dict[str, object] = {"__name__": "__main__"}
        for block in blocks(page.read_text()):
            if block.language != "python":
                continue
            if find_spec("torch") is None and about_torch(block.text):
                break  # the blocks behind it may need its names
            exec(compile("\n" * block.line + block.text, str(page), "exec"), space)
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()  # the next page begins with its own
        print(f"{page.name}: ran")


if __name__ == "__main__":
    main(sys.argv[1:])
