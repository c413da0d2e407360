"""The command ``watch``: the time that recording and comparing operations adds to a call (``core/journal.py``).

The same small allreduce, watched and not watched in turn, in many short blocks of calls. Shown are the medians and the
quartiles of the blocks' means. Not watched: ``Operation.run`` is replaced by one without the journal, and the steps
before it, which prepare the journal's entry, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import torchmpi_py as mpi
from torchmpi_py.bench import command_line, machine, results
from torchmpi_py.collectives import prepare
from torchmpi_py.collectives.operation import Operation
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.watch import tracing

_FORMAT = "torchmpi_py.bench watch 1"
_CALLS_PER_BLOCK = 200
_WITH, _WITHOUT = "watched", "not watched"


@dataclasses.dataclass(frozen=True)
class WatchReport:
    """Microseconds of a call: the quartiles of all blocks, watched and not watched, and the difference of medians."""

    size: int
    num_blocks: int
    facts: dict[str, str]
    quartiles: dict[str, list[float]]
    added: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``watch``."""
    parser.add_argument(
        "--blocks", type=command_line.count, default=500, help="of 200 calls, of each kind; default: 500"
    )
    command_line.add_output(parser)


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure, print on rank 0, and store. Collective over ``comm``, which holds all ranks."""
    machine.limit_threads()
    x = torch.zeros(1)
    quartiles = {name: statistics.quantiles(means) for name, means in _measured(comm, x, options.blocks).items()}
    added = quartiles[_WITH][1] - quartiles[_WITHOUT][1]
    report = WatchReport(comm.size, options.blocks, machine.facts(comm), quartiles, added)
    results.publish(comm.rank, render(report), _FORMAT, report, options.json)


def render(report: WatchReport) -> str:
    """The report in Markdown."""
    title = f"an allreduce of 4 bytes, {report.size} ranks: {report.num_blocks} blocks of {_CALLS_PER_BLOCK} calls each"
    header = ["call", "median us", "quarter below", "quarter above"]
    rows = [
        [name, *(f"{value:.2f}" for value in (median, low, high))]
        for name, (low, median, high) in report.quartiles.items()
    ]
    return results.document(title, report.facts, [f"watching adds {report.added:.2f} us a call"], header, rows)


def _measured(comm: MPI.Comm, x: torch.Tensor, num_blocks: int) -> dict[str, list[float]]:
    """The mean time of a call of each block, in microseconds."""
    means: dict[str, list[float]] = {_WITH: [], _WITHOUT: []}
    for turn in range(num_blocks + 1):  # the first turn is not counted
        names = [_WITH, _WITHOUT] if turn % 2 else [_WITHOUT, _WITH]
        for name in names:
            with contextlib.nullcontext() if name == _WITH else _unwatched():
                comm.Barrier()
                begin = time.perf_counter()
                for _ in range(_CALLS_PER_BLOCK):
                    mpi.allreduce(x)
                seconds = time.perf_counter() - begin
            if turn:
                means[name].append(seconds / _CALLS_PER_BLOCK * 1e6)
    return means


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    with mock.patch.object(Operation, "run", _run), mock.patch.dict(prepare._TENSORS_BEFORE_OTHERS, clear=True):
        yield


def _run(operation: Operation[Any]) -> Any:
    """``Operation.run`` without the journal."""
    channel = operation.comm.direct
    trace = tracing.current
    begin = 0 if trace is None else trace.begin(operation)
    try:
        returned = getattr(operation.flavour, operation.method)(channel, *operation.arguments)
        return operation.target if operation.conclude is None else operation.conclude(returned)
    except RuntimeError as error:
        raise operation.explain(error)  # noqa: B904 - as there
    finally:
        if trace is not None:
            trace.end(operation, channel.thread_role, begin)
