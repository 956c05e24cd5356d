"""An elastic program in which rank 0 of a subgroup leaves its other rank out; the group goes on as it was."""

import unisono as un

for group in un.elastic():
    with group:
        part = group.subgroup([0, 1])
        if group.rank == 0:
            part.shrink(exclude=[1]).close()
        group.barrier()
        print("done", group.generation, "size", group.size, flush=True)
