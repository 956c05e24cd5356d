"""`unisono plan`: the best way to train a transformer on given hardware, with its reasons. Nothing runs.

picture   the drawing as SVG; docs/planner.md is the tour
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.planner import TransformerShape
    from unisono.planner.shape import ExpertShape
    from unisono.planner.training_plan import Runtime

__all__ = ["add_arguments", "main"]

NUMBERS = ("layers", "hidden", "heads", "vocab")
EXPERTS = ("experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers")
YES = {"yes": True, "no": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.allow_abbrev = False
    parser.usage = "%(prog)s --model MODEL --batch N (--gpus N --hardware HW | --hosts HOSTS) ...; --help"
    parser.epilog = (
        "Example: unisono plan --model llama3-8b --sequence 8192 --batch 64 --gpus 8 --hardware h100-80g. "
        "docs/planner.md explains each option. For any other model: unisono.parallel.plan, in Python."
    )
    add = parser.add_argument
    _add_model(parser)
    _add_hosts(parser)
    add("--batch", type=int, required=True, metavar="N", help="sequences of a step, of all GPUs")
    add("--memory", default="", metavar="SIZE", help="of a GPU that a plan may use, such as 70G or 65GiB")
    add(
        "--plan",
        default="",
        metavar="PLAN",
        help="price this one: tensor=8,pipeline=12,data=4,recompute=full",
    )
    add("--fix", default="", metavar="PLAN", help="search only plans with these fields, such as sequence=no")
    add(
        "--compute",
        default=None,
        metavar="TYPES",
        help="bf16, fp16, f32, fp8, or several to compare: bf16,fp8 (default: the hardware's first)",
    )
    add(
        "--reduce",
        default="f32",
        metavar="TYPE",
        help="type of gradients: f32 (default), or low as --compute",
    )
    add("--overlap", default=None, metavar="yes|no", help="data collectives travel during compute")
    add(
        "--codecs",
        default="",
        metavar="LIST",
        help="try these for gradients, which change training: bf16,int8,rank4",
    )
    _add_experts(parser)
    add("--runtime", action="store_true", help="search only what unisono.parallel runs (needs PyTorch)")
    add(
        "-o",
        "--output",
        default="",
        metavar="FILE",
        help="FILE.svg: time over memory of all plans; FILE.html: a page",
    )
    add("--json", action="store_true", help="the choice on standard output as JSON")


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    """Declare what says on what it is trained."""
    add = parser.add_argument
    add("--gpus", type=int, default=None, metavar="N", help="how many there are")
    add("--hardware", default=None, metavar="HW", help="FILE.toml, or a100-80g, h100-80g, v100-32g ...")
    add(
        "--hosts",
        default=None,
        metavar="HOSTS",
        help="hosts that may differ, in place of both: 4xa100-40g,2xh100-80g, or FILE.toml",
    )
    add("--network", default="", metavar="NET", help="FILE.toml, or a name that `unisono network` lists")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    """Declare what says how rows of experts travel."""
    add = parser.add_argument
    add(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="rows of the fullest rank's experts over the mean (default: 1)",
    )
    add(
        "--dispatch",
        default="experts",
        metavar="WAY",
        help="experts: rows of a token go to each of its experts (default); hosts: once to each host",
    )
    add("--routed-hosts", type=int, default=0, metavar="N", help="hosts at most of a token's experts")
    add("--expert-overlap", action="store_true", help="rows of experts travel beside another micro-batch")


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Declare what says which model is trained."""
    add = parser.add_argument
    add(
        "--model",
        default="",
        metavar="MODEL",
        help="config.json, its folder, gpt2, llama3-8b ...; or numbers:",
    )
    for name, text in (
        ("layers", "layers"),
        ("hidden", "width of the model"),
        ("heads", "heads of attention"),
        ("kv-heads", "heads of keys and values (default: as --heads)"),
        ("ffn", "width of the MLP (default: 4 x hidden)"),
        ("experts", "experts of a layer (default: none)"),
        ("top-k", "experts of a token"),
        ("expert-ffn", "width of an expert (default: as --ffn)"),
        ("shared-ffn", "width of the experts that all tokens share"),
        ("dense-layers", "layers at the beginning that have no experts"),
        ("vocab", "tokens that there are"),
        ("sequence", "tokens of a sequence"),
    ):
        add(f"--{name}", type=int, default=None, metavar="N", help=text)
    add("--family", default=None, metavar="NAME", help="gpt (default) or llama: gated MLP, no biases, untied")
    add("--loss", default="eager", metavar="NAME", help="cross entropy: eager (default) or fused")
    add("--autocast", action="store_true", help="sums between layers are f32, as under torch.autocast")
    add("--attention", default=None, metavar="NAME", help="unfused or fused (default: unfused for gpt)")


