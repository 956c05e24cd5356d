"""The capabilities that introductory texts describe: how to write each here, and what its program prints.

`python tests/texts/capabilities.py > docs/capabilities.md` writes the page; `make test-texts` runs the table.
"""

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path("tests/texts")
HEAD = """# Capabilities

What five introductory texts on collectives, `torch.distributed` and parallel training describe, and how to
write it here. Each row has a small program, and what it prints is checked: `make test-texts` runs them all.
The table in `tests/texts/capabilities.py` writes this page, and a test compares both.

- `write`: `un` is `unisono`, `up` is `unisono.parallel`, `dist` is `torch.distributed`.
- `checked`: what the program prints. Before, it compares losses, sums and weights with one process or NumPy.
- The command is for a clone. Under `--virtual-gpus` programs for CUDA and NCCL run without a GPU.
"""


@dataclass(frozen=True)
class Capability:
    """One row.

    Attributes:
        section: where it belongs.  what: in a few words.  write: how, in Markdown.
        program: a file of this folder and a name in it, a path in the repository, or a command.
        ranks: of `unisono run`; 0: the program runs by itself.  gpus: virtual ones.
        prints: what must be in the output, white space aside.
        environ: variables of the command.
        launcher: "mpiexec" in place of `unisono run`.
        needs: a module without which the row is left out.
        by_design: why there is none, in one line.
        refused: what the error says today, where the program shows what will be.
    """

    section: str
    what: str
    write: str = ""
    program: str = ""
    ranks: int = 0
    prints: tuple[str, ...] = ()
    gpus: int = 0
    environ: dict[str, str] = field(default_factory=dict)
    launcher: str = "unisono run"
    needs: str = ""
    by_design: str = ""
    refused: str = ""

    def command(self) -> list[str]:
        """The words of the command, from the root of the repository."""
        words = self.program.split()
        if words[0] == "unisono":
            return words
        path = words[0] if "/" in words[0] else str(HERE / words[0])
        gpus = ["--virtual-gpus", str(self.gpus)] if self.gpus else []
        ranks = [*self.launcher.split(), "-n", str(self.ranks), *gpus] if self.ranks else ["python"]
        return [*ranks, path, *words[1:]]

    def row(self, number: int) -> str:
        """Its line of the page."""
        if self.by_design:
            return f"| {number} | {self.what} | {self.by_design} | not there, by design | {code(self)} |"
        checked = "<br>".join(f"`{line}`" for line in self.prints) or "its assertions"
        if self.refused:
            checked += f"<br>refused today: `{self.refused}`"
        return f"| {number} | {self.what} | {self.write} | {checked} | {code(self)} |"


def code(row: Capability) -> str:
    """The command as Markdown."""
    if not row.program:
        return ""
    return "`" + " ".join([*(f"{name}={value}" for name, value in row.environ.items()), *row.command()]) + "`"


def page() -> str:
    """docs/capabilities.md."""
    lines, section = [HEAD.rstrip("\n")], ""
    for number, row in enumerate(CAPABILITIES, 1):
        if row.section != section:
            section = row.section
            lines += [
                f"\n## {section}\n",
                "| | capability | write | checked | command |",
                "|---|---|---|---|---|",
            ]
        lines.append(row.row(number))
    return "\n".join(lines) + "\n"


APART = {"UNISONO_RANKS_PER_HOST": "1"}  # each rank counts as a host of its own: TCP between them

C = "Collectives with PyTorch"
B = "Backends"
E = "Environment variables"
M = "How ranks meet"
D = "Devices and data parallelism"
P = "Stages, precision, memory"
N = "Collectives by programs"
F = "Costs and algorithms"
Z = "Sharded and compressed training"
H = "Data parallel and hybrid"

