"""The command line. Mistakes are a UsageError, so that all ranks end alike and one of them tells."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import torch

from torchmpi_py.bench import UsageError
from torchmpi_py.bench.buffers import parse_size, parse_sizes
from torchmpi_py.bench.candidates import SELECTOR
from torchmpi_py.bench.cases import VERBS
from torchmpi_py.bench.parameter_server import RULES
from torchmpi_py.core.tensors import OPS
from torchmpi_py.launch import variables

T = TypeVar("T")

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
}
_SIZES = {"cpu": "4:64M:8x", "cuda": "4:1G:8x"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if not variables.rank_in(os.environ):
            super().print_help(file)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; ``command`` is the subcommand. UsageError for what cannot be understood."""
    parser = _Parser(
        prog="torchmpi_py.bench",
        description="Measure collectives and training steps. Run it under torchmpirun -n N -m torchmpi_py.bench ...",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="run | compare | step | ps | modes | tune | watch | plot | trace | hang"
    )
    _add_run(commands)
    _add_compare(commands)
    _add_step(commands)
    _add_ps(commands)
    _add_modes(commands)
    _add_tune(commands)
    _add_watch(commands)
    _add_plot(commands)
    _add_trace(commands)
    _add_hang(commands)
    options = parser.parse_args(argv)
    if getattr(options, "sizes", ...) is None:
        options.sizes = parse_sizes(_SIZES[options.device])
    return options


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="one verb and flavour over sizes")
    parser.add_argument("--flavour", default=SELECTOR, help="default: the one that a call without flavour= takes")
    parser.add_argument("--symmetric", action="store_true", help="on tensors from mpi.symmetric_empty")
    _add_collective(parser)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser("compare", help="all flavours, raw mpi4py, gloo and a plain copy, in one run")
    parser.add_argument(
        "--flavours", type=lambda text: text.split(","), metavar="a,b", help="of ours, only these; default: all"
    )
    _add_collective(parser)


def _add_collective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--verb", choices=list(VERBS), default="allreduce")
    _add_device(parser)
    sizes = "bytes, as 4,64K or 4:64M:8x (default; with --device cuda 4:1G:8x)"
    add("--sizes", type=_told(parse_sizes), help=sizes)
    add("--dtype", type=_dtype, default="float32", help="default: float32")
    add("--async", dest="asynchronous", action="store_true", help="the asynchronous form, then wait(); compare: both")
    add("--op", choices=OPS, default="sum", metavar="OP", help=f"default: sum; of {', '.join(OPS)}")
    add("--buffers", choices=("warm", "cold", "both"), default="both", help="default: both")
    add("--seconds", type=_positive, default=1.0, help="about so long for each size and kind of buffers; default: 1")
    memory = "of buffers a rank; default: what fits, to 1G (cuda: 8G)"
    add("--max-memory", type=_told(parse_size), metavar="BYTES", help=memory)
    patience = "leave out, from there on, who would take longer for a call at the next size; default: nobody"
    add("--patience", type=_positive, default=math.inf, metavar="SECONDS", help=patience)
    add("--no-verify", dest="verify", action="store_false", help="do not check the values of the results")
    add("--plot", type=Path, metavar="FILE.png", help="draw latency and bandwidth against size")
    _add_output(parser)


def _add_step(commands: Any) -> None:
    parser = commands.add_parser("step", help="one training step, with gradients averaged in several ways")
    parser.add_argument(
        "--layers", type=_layers, default="784,4096,4096,10", help="widths, input first; default: 784,4096,4096,10"
    )
    _add_device(parser)
    parser.add_argument("--batch", type=_count, default=32, help="samples a rank; default: 32")
    parser.add_argument("--steps", type=_count, default=25, help="timed steps of each way; default: 25")
    _add_output(parser)


def _add_ps(commands: Any) -> None:
    parser = commands.add_parser("ps", help="sends to a parameter server and receives, beside the same done locally")
    add = parser.add_argument
    add("--sizes", type=_told(parse_sizes), default="4,4K:64M:16x", help="bytes; default: 4,4K:64M:16x")
    rules = f"of {', '.join(RULES)}; default: copy,add. The receive is always there"
    add("--rules", type=_rules, default="copy,add", metavar="a,b", help=rules)
    clients = "how many ranks send and receive at once, the others sleep; default: 1, 2, ... all"
    add("--clients", type=_counts, metavar="1,2", help=clients)
    add("--seconds", type=_positive, default=0.5, help="about so long for each size, rule and clients; default: 0.5")
    idle = "how long to watch a rank that only serves; default: 10"
    add("--idle-seconds", type=_positive, default=10.0, metavar="SECONDS", help=idle)
    _add_output(parser)


