"""The command line of the bench: ``torchmpirun -n N -m torchmpi_py.bench COMMAND ...``.

``COMMANDS`` lists the commands. The exit code is 0 for success, 1 for a wrong value, and 2 for a command line that is
not valid on this machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torchmpi_py.bench import command_line, compare, step, timeline


class Command(NamedTuple):
    """A command: its help text, its options, and ``main(comm, options)``, or ``main(options)`` if it needs no job."""

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    main: Callable[..., None]
    needs_job: bool = True


COMMANDS = {
    "run": Command("measure one collective with one flavour at several sizes", compare.add_run_options, compare.main),
    "compare": Command(
        "measure all flavours, raw mpi4py, gloo and a plain copy in one run", compare.add_compare_options, compare.main
    ),
    "step": Command("measure a training step with several methods of averaging gradients", step.add_options, step.main),
    "timeline": Command(
        "write a page with the last operations of each rank of a job that hung; needs no torchmpirun",
        timeline.add_options,
        timeline.main,
        needs_job=False,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Carry out one command, and return the exit code, which is the same on every rank."""
    words = sys.argv[1:] if argv is None else argv
    return command_line.exit_code(lambda: _carry_out(words))


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options, with the name of the command as ``command``. Raise UsageError if an option is not valid."""
    parser = command_line.Parser(
        prog="torchmpi_py.bench",
        description="Measure collectives and training steps. Start with torchmpirun -n N -m torchmpi_py.bench ...",
    )
    commands: Any = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help))
    return parser.parse_args(words)


def _carry_out(words: list[str]) -> None:
    options = parse(words)
    command = COMMANDS[options.command]
    if command.needs_job:
        command_line.in_job(command.main, options)
    else:
        command.main(options)


if __name__ == "__main__":
    sys.exit(main())
