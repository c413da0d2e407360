"""The time that recording and comparing operations adds to a call (``core/journal.py``).

    python benchmarks/watching.py

Blocks of a small allreduce run alternately with the journal and without it, that is with functions that do nothing in
place of ``journal.record`` and ``journal.end``. The result is the median and the quartiles of the blocks' means.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from unittest import mock

import torch

import torchmpi_py as mpi
from torchmpi_py.bench import command_line, machine, results
from torchmpi_py.core import journal
from torchmpi_py.core.mpi_api import MPI

_FORMAT = "benchmarks/watching 2"
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


def main() -> int:
    """Carry out the command line; return its exit code, the same on every rank."""
    parser = command_line.Parser(prog="watching.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--blocks", type=command_line.count, default=500, help="of 200 calls, of each kind; default: 500"
    )
    command_line.add_output(parser)
    return command_line.exit_code(lambda: command_line.in_job(measure, parser.parse_args()))


def measure(comm: MPI.Comm, options: argparse.Namespace) -> None:
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
    def nothing(*_: object) -> None:  # a Mock would record each call, which takes longer than the journal
        """Stand in for the journal's functions."""

    with mock.patch.object(journal, "record", nothing), mock.patch.object(journal, "end", nothing):
        yield


if __name__ == "__main__":
    sys.exit(main())
