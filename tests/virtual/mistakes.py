"""Small wrong programs, each a mistake people make with several devices, and what the error must say.

Run as a program: prints one line of JSON per mistake, with the type and the text of what was raised.
`SAYS` is part of the text that a GPU gives; a mistake that a GPU runs into silently says `QUIET`.
"""

import io
import json
import sys
from collections.abc import Callable

from unisono import virtual

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {}
DEVICES = 4
TWO = "Expected all tensors to be on the same device, but found at least two devices, "
SAME = "Expected all tensors to be on the same device, but got "


def mistake(says: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def register(program: Callable[[], object]) -> Callable[[], object]:
        MISTAKES[program.__name__] = (program, says)
        return program

    return register


if __name__ == "__main__":
    virtual.enable(DEVICES, "256M")
    import torch
    from torch import nn


@mistake(TWO + "cuda:0 and cuda:1!")
def adds_tensors_of_two_devices():
    torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")


@mistake(TWO + "cuda:0 and cpu!")
def adds_a_cpu_tensor():
    torch.ones(3, device="cuda") + torch.ones(3)


@mistake(SAME + "mat2 is on cpu")
def multiplies_with_a_cpu_matrix():
    torch.ones(2, 2, device="cuda") @ torch.ones(2, 2)


@mistake(SAME + "mat1 is on cuda:0, different from other tensors on cpu")
def forgets_to_move_the_model():
    nn.Linear(2, 2)(torch.ones(1, 2, device="cuda"))


@mistake("Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same")
def forgets_to_move_an_image():
    nn.Conv2d(3, 4, 1).cuda()(torch.ones(1, 3, 2, 2))


@mistake(SAME + "index is on cpu, different from other tensors on cuda:0")
def forgets_to_move_token_ids():
    nn.Embedding(4, 2).cuda()(torch.tensor([1, 2]))


@mistake(SAME + "target is on cpu")
def forgets_to_move_labels():
    nn.functional.cross_entropy(torch.ones(2, 3, device="cuda"), torch.tensor([0, 1]))


@mistake(
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory"
)
def takes_numpy_of_a_gpu_tensor():
    torch.ones(3, device="cuda").numpy()


@mistake("CUDA error: invalid device ordinal")
def names_a_device_that_is_not_there():
    torch.ones(3, device="cuda:7")


@mistake("CUDA error: invalid device ordinal")
def sets_a_device_that_is_not_there():
    torch.cuda.set_device(DEVICES)


@mistake("Invalid device id")
def asks_for_properties_of_a_device_that_is_not_there():
    torch.cuda.get_device_properties(9)


@mistake("Expected a cuda device, but got: cpu")
def sets_the_cpu_as_device():
    torch.cuda.set_device("cpu")


@mistake("Expected a 'cuda' device type for generator but found 'cpu'")
def draws_with_a_generator_of_the_cpu():
    torch.rand(3, device="cuda", generator=torch.Generator().manual_seed(0))


@mistake("Expected a 'cpu' device type for generator but found 'cuda'")
def draws_on_the_cpu_with_a_generator_of_a_gpu():
    torch.rand(3, generator=torch.Generator("cuda"))


@mistake("Expected a 'cuda:1' generator device but found 'cuda:0'")
def draws_with_a_generator_of_another_gpu():
    torch.rand(3, device="cuda:1", generator=torch.Generator("cuda:0"))


@mistake("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
def pins_a_gpu_tensor():
    torch.ones(3, device="cuda").pin_memory()


@mistake(SAME + "tensors is on cuda:1, different from other tensors on cuda:0")
def concatenates_two_devices():
    torch.cat([torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")])


@mistake("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
def indexes_a_cpu_tensor_with_a_gpu_mask():
    torch.arange(3)[torch.tensor([True, False, True], device="cuda")]


@mistake("indices should be either on cpu or on the same device as the indexed tensor (cuda:0)")
def indexes_with_another_gpu():
    torch.arange(3, device="cuda:0")[torch.tensor([1], device="cuda:1")]


@mistake(TWO + "cuda:0 and cpu!")
def keeps_a_running_mean_on_the_cpu():
    mean = torch.zeros(3)
    mean.lerp_(torch.ones(3, device="cuda"), 0.1)


@mistake(SAME + "running_mean is on cpu")
def replaces_a_buffer():
    norm = nn.BatchNorm1d(3).cuda()
    norm.running_mean = torch.zeros(3)
    norm(torch.ones(2, 3, device="cuda"))


@mistake(TWO)
def loads_the_optimizer_before_the_model_moves():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.cuda()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()


@mistake(
    "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on"
)
def wraps_in_data_parallel_on_the_wrong_device():
    nn.DataParallel(nn.Linear(2, 2).cuda(1), device_ids=[0, 1])(torch.ones(2, 2, device="cuda:0"))


@mistake("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 256.00 MiB")
def asks_for_too_much_memory():
    torch.empty(2 << 28, device="cuda")


@mistake("CUDA error: operation not permitted when stream is capturing")
def reads_a_loss_in_a_graph():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(2, device="cuda").sum().item()


@mistake("Both events must be created with argument 'enable_timing=True'")
def times_without_asking_for_it():
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record(), end.record()
    begin.elapsed_time(end)


@mistake("Both events must be recorded before calculating elapsed time.")
def times_what_was_not_recorded():
    torch.cuda.Event(enable_timing=True).elapsed_time(torch.cuda.Event(enable_timing=True))


@mistake("Attempting to deserialize object on CUDA device 5 but torch.cuda.device_count() is 4")
def loads_a_checkpoint_of_a_larger_machine():
    stored = io.BytesIO()
    torch.save(torch.ones(2), stored)
    stored.seek(0)
    torch.load(stored, map_location="cuda:5")


@mistake("Attempted to set the storage of a tensor on device")
def sets_the_data_of_another_device():
    torch.ones(2).set_(torch.ones(2, device="cuda").untyped_storage())


@mistake("Assertion")
def reads_uninitialised_memory():
    loss = torch.empty(4, device="cuda").sum()
    assert not loss.isnan(), "Assertion: the loss is NaN"


def main() -> None:
    for name, (program, _) in MISTAKES.items():
        try:
            program()
            seen = ["nothing", ""]
        except Exception as error:
            seen = [type(error).__name__, str(error)]
        print(json.dumps([name, *seen]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