def main(args: argparse.Namespace) -> int:
    """Plan, and print the choice.

    Exit code: 0; 1: no plan fits, or a file cannot be read; 2: wrong usage.
    """
    from unisono.planner.planner import NoPlanFitsError

    try:
        print(_planned(args))
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"unisono plan: {error.filename or error}: {error.strerror}", file=sys.stderr)
        return 1
    except NoPlanFitsError as error:
        if args.json and error.choice is not None:
            print(json.dumps(error.choice.record(), indent=1))
        print(f"unisono plan: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"unisono plan: {error}", file=sys.stderr)
        return 2
    return 0


def _planned(args: argparse.Namespace) -> str:
    from unisono.commands.plan.picture import svg
    from unisono.networks.quantities import nbytes
    from unisono.planner import plan
    from unisono.planner.planner import all_plans

    if args.overlap not in (None, *YES):
        raise ValueError(f"--overlap {args.overlap}: expected yes or no")
    if args.output and Path(args.output).suffix not in (".svg", ".html"):
        raise ValueError(f"-o {args.output}: expected a name that ends in .svg or .html")
    if args.output and args.plan:
        raise ValueError(f"-o {args.output} draws all plans, and --plan prices one: give one or the other")
    runtime = _runtime() if args.runtime else None
    choice = plan(
        _shape(args),
        batch=args.batch,
        gpus=args.gpus,
        hardware=args.hardware,
        hosts=args.hosts,
        network=args.network or None,
        memory=nbytes(args.memory) if args.memory else None,
        plan=args.plan or None,
        fix=args.fix or None,
        compute=None if args.compute is None else args.compute.split(","),
        reduce=args.reduce,
        overlap=None if args.overlap is None else YES[args.overlap],
        codecs=args.codecs.split(",") if args.codecs else (),
        imbalance=args.imbalance,
        dispatch=args.dispatch,
        routed_hosts=args.routed_hosts,
        expert_overlap=args.expert_overlap,
        loss=args.loss,
        autocast=args.autocast,
        runtime=runtime,
    )
    if args.output:
        plans = all_plans(choice.job, args.fix, runtime, choice.plan)
        page = Path(args.output).suffix == ".html"
        text = choice.html(plans) if page else svg(choice, plans)
        Path(args.output).write_text(text, encoding="utf-8")
    return json.dumps(choice.record(), indent=1) if args.json else str(choice)


def _runtime() -> Runtime:
    from unisono.parallel import Plan

    return Plan


def _shape(args: argparse.Namespace) -> TransformerShape:
    """The shape of the config file, or of the numbers."""
    from unisono.planner.model_config import read_shape
    from unisono.planner.shape import shape_of

    changes: dict[str, Any] = {} if args.attention is None else {"attention": args.attention}
    numbers = {name: getattr(args, name) for name in (*NUMBERS, "kv_heads", "ffn", *EXPERTS)}
    given = {name: value for name, value in numbers.items() if value is not None}
    if args.model:
        if given or args.family is not None:
            name = next(iter(given), "family")
            raise ValueError(f"--{name.replace('_', '-')} and --model: give one or the other")
        return read_shape(args.model, args.sequence, **changes)
    for name in (*NUMBERS, "sequence"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is missing: give the numbers of the model, or --model")
    family = "gpt" if args.family is None else args.family
    if family == "gpt":
        changes["positions"] = args.sequence
    dense = {name: value for name, value in given.items() if name not in EXPERTS}
    return shape_of(family, sequence=args.sequence, experts=_experts(args), **dense, **changes)


def _experts(args: argparse.Namespace) -> ExpertShape | None:
    """The experts of the numbers, if there are some."""
    from unisono.planner.shape import ExpertShape

    given = {name: getattr(args, name) for name in EXPERTS if getattr(args, name) is not None}
    if args.experts is None:
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} needs --experts")
        return None
    if args.top_k is None:
        raise ValueError("--experts needs --top-k")
    return ExpertShape(
        count=args.experts,
        top_k=args.top_k,
        ffn=(args.ffn or 4 * args.hidden) if args.expert_ffn is None else args.expert_ffn,
        shared_ffn=args.shared_ffn or 0,
        dense_layers=args.dense_layers or 0,
    )
