"""A job that trains and one that serves, which share no world: the newest weights, cut for the server.

    export UNISONO_TOKEN=$(openssl rand -hex 32)
    unisono run -n 2 examples/publish.py train 29600
    unisono run -n 2 examples/publish.py serve 127.0.0.1:29600     # in another terminal, before or after

Each trainer holds half of the rows; each server takes half of the columns.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import unisono as un

ROWS, COLUMNS, STEPS, STEP_S = 64, 32, 20, 0.3


def train(world: un.Group, port: int) -> None:
    """Publish a version after each step."""
    mine = np.ones((ROWS // world.size, COLUMNS), np.float32)
    piece = un.Piece(mine, (world.rank * len(mine), 0), (ROWS, COLUMNS))
    with un.publish("policy", {"w": piece}, group=world, address="127.0.0.1", port=port) as publication:
        for _ in range(STEPS):
            time.sleep(STEP_S)
            mine += 1
            publication.update()


def serve(world: un.Group, address: str) -> None:
    """Take each version that is the newest, until the trainer has ended."""
    with un.subscribe(address, "policy", cut={"w": 1}, group=world, timeout=60) as subscription:
        version = 0
        try:
            while True:
                version, arrays = subscription.get(newer_than=version)
                assert arrays["w"].shape == (ROWS, COLUMNS // world.size)
                assert (arrays["w"] == version).all(), "one version"
                print(f"server {world.rank}: version {version}", flush=True)
        except un.PeerLost:
            print(f"server {world.rank}: the trainer has ended after version {version}")


def main() -> None:
    with un.init_process_group() as world:
        if sys.argv[1] == "train":
            train(world, int(sys.argv[2]))
        else:
            serve(world, sys.argv[2])


if __name__ == "__main__":
    main()
