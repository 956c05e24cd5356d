"""Runs the Python blocks of pages on this rank: those of one page one after the other, in one namespace.

Arguments: the folder to work in, pages. A block is compiled with its page's name and its place there: a
traceback names both.
"""

import os
import sys
from pathlib import Path

from pages import blocks


def main(folder: str, *names: str) -> None:
    os.chdir(folder)
    for name in names:
        page = Path(name)
        if "UNISONO_STORE" not in os.environ:  # no launcher serves one: the last page's may have the port
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        space: dict[str, object] = {"__name__": "__main__"}
        for block in blocks(page.read_text()):
            if block.language != "python":
                continue
            exec(compile("\n" * block.line + block.text, str(page), "exec"), space)
        if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
            sys.modules["torch"].distributed.destroy_process_group()  # the next page begins with its own
        print(f"{page.name}: ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
