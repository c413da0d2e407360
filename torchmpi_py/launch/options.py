"""The program's arguments on their way through an MPI's starter, some of which it would take for its own.

Open MPI, MPICH and srun read a bare ``:`` as the beginning of another program. Open MPI rewrites ``--bind-to`` and
others wherever they stand. The first character of such a word becomes ``%3A``, say, and each ``%`` then ``%25``.

The command line of torchmpirun.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import vendors


def is_needed(words: list[str], interpreted: str) -> bool:
    """Whether a starter interprets one of the words; ``interpreted`` is a regular expression of those that it does."""
    return any(re.fullmatch(interpreted, word) for word in words)


def quote(words: list[str], interpreted: str) -> list[str]:
    """The words in a form that the starter leaves alone."""
    plain = [word.replace("%", "%25") for word in words]
    return [f"%{ord(word[0]):02X}{word[1:]}" if re.fullmatch(interpreted, word) else word for word in plain]


def unquote(words: list[str]) -> list[str]:
    """What was quoted."""
    return [re.sub("%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), word) for word in words]


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line. Everything after the program belongs to the program."""
    parser = argparse.ArgumentParser(
        prog="torchmpirun",
        usage="torchmpirun [-n N] [options] program.py args...\n       torchmpirun [-n N] [options] -m module args...",
        description="Start N ranks of a Python program through MPI.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-n",
        "-np",
        dest="num_ranks",
        type=_positive,
        metavar="N",
        help="ranks; default: the slots of the named hosts; else SLURM_NTASKS; else one per GPU; else one per core",
    )
    add("--hostfile", type=Path, metavar="F", help="lines of `host`, `host:4` or `host slots=4`")
    add("--hosts", metavar="a:2,b:2", help="the same on the command line")
    add("--bind", choices=("core", "none"), default="core", help="give each rank its own cores (default), or do not")
    add("--log-dir", type=Path, metavar="D", help="each rank's output in D/rank-R.log; rank 0's is shown as well")
    add("--timeout", type=_seconds, metavar="S", help="end the job after S seconds, with exit code 124")
    add("--grace", type=_grace, default=30.0, metavar="S", help="time for ranks that heed Ctrl-C or SIGTERM (30 s)")
    add("--max-restarts", type=_number, metavar="N", help="start the job again when it fails, at most N times")
    add("--profile", type=Path, metavar="D", help="trace each rank from mpi.start() to stop() into D/rank-R.json")
    add("--mpi", choices=[vendor.name for vendor in vendors.VENDORS], default="", help="default: the one that is found")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable in every rank; repeatable")
    add("--elastic", action="store_true", help="let the survivors go on when a rank dies (Open MPI's ULFM)")
    add("--launch-agent", default="", metavar="PATH", help="a program to use in place of ssh")
    add("--mpi-args", type=shlex.split, default=[], metavar="'...'", help="options for the MPI's own starter")
    add("--dry-run", action="store_true", help="print what would be run, and run nothing")
    add("-m", dest="as_module", action="store_true", help="the program is a module")
    add("program", nargs=argparse.REMAINDER, help="program and its arguments")
    options = parser.parse_args(argv)
    if options.program[:1] == ["--"]:
        del options.program[0]
    if not options.program:
        parser.error("no program to run")
    return options


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} ranks are no job; give 1 or more")
    return number


def _number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} restarts are not possible; give 0 or more")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} seconds are no limit; give more than 0")
    return seconds


def _grace(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text} seconds cannot be waited for; give 0 or more")
    return seconds


def given_environment(pairs: list[str]) -> dict[str, str]:
    """Read --env."""
    given = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise LaunchError(f"--env {pair!r}: write NAME=VALUE")
        given[name] = value
    return given
