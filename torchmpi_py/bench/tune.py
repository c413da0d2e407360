"""The command ``tune``: ``mpi.autotune`` from the command line, then the table that ``mpi.selector`` has."""

from __future__ import annotations

import argparse
from pathlib import Path

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError, command_line
from torchmpi_py.bench.buffers import parse_size
from torchmpi_py.core.mpi_api import MPI


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``tune``."""
    add = parser.add_argument
    size = command_line.with_message(parse_size)
    add("--verbs", type=command_line.names, metavar="a,b", help="default: all that have a choice")
    add("--flavours", type=command_line.names, metavar="a,b", help="default: all but gloo")
    command_line.add_device(parser)
    add("--max-bytes", type=size, default="64M", metavar="SIZE", help="largest size; default: 64M")
    add("--seconds", type=command_line.positive, default=40.0, help="about how long it takes; default: 40")
    add("--json", type=Path, metavar="FILE", help="another file than the one that start() looks for")


def main(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure, keep the table, and print it on rank 0. UsageError, on every rank, for what cannot be measured here."""
    given = {"verbs": options.verbs, "flavours": options.flavours}
    chosen = {name: names for name, names in given.items() if names is not None}
    try:
        mpi.autotune(
            **chosen, device=options.device, max_bytes=options.max_bytes, seconds=options.seconds, path=options.json
        )
    except (ValueError, mpi.TorchMPIError) as error:
        raise UsageError(str(error)) from error
    if comm.rank == 0:
        print(mpi.selector, flush=True)