CAPABILITIES = (
    Capability(C, "broadcast, reduce, all-reduce, gather, all-gather, scatter, reduce-scatter, barrier",
        '`dist.init_process_group("nccl")`, tensors with `.cuda()`; or the methods of `un.Group`',
        "primitives.py eight", 3, ("broadcast [[2, 4], [2, 4], [2, 4]]", "reduce [6, 12]",
        "all_reduce [[6, 12], [6, 12], [6, 12]]", "gather [[1, 2], [2, 4], [3, 6]]",
        "all_gather [[1, 2], [2, 4], [3, 6]]", "scatter [[1, 2], [2, 4], [3, 6]]"), gpus=3),
    Capability(C, "all-reduce is reduce-scatter and all-gather",
        "`group.all_gather(group.reduce_scatter(x))`", "primitives.py two_halves", 3, ("the same bits",)),
    Capability(C, "a root gives or gets", "`dst=`, `src=`", "primitives.py roots", 4, ("roots 0 to 3",)),
    Capability(C, "SUM and AVG", "`dist.ReduceOp.AVG`, `un.AVG`", "primitives.py average", 3,
        ("[6.0, 12.0]", "[2.0, 4.0]"), gpus=3),
    Capability(C, "scatter undoes gather; broadcast sends the whole", "`group.scatter(out, group.gather(x))`",
        "primitives.py inverse", 3, ("scatter leaves 24 bytes on a rank, broadcast 72",)),
    Capability(C, "nobody leaves a barrier before all have come", "`group.barrier()`, `dist.barrier()`",
        "primitives.py barrier", 3, ("nobody left before the last one came",)),
    Capability(C, "a script for GPUs and NCCL runs unchanged, without a warning",
        "`unisono run --virtual-gpus 3 script.py`", "primitives.py quiet", 3, ("no warning on cuda:0",),
        gpus=3),
    Capability(C, "reduce-scatter of a list, one tensor for each rank", "`dist.reduce_scatter(out, tensors)`",
        "primitives.py powers", 3, ("[[6, 12], [14, 56], [36, 288]]",), gpus=3),

    Capability(B, "which backend can do what, on CPU and CUDA",
        "`unisono doctor --backends`; [backends.md](backends.md)", "unisono doctor --backends", 0,
        ("backends of torch.distributed, as tried on this machine", "broadcast yes yes yes yes")),
    Capability(B, "Gloo for CUDA tensors where NCCL fails", '`dist.init_process_group("gloo")`',
        "meeting_places.py gloo_on_gpus", 2,
        ("all_reduce [3.0, 3.0]", "reduce_scatter [3.0, 5.0]", "DDP has the weights of one process"), gpus=2),
    Capability(B, "DDP over MPI", '`dist.init_process_group("unisono-mpi")`; `unisono run --replace mpi`',
        "meeting_places.py over_mpi", 2, ("all_reduce [3]", "DDP has the weights of one process"),
        launcher="mpiexec"),
    Capability(B, "which one to take", '`backend="auto"`; [backends.md](backends.md#which-one)',
        "meeting_places.py automatic", 2, ("sum 3",)),
    Capability(B, "InfiniBand, GPUDirect",
        by_design='The engine has shared memory and TCP; RDMA comes with `"mpi"`, `"unisono-mpi"` or NCCL.'),
    Capability(B, "Windows and macOS", program="meeting_places.py windows_names",
        prints=("file:// needs an absolute path, three slashes",),
        by_design="Linux only; a file URL of Windows is an error line at once."),

    Capability(E, "one network interface",
        "`UNISONO_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`",
        "meeting_places.py one_interface", 2,
        ("GLOO_SOCKET_IFNAME=eth9 matches no interface that is up", "only lo"), environ=APART),
    Capability(E, "several interfaces, in turn", "`NCCL_SOCKET_IFNAME=eth0,eth1`",
        "meeting_places.py all_interfaces", 4, ("connections on every interface",), environ=APART),
    Capability(E, "a log of what was chosen", "`NCCL_DEBUG=INFO`, `UNISONO_LOG=info`; [log.md](log.md)",
        "meeting_places.py log", 2, ("coll: group world: all_reduce SUM float32[4] (16 bytes): one_shot",),
        environ={"NCCL_DEBUG": "INFO"}),

    Capability(M, "one process for each rank",
        "`up.Plan(data=2)`; [training.md](training.md#one-process-or-many)", "data_parallelism.py processes",
        2, ("the losses of one process",)),
    Capability(M, "is a backend available?", "`un.is_available(name)`, `dist.is_available()`",
        "meeting_places.py available", 2, ("{'native': True, 'auto': True, 'gloo': True} True",)),
    Capability(M, "backend, init_method, timeout, world_size, rank, store, group_name",
        '`un.init_process_group(...)`, `dist.init_process_group("unisono", ...)`', "meeting_places.py names",
        2, ("mine 60.0", "init_method and store exclude each other")),
    Capability(M, "a store as the meeting place",
        "`store=`; `unisono.torch.Store(store)` where PyTorch asks for its own", "key_values.py both_ways", 2,
        ("unisono over PyTorch's TCPStore 3", "torch.distributed over Unisono's FileStore 3")),
    Capability(M, "a TCP address", '`init_method="tcp://host:port"`', "meeting_places.py tcp", 0,
        ("tcp: 3, 3",)),
    Capability(M, "one rank fails, the others stop", "`un.PeerLost`, without a launcher, too",
        "meeting_places.py one_fails", 0, ("rank 0 stopped, and names rank 1 and its ValueError",)),
    Capability(M, "no multicast addresses", "an error at once", "meeting_places.py multicast", 0,
        ("this is a multicast address, by which no ranks meet",)),
    Capability(M, "rank 0 collects addresses; all pairs are connected", "[design.md](design.md)",
        "meeting_places.py mesh", 4, ("messages between all pairs of 4 hosts",), environ=APART),
    Capability(M, "a shared file", '`init_method="file:///path"`', "meeting_places.py file", 0,
        ("file: 3, 3", "'/no/such/folder/f': No such file or directory")),
    Capability(M, "a file that an earlier job has left", "nothing to do", "meeting_places.py used_file", 0,
        ("the second job met at the file of the first",)),
    Capability(M, "environment variables", '`init_method="env://"`, the default', "meeting_places.py env", 0,
        ("sum 3", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT, not set here")),
    Capability(M, "`python -m torch.distributed.launch` on two nodes",
        "the same; or `unisono run` with the same flags", "launches.py nodes", 0,
        ("torch.distributed.launch: 4 ranks, sum 10, rank 0 on node 0",
        "unisono: 4 ranks, sum 10, rank 0 on node 0")),
    Capability(M, "TCPStore, FileStore, HashStore", "`un.TCPStore`, `un.FileStore`, `un.HashStore`",
        "key_values.py kinds", 0,
        ("TCPStore other 6", "FileStore other 6", "HashStore other 6", "threads [3, 3]")),
    Capability(M, "Ray starts the ranks", "`unisono.ray.run(function, num_workers=2)`", "launches.py ray", 0,
        ("[3, 3]",), needs="ray"),
    Capability(M, "stages of a model without a change of it",
        "`up.Plan(pipeline=2)`: stages come from a recording", "stages.py recorded", 2, ("['1', 'second']",)),

    Capability(D, "a trillion parameters on 3,072 A100", "`unisono plan`, `un.plan`", "sharing.py cluster", 0,
        ("within 10 % of 502 PFLOP/s",)),
    Capability(D, "tensors of two devices in one operation", "PyTorch's errors, on virtual GPUs",
        "devices.py places", 1, ("Expected all tensors to be on the same device",
        "at least two devices, cuda:0 and cuda:1!", "{'cuda:1'} cuda:1"), gpus=2),
    Capability(D, "nn.DataParallel", "the same, on virtual GPUs", "devices.py replicas", 1,
        ("the losses of one device; the first device holds the most",), gpus=2),
    Capability(D, "data parallel by threads on a CPU", "`examples/one_process.py`",
        "examples/one_process.py"),
    Capability(D, "torchrun", "`torchrun --nproc-per-node 2`, `unisono run --nproc-per-node 2`",
        "launches.py torchrun", 0, ("torch.distributed.run: 2 ranks, sum 3", "unisono: 2 ranks, sum 3")),
    Capability(D, "DDP around a model that is not on its GPU yet", "NCCL's error; over CPU ranks it works",
        "data_parallelism.py wrapped_early", 2, ("No backend type associated with device type cpu",
        "over CPU ranks [(32, 10), (32,), (3, 32), (3,)]"), gpus=2),
    Capability(D, "DDP with DistributedSampler, set_epoch and Adam", "the same, on virtual GPUs or CPU ranks",
        "data_parallelism.py sampled", 2, ("each row once an epoch, another order in each, all ranks equal",),
        gpus=2),
    Capability(D, "rank 0 saves, a barrier, all load", "`torch.save`, `dist.barrier()`, `torch.load`",
        "data_parallelism.py sampled", 2, ("all ranks load what rank 0 saved",), gpus=2),
    Capability(D, "the mean loss of all ranks", "`dist.all_reduce` of a clone; or `up.Average`",
        "data_parallelism.py averaged", 2, ("mean 1.5 of [1.0, 2.0]",)),
    Capability(D, "a store is like a dict", "`store[key]`, `in`, `len`, `del`, `keys()`, `dict(store)`",
        "key_values.py like_a_dict", 0, ("['a', 'b'] 2", "['b']")),
    Capability(D, "send and receive", "`dist.send`, `dist.recv`", "key_values.py messages", 2,
        ("[2.0, 4.0, 6.0]",)),
    Capability(D, "reductions by name", "`dist.ReduceOp.PRODUCT` ...", "key_values.py operations", 3,
        ("SUM 9", "PRODUCT 24", "MIN 2", "MAX 4", "BAND 0", "BOR 7", "BXOR 5", "AVG 3.0")),
    Capability(D, "collectives of objects, reduce too",
        "`group.reduce_object(obj, op)` ...; [objects.md](objects.md)", "key_values.py objects", 3,
        ("broadcast {'lr': 0.1}", "reduce [0, 1, 2]", "all_reduce {0, 1, 2}",
        "gather ['rank 0', 'rank 1', 'rank 2']", "scatter [0, 1, 4]",
        "torch.distributed [('from', 0), ['part', 1]]")),

    Capability(P, "a model over two devices by hand", '`.to("cuda:1")`, on virtual GPUs', "devices.py halves",
        1, ("['cuda:0', 'cuda:1']",), gpus=2),
    Capability(P, "a pipeline over the devices of one process", "`up.Pipe(model, chunks=4)(x).local_value()`",
        "devices.py pipe", 1, ("the losses of one device",), gpus=2),
    Capability(P, "a checkpoint of a pipeline beside data ranks",
        "`run.save(folder)`, `run.load(folder)` under any plan", "stages.py checkpointed", 4,
        ("the losses of one process, before and after the checkpoint",), environ=APART),
    Capability(P, "a pipeline over hosts", '`up.Plan(pipeline=2, micro_batches=8, schedule="gpipe")`',
        "stages.py between_hosts", 2, ("the losses of one process, stages on two hosts",), environ=APART),
    Capability(P, "the bubble, (p-1)/(m+p-1), and its picture",
        '`predict(schedule("gpipe", p, m), ...)`, `run.timeline()`', "stages.py bubbles", 0,
        ("p=4 m=8: 0.2727", "p=2 m=8: 0.1111", "p=4 m=1: 0.7500")),
    Capability(P, "RPC", program="meeting_places.py rpc_of_pytorch", ranks=1, prints=("[2.0, 2.0]",),
        by_design="`torch.distributed.rpc` is PyTorch's own: it moves nothing over Unisono."),
    Capability(P, "float16 and bfloat16", '`up.Plan(precision="bf16")`; `torch.autocast`',
        "stages.py precisions", 2, ("fp16 follows f32", "bf16 follows f32", "autocast follows f32")),
    Capability(P, "TF32", "`up.Plan(tf32=True)`", "stages.py tf32", 2, ("off by default",)),
    Capability(P, "the float formats: sign, exponent, fraction", "[codecs.md](codecs.md)", "sharing.py table",
        0, ("f32: 1-8-23", "bf16: 1-8-7", "fp16: 1-5-10")),
    Capability(P, "weights moved away after forward save nothing", "the same, on virtual GPUs",
        "devices.py moved_away", 1, ("autograd keeps 16384 bytes on the GPU",), gpus=2),
    Capability(P, "weights that wait in memory or a file",
        '`up.Plan(swap="disk")`', "stages.py swaps", 2,
        ("memory has the losses without swapping, bit for bit", "disk has the losses without swapping")),
    Capability(P, "weights of a GPU that wait in the host's memory", "`up.Swapped(store=up.Host())`",
        "devices.py swapped", 1, ("the losses of AdamW, bit for bit; no weight stays on the GPU",), gpus=2),
    Capability(P, "the same under ZeRO", '`up.Plan(data=2, zero=3, swap="disk")`',
        "stages.py swaps_with_zero", 2, ("the losses of one process",)),

    Capability(N, "reduction by subtraction", "`un.op(f)`", "primitives.py subtraction", 4, ("[40.0, 1.0]",)),
    Capability(N, "one program starts its ranks for four GPUs", "`mp.spawn`, on virtual GPUs",
        "primitives.py spawn", 1, ("all_gather [1, 2, 3, 4]", "all_reduce [10, 10]", "reduce [10, 10]",
        "reduce_scatter [10, 20, 30, 40]"), gpus=4),
    Capability(N, "too few GPUs", "`torch.cuda.device_count()`", "primitives.py four_gpus", 1,
        ("this program needs four GPUs, there are 3",), gpus=3),
    Capability(N, "reduce-scatter of one whole tensor", "`dist.reduce_scatter(out, [whole])`",
        "primitives.py one_whole", 4, ("[[10.0, 10.0], [10.0, 10.0], [10.0, 10.0], [10.0, 10.0]]",), gpus=4),
    Capability(N, "send and receive at once", "`group.sendrecv(x, dst, out, src)`",
        "primitives.py ring_of_three", 3, ("[2.0, 0.0, 1.0]",)),

    Capability(F, "the time of a message, a + b l", "`plan_cost.seconds(plan, nbytes, a=, b=)`",
        "formulas.py message", 0, ("a swap: a + b * l",)),
    Capability(F, "broadcast, reduce and all-reduce by trees", '`algorithm="binomial"`, `"linear"`',
        "formulas.py trees", 0, ("broadcast, linear: (p - 1) * (a + b * l), exact for p = 2 to 32",
        "broadcast, binomial: log(p) * (a + b * l), exact for p = 2 to 32",
        "all_reduce, binomial: 2 * log(p) * (a + b * l), exact for p = 2 to 32")),
    Capability(F, "gather and scatter", '`algorithm="binomial"`', "formulas.py parts", 0,
        ("gather, binomial: a * log(p) + (p - 1) * b * l, exact for p = 2 to 32",
        "scatter, binomial: a * log(p) + (p - 1) * b * l, exact for p = 2 to 32")),
    Capability(F, "all-gather by a hypercube, and by gather and broadcast",
        '`algorithm="doubling"`, `"gather_broadcast"`', "formulas.py all_gathers", 0,
        ("all_gather, doubling: a * log(p) + (p - 1) * b * l, exact for p = 2, 4, 8, 16, 32",)),
    Capability(F, "reduction by any associative function", "`un.op(f)`, `un.op(f, commutative=False)`",
        "primitives.py functions", 4, ("product of matrices [[1.0, 6.0], [0.0, 1.0]]", "longest xxx")),
    Capability(F, "gather as a reduction that joins", "`group.reduce_object(list, un.op(f))`",
        "primitives.py joined", 4, ("[0, 1, 1, 2, 2, 2, 3, 3, 3, 3]",)),
    Capability(F, "prefix sums, all-to-all", "`group.scan`, `exclusive_scan`, `all_to_all`",
        "primitives.py prefixes", 4,
        ("scan [1, 3, 6, 10]", "exclusive_scan [1.0, 3.0, 6.0]", "all_to_all [0, 10, 20, 30]")),
    Capability(F, "the ring, step by step", "`unisono draw all_reduce --algorithm ring -n 3`",
        "formulas.py trace", 3, ("after the reductions [14.0, 21.0, 7.0]", "sum [7.0, 14.0, 21.0]",
        "mean [2.3333, 4.6667, 7.0]")),
    Capability(F, "congestion at a central device", "`unisono simulate`, `un.simulate`",
        "formulas.py congestion", 0, ("aggregator: 799 ms", "ring: 105 ms", "2 (p-1)/p S/B = 94 ms")),
    Capability(F, "tree, ring, torus, a switch that adds", '`algorithm=`; `"in_network"` in the simulator',
        "formulas.py shapes", 4, ("binomial, double_tree, ring, torus, aggregator: the sum",),
        environ={"UNISONO_RANKS_PER_HOST": "2"}),
    Capability(F, "algorithm and bus bandwidth", "`unisono bench all_reduce -n 3`", "formulas.py bandwidths",
        0, ("all_reduce: 2(p-1)/p", "all_gather: (p-1)/p", "broadcast: 1")),
    Capability(F, "bandwidth between two ranks", "`unisono bench send_recv`", "formulas.py point_to_point", 0,
        ("bytes / time",)),

    Capability(Z, "170 billion parameters in f32 on GPUs of 80 GB", "`un.plan`, `unisono plan`",
        "sharing.py too_large", 0,
        ("zero=0: 680 GB of parameters on a GPU", "zero=3: 11 GB of parameters on a GPU")),
    Capability(Z, "shards within a node, replicas between nodes", "`up.Plan(data=4, zero=3, shard=2)`",
        "sharing.py within_a_node", 4,
        ("the losses of one process; ['all_gather', 'all_reduce', 'reduce_scatter']",)),
    Capability(Z, "gather before use, reduce to the owner", "`up.Plan(zero=3)`, `run.explain()`",
        "sharing.py gathers", 2, ("18 calls: all_gather 12 reduce_scatter 6",)),
    Capability(Z, "inference from shards", "`run.predict(inputs)`", "sharing.py inference", 2,
        ("outputs of one process",)),
    Capability(Z, "gradients as two factors", "`up.PowerSGD(rank=4).attach(ddp)`; `up.Plan(compression=...)`",
        "sharing.py low_rank", 2, ("'0.weight': 'bf16', '2.weight': '4', '3.weight': 'exact'",)),
    Capability(Z, "two factors in a call", "`group.all_reduce(x, codec=un.LowRank(rank=4))`",
        "sharing.py low_rank_call", 2, ("1536 bytes in place of 8192",)),
    Capability(Z, "shards, two factors and 16 bits together",
        '`up.Plan(zero=2, precision="bf16", compression=up.PowerSGD())`', "sharing.py all_together", 2,
        ("follows one process in f32",)),
    Capability(Z, "three classes of parameters", "`un.codecs.classify`, `up.PowerSGD(rank={pattern: ...})`",
        "sharing.py classes", 0, ("{'0.weight': 'bf16', '0.bias': 'exact'}",)),
    Capability(Z, "formats 1-6-9 and 0-6-10", '`un.codecs.encode(x, "1-6-9")`, `codec="1-6-9"`',
        "sharing.py formats", 2,
        ("1-6-9 error at most 2^ -10", "0-6-10 error at most 2^ -11", "all_reduce in both")),
    Capability(Z, "Adam in four bytes a parameter", "`up.CompressedAdam`", "sharing.py adam_in_four_bytes", 0,
        ("{'AdamW': '8.00 bytes', 'CompressedAdam': '4.00 bytes'}",)),

    Capability(H, "the interfaces of Horovod, KungFu and TensorFlow",
        by_design="Unisono has the names of PyTorch and mpi4py, not those of other frameworks."),
    Capability(H, "a DDP program whose set-up alone names the library",
        '`"nccl"` or `"gloo"`, on virtual GPUs', "data_parallelism.py spawn", 1,
        ("nccl has the weights of one process", "gloo has the weights of one process"), gpus=2),
    Capability(H, "DDP's buckets", "`bucket_cap_mb=`", "data_parallelism.py buckets", 2,
        ("1 MB: 8 buckets", "2 MB: 4 buckets", "25 MB: 1 buckets")),
    Capability(H, "all-reduce from one buffer into another, by a ring",
        '`group.all_reduce(x, out=y, algorithm="ring")`', "primitives.py two_buffers", 3,
        ("[1.0, 1.0] [6.0, 6.0]",)),
    Capability(H, "strategies per operator", "`up.shard(torch.matmul, ((4, 1), (1, 1)))`",
        "operator_strategies.py two_products", 4,
        ("inserted before the end: ['all_gather'] the losses of one process",)),
    Capability(H, "which operators have strategies", "[shard.md](shard.md); others are refused by name",
        "operator_strategies.py operators", 4, ("6 rows by 4 ranks: right", "images of a convolution: right",
        "shard(matmul): plain tensors count as replicated", "must be cut alike")),
    Capability(H, "strategies, stages and micro-batches in one network",
        "`up.shard` under `up.Plan(pipeline=2, tensor=2)`", "operator_strategies.py stages", 4,
        ("the losses of one process",)),
    Capability(H, "rows of their own for each rank, strategies inside",
        "`up.shard` under `up.Plan(data=2, tensor=2)`", "operator_strategies.py data_outside", 4,
        ("the losses of one process",)),
    Capability(H, "the same by axes", "`up.Plan(tensor=2, pipeline=2, micro_batches=4)`", "stages.py axes", 4,
        ("tensor=2 data=1 pipeline=2: the losses of one process",
        "tensor=1 data=2 pipeline=2: the losses of one process")),
    Capability(H, "a plan that is found", '`up.parallelize(model, "auto", ...)`, `up.plan`',
        "stages.py automatic", 2, ("the losses of one process, by the plan that was chosen",)),
    Capability(H, "MindSpore's programs",
        by_design="NumPy and PyTorch are the only array libraries; MindSpore's names are not there."),
)  # fmt: skip

if __name__ == "__main__":
    print(page(), end="")
