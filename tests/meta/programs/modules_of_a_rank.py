"""`modules_of_a_rank.py FOLDER`: a rank writes which modules a group brought. Run by test_import.py."""

import sys

import unisono

with unisono.init_process_group() as group:
    group.barrier()
    with open(f"{sys.argv[1]}/{group.rank}", "w") as out:
        print(*sys.modules, file=out)