def _add_modes(commands: Any) -> None:
    parser = commands.add_parser("modes", help="modes of distribution: accuracy, time and bytes for the same samples")
    add = parser.add_argument
    add("--modes", type=lambda text: text.split(","), metavar="a,b", help="default: all")
    add("--epochs", type=_count, default=25, help="default: 25")
    add("--batch", type=_count, default=60, help="samples a step, over all ranks; default: 60")
    add("--seeds", type=_count, default=3, help="how many trainings of each mode; default: 3")
    add("--first-seed", type=_number, default=0, metavar="SEED", help="default: 0")
    add("--lr-factor", type=_positive, default=1.0, metavar="F", help="on all learning rates; default: 1")
    add("--slow-rank", action="store_true", help="then let the last rank be slower, and see what the others get done")
    add("--slow-factor", type=_positive, default=10.0, metavar="F", help="how much longer it pauses; default: 10")
    add("--step-seconds", type=_positive, default=0.01, metavar="SECONDS", help="the others' pause; default: 0.01")
    add("--slow-seconds", type=_positive, default=5.0, metavar="SECONDS", help="of each such run; default: 5")
    add("--rounds", type=_count, default=5, help="even and slow runs of each mode; default: 5")
    add("--lead-runs", type=_count, default=1, metavar="N", help="runs in which leads are watched; default: 1")
    add("--lead-steps", type=_count, default=1000, metavar="N", help="of such a run; default: 1000")
    _add_output(parser)


def _add_tune(commands: Any) -> None:
    parser = commands.add_parser("tune", help="measure which flavours are the fastest here, for later start()s to use")
    add = parser.add_argument
    add("--verbs", type=lambda text: text.split(","), metavar="a,b", help="default: all that have a choice")
    add("--flavours", type=lambda text: text.split(","), metavar="a,b", help="default: all but gloo")
    _add_device(parser)
    add("--max-bytes", type=_told(parse_size), default="64M", metavar="SIZE", help="largest size; default: 64M")
    add("--seconds", type=_positive, default=40.0, help="about how long it takes; default: 40")
    add("--json", type=Path, metavar="FILE", help="another file than the one that start() looks for")


def _add_plot(commands: Any) -> None:
    parser = commands.add_parser("plot", help="draw a report that was stored with --json; needs no launcher")
    parser.add_argument("json", type=Path, metavar="FILE.json")
    parser.add_argument("plot", type=Path, metavar="FILE.png")


def _add_device(parser: argparse.ArgumentParser) -> None:
    told = "where the tensors are; default: cpu. cuda: on a GPU per rank, or on fewer that ranks share"
    parser.add_argument("--device", choices=tuple(_SIZES), default="cpu", help=told)


def _add_trace(commands: Any) -> None:
    parser = commands.add_parser("trace", help="merge the traces of torchmpirun --profile DIR; needs no launcher")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: DIR/trace.json")


def _add_watch(commands: Any) -> None:
    parser = commands.add_parser("watch", help="what noting and comparing operations adds to a call")
    parser.add_argument("--blocks", type=_count, default=500, help="of 200 calls, of each kind; default: 500")
    _add_output(parser)


def _add_hang(commands: Any) -> None:
    parser = commands.add_parser("hang", help="explain the dumps of a job that hung; needs no launcher")
    parser.add_argument("directory", type=Path, metavar="DIR", help="with rank-0.json and so on, there or further in")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the report")
    parser.add_argument("--progress", action="store_true", help="show a bar, also where standard error is no terminal")


def _told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as argparse wants it: the text of a ValueError reaches the user."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


@_told
def _dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise ValueError(f"{text!r} is unknown; known dtypes: {', '.join(DTYPES)}")
    return DTYPES[text]


@_told
def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text!r} is not a number above 0")
    return value


@_told
def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number above 0")
    return int(text)


@_told
def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a whole number from 0")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


@_told
def _rules(text: str) -> list[str]:
    for name in text.split(","):
        if name not in RULES:
            raise ValueError(f"{name!r} is unknown; known rules: {', '.join(RULES)}")
    return text.split(",")


@_told
def _layers(text: str) -> list[int]:
    parts = text.split(",")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text!r}: give at least two widths, as 784,4096,10")
    return [int(part) for part in parts]
