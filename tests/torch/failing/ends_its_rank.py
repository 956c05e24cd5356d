"""Checks for test_checks.py: some end their rank."""

import os
import signal

import torch.distributed as dist


def check_ends_its_process(rank, size):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def check_passes_after_a_death(rank, size):
    dist.barrier()


def check_is_killed(rank, size):
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def check_passes_at_last(rank, size):
    dist.barrier()
