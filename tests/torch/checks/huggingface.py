"""Checkpoints in the format of Hugging Face: safetensors."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader, state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checks.states import folder, sharded
from checks.training import mine, train


def files():
    """Return safetensors' functions; a Python without GIL has no wheel of it."""
    return pytest.importorskip("safetensors.torch")


def trained(rank: int, size: int) -> tuple[dict, dict]:
    """Return the state of a model that is cut into `size` parts, and the same whole."""
    net = sharded(size)
    train(net, *mine(rank, size))
    state = state_dict.get_model_state_dict(net)
    return state, {name: x.full_tensor() for name, x in state.items()}


def check_one_file_that_every_rank_has_a_part_of(rank, size):
    path, (state, whole) = folder(rank), trained(rank, size)
    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    (file,) = Path(path).glob("*.safetensors")
    found = files().load_file(file)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], x) for name, x in whole.items())
    again = state_dict.get_model_state_dict(sharded(size))
    dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(path))
    assert all(torch.equal(again[name].full_tensor(), x) for name, x in whole.items())


def check_a_file_of_every_rank_loaded_by_one(rank, size):
    path, (state, whole) = folder(rank), trained(rank, size)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path, save_distributed=True))
    assert len(list(Path(path).glob("shard-*.safetensors"))) == size
    if rank == size - 1:
        again = {name: torch.zeros_like(x) for name, x in whole.items()}
        dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(path, thread_count=2), no_dist=True)
        assert all(torch.equal(again[name], x) for name, x in whole.items())


def check_eight_bits_with_scales(rank, size):
    """Blocks of 4 x 4 with a scale each; a rank's rows begin within a block."""
    path, rows = Path(folder(rank)), 6 * size
    generator = torch.Generator().manual_seed(8)
    weight = torch.randint(-9, 9, (rows, 8), generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 4), 2, generator=generator)
    if rank == 0:
        tensors = {"layer.weight": weight, "layer.weight_scale_inv": scales}
        files().save_file(tensors, path / "model.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
    mesh = init_device_mesh("cpu", (size,))
    found = {"layer.weight": distribute_tensor(torch.zeros(rows, 8), mesh, [Shard(0)])}
    dcp.load(found, storage_reader=QuantizedHuggingFaceStorageReader(str(path), block_size=4))
    want = weight.float() * scales.repeat_interleave(4, 0)[:rows].repeat_interleave(4, 1)
    assert torch.allclose(found["layer.weight"].full_tensor(), want)
