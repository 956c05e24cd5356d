"""`leaves_by_an_exception.py JOINING`: rank 1 raises what nobody catches, rank 0 prints what it is told.

JOINING: "together", or "slowly": rank 0 still joins when rank 1 has joined, failed and ended.
"""

import atexit
import os
import sys
import time
from typing import Any

atexit.register(os._exit, 0)  # after all others: what is tested is not the exit code

import unisono as un  # noqa: E402
from unisono.engine.bootstrap import engine  # noqa: E402

share_memory = engine.share_memory


def slowly(*arguments: Any, **options: Any) -> Any:
    region = share_memory(*arguments, **options)
    time.sleep(1)
    return region


def main() -> None:
    group = un.init_process_group(init_method=os.environ["MEETING"])
    if group.rank == 1:
        raise FloatingPointError("loss is nan")
    try:
        group.barrier()
    except un.PeerLost as error:
        print(error, flush=True)


if (os.environ["RANK"], sys.argv[1]) == ("0", "slowly"):
    engine.share_memory = slowly
main()
