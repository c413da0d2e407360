"""The options that several commands share, and the handling of mistakes.

Every rank raises the same UsageError for a mistake, so all ranks end with the same exit code, and one rank prints the
message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import torchmpi_py as mpi
from torchmpi_py.bench import UsageError, WrongValue, machine, results, wire
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.launch import variables

DEVICES = ("cpu", "cuda")
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError for a mistake, and prints the help on rank 0 only."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if not variables.rank_in(os.environ):
            super().print_help(file)


def exit_code(command: Callable[[], object]) -> int:
    """Run ``command``, and return the exit code: 0 for success, 1 for a WrongValue, 2 for a UsageError.

    One rank prints the message of the error.
    """
    try:
        command()
    except (UsageError, WrongValue) as error:
        _print_once(error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def in_job(measure: Callable[[MPI.Comm, argparse.Namespace], object], options: argparse.Namespace) -> None:
    """Call ``measure(comm, options)`` between ``mpi.start()`` and ``mpi.stop()``; ``comm`` contains all ranks."""
    machine.start(getattr(options, "device", "cpu"))
    comm = MPI.COMM_WORLD.Dup()
    results.check_output(comm, options.json)
    measure(comm, options)
    mpi.stop()


def _print_once(error: Exception) -> None:
    """Print an error on rank 0.

    In a job each rank calls ``mpi.start()`` before and ``mpi.stop()`` after the output, because a rank that exits
    without these calls ends the job.
    """
    is_in_job = mpi.is_started() or variables.rank_in(os.environ) is not None
    if is_in_job and not mpi.is_started():
        mpi.start()
    if not is_in_job or mpi.rank() == 0:
        print(error, file=sys.stderr, flush=True)
    if is_in_job:
        mpi.stop()


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    text = "device of the tensors; default: cpu. With cuda, ranks may share GPUs if there are fewer GPUs than ranks"
    parser.add_argument("--device", choices=DEVICES, default="cpu", help=text)


def add_link(parser: argparse.ArgumentParser) -> None:
    """Add ``--link``."""
    text = "rate of a node's link in each direction; adds the shortest possible time on this link to the report"
    parser.add_argument("--link", type=with_message(wire.parse_link), metavar="1gbit", help=text)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` and ``--progress``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
    parser.add_argument("--progress", action="store_true", help="show a progress bar even if stderr is not a terminal")


def with_message(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap ``parse`` as the type of an option, so that argparse shows the message of its ValueError."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def names(text: str) -> list[str]:
    """Return the comma-separated words of ``text``."""
    return text.split(",")


@with_message
def positive(text: str) -> float:
    """Return ``text`` as a finite number above 0. Raise ArgumentTypeError for other texts."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"expected a finite number above 0, found {text!r}")
    return value


@with_message
def count(text: str) -> int:
    """Return ``text`` as a whole number above 0. Raise ArgumentTypeError for other texts."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a whole number above 0, found {text!r}")
    return int(text)
