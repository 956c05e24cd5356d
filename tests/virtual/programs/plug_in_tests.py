"""A test on one of three virtual GPUs. Copied and run by test_virtual.py."""

import torch


def test_it():
    assert torch.ones(2, device="cuda:2").device.index == 2
