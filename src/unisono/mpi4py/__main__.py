"""`srun -n 64 python -m unisono.mpi4py script.py`: a program for mpi4py on Unisono, under any launcher.

The options are those of `python -m mpi4py`. `unisono run --replace mpi4py` does the same for its ranks.
"""

from __future__ import annotations

import os
import sys

from unisono.mpi4py.package import SITE
from unisono.mpi4py.run import main

if __name__ == "__main__":
    environ = os.environ  # noqa: TID251 (processes that the program starts find the same mpi4py)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SITE, environ.get("PYTHONPATH", ""))))
    sys.path.insert(1, SITE)
    main("unisono.mpi4py")
