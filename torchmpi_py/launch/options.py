"""The command line of torchmpirun. Its help contains the next three paragraphs: usage, purpose and examples.

torchmpirun [-n N] [options] program.py args...
       torchmpirun [-n N] [options] -m module args...
       torchmpirun --check [--hosts a,b] | --version | --template {slurm,kubernetes,pbs}

Start N ranks of a Python program through MPI.

Three examples:
  torchmpirun -n 4 train.py --epochs 3
      4 ranks on this machine; --epochs belongs to the program
  torchmpirun --hosts node1:8,node2:8 --log-dir logs train.py
      8 ranks on each of two hosts, with a log file for each rank
  torchmpirun -n 4 --max-restarts 3 --timeout 3600 train.py
      restart after a failure, at most 3 times, and stop after one hour
"""

import argparse
import functools
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torchmpi_py.launch import mpirun, ready_scripts, site_settings

_OF_TORCHRUN = {
    "standalone node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id rdzv-conf": "omit it: the ranks "
    "connect over MPI, and one torchmpirun starts the program on all hosts",
    "nnodes": "omit it on one host, or list several hosts and their ranks with --hosts a:4,b:4 or --hostfile FILE",
    "monitor-interval start-method role event-log-handler local-addr logs-specs duplicate-stdout-filters "
    "duplicate-stderr-filters": "torchmpirun has no such option; omit it",
    "no-python": "omit it: the program must be a Python file, or a module after -m",
    "run-path": "omit it: torchmpirun runs every program by its path",
    "r redirects": "write --log-dir DIRECTORY",
    "t tee": "write --log-dir DIRECTORY, or omit it: the output of all ranks is shown",
    "local-ranks-filter": "write --log-dir DIRECTORY, which shows only rank 0's output",
    "numa-binding": "omit it, or write --bind core (the default), numa or socket",
    "signals-to-handle": "write --grace SECONDS, the time that ranks have to end after a signal",
    "shutdown-timeout": "write --grace SECONDS",
    "virtual-local-rank": "omit it: every rank sees all GPUs, and uses the GPU with the index LOCAL_RANK",
}
"""Maps options of torchrun to their replacements in torchmpirun. ``--nproc-per-node`` works as ``-n`` on one host."""
_OF_MPIRUN = {
    "-x -env -genv": "write --env NAME=VALUE",
    "-N -ppn --npernode --pernode": "list the hosts and their ranks: --hosts a:4,b:4",
    "--oversubscribe --allow-run-as-root": "omit it: torchmpirun sets it if necessary",
    "--bind-to -bind-to": "write --bind core (the default), numa, socket or none",
    "--wdir -wdir": "change to the folder before you start torchmpirun",
    "--prefix": "omit it, and install the same environment at the same path on all hosts",
    "-c": "write -n",
    "--mca --map-by --rank-by --report-bindings --display --output --tag-output -prepend-rank": "to pass "
    "it to mpirun, write --mpi-args '{option} ...'",
}
"""Maps options of mpirun or mpiexec to their replacements in torchmpirun."""


def _number(read: Callable[[str], float], is_possible: Callable[[float], bool], why_not: str) -> Callable[[str], float]:
    """Return a ``type`` for argparse that reads a number and rejects it unless ``is_possible(number)``.

    ``why_not`` is the error message after the number.
    """

    def number(text: str) -> float:
        value = read(text)
        if not is_possible(value):
            raise argparse.ArgumentTypeError(f"{text} {why_not}")
        return value

    return number


_RANKS = _number(int, lambda number: number >= 1, "ranks cannot run a job; use 1 or more")
_RESTARTS = _number(int, lambda number: number >= 0, "restarts are not possible; use 0 or more")
_LIMIT = _number(float, lambda seconds: seconds > 0, "seconds are not a valid limit; use more than 0")
_GRACE = _number(float, lambda seconds: seconds >= 0, "seconds are not a valid time; use 0 or more")


def _bounds(text: str) -> tuple[int, int]:
    """Return MIN and MAX from the text ``MIN:MAX``."""
    match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected MIN:MAX with 1 <= MIN <= MAX; write, for example, 2:8")
    return int(match[1]), int(match[2])


def _ranks_per_host(text: str) -> float:
    """Return the number of ranks from the value of torchrun's ``--nproc-per-node``."""
    if text in ("auto", "cpu", "gpu", "xpu"):
        raise argparse.ArgumentTypeError(f"{text} is not a number; omit the option for one rank per GPU, else per core")
    return _RANKS(text)


class _Parser(argparse.ArgumentParser):
    """A parser that never treats an argument of the program as an abbreviated option of torchmpirun.

    ``allow_abbrev=False`` works only for options that begin with ``--``.
    """

    source: Path | None = None  # the file from which the words were read; None for the command line

    def error(self, message: str) -> NoReturn:
        super().error(message if self.source is None else f"{self.source}: {message}")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        matches: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in matches if each[1] == option_string[:2]]  # Keep only matches such as -n for -n4.


class _Refused(argparse.Action):
    """Action for an option of another launcher: an error. ``const`` contains the launcher's name and a remedy."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, __: object, option: str | None = None) -> None:
        whose, remedy = self.const
        parser.error(f"{option} is an option of {whose}; {remedy.format(option=option)}")


def _add_those_of_other_starters(parser: argparse.ArgumentParser) -> None:
    add = functools.partial(parser.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--nproc-per-node", "--nproc_per_node", dest="ranks_per_host", type=_ranks_per_host, default=None)
    add("--np", dest="num_ranks", type=_RANKS)
    add("--host", "-H", "-host", "-hosts", dest="hosts")
    add("--machinefile", "-machinefile", "-hostfile", "-f", dest="hostfile", type=Path)
    add("--log_dir", dest="log_dir", type=Path)
    add("--max_restarts", dest="max_restarts", type=_RESTARTS)
    for names, remedy in _OF_TORCHRUN.items():
        for name in names.split():
            both = [f"--{name}", f"--{name.replace('-', '_')}"] if len(name) > 1 else [f"-{name}"]
            add(*both, action=_Refused, nargs="?", const=("torchrun", remedy))
    for names, remedy in _OF_MPIRUN.items():
        add(*names.split(), action=_Refused, nargs="?", const=("mpirun", remedy))


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options from the files of settings and the command line, with the program and its arguments.

    ``settings`` in the result maps each option whose value comes from a file to this file.
    """
    parser, settings = _parser(), dict[str, Path]()
    defaults = parser.parse_args([])
    for parser.source in site_settings.files(os.environ):
        for name, words in site_settings.read(parser.source).items():
            parser.set_defaults(**{name: getattr(parser.parse_args(words) if words else defaults, name)})
            settings[name] = parser.source
    parser.source = None
    options = parser.parse_args(argv)
    if options.program[:1] == ["--"]:
        del options.program[0]
    if not (options.program or options.check or options.version or options.template):
        parser.error("there is no program to run; add a Python file, or -m and a module")
    options.settings = {n: file for n, file in settings.items() if getattr(options, n) == parser.get_default(n)}
    return options


def _parser() -> _Parser:
    _, usage, purpose, examples = (__doc__ or "\n\n" * 3).split("\n\n")
    parser = _Parser("torchmpirun", usage, purpose, examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument_group("ranks and hosts").add_argument
    add("-n", "-np", dest="num_ranks", type=_RANKS, metavar="N", help="ranks (default: slots, tasks, GPUs or cores)")
    add("--hosts", metavar="a:2,b:2", help="hosts and their ranks (default: from the batch system)")
    add("--hostfile", type=Path, metavar="F", help="file with a host per line: `host`, `host:4` or `host slots=4`")
    add("--bind", choices=("core", "numa", "socket", "none"), default="core", help="bind each rank to its own cores "
        "(default), to all cores of its NUMA node or of its socket, or not at all")  # fmt: skip
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="set in every rank; NAME alone: value as here")
    add("--groups", type=_RANKS, metavar="G", help="run G jobs of N/G ranks, which share the experiments of a sweep")
    add("-m", "--module", dest="as_module", action="store_true", help="the program is a module")
    add = parser.add_argument_group("limits, restarts and elastic training").add_argument
    add("--timeout", type=_LIMIT, metavar="S", help="end the job after S seconds, with exit code 124")
    add("--grace", type=_GRACE, default=30.0, metavar="S", help="seconds for ranks to end after a signal (default: 30)")
    add("--max-restarts", type=_RESTARTS, metavar="N", help="restart the job when it fails, at most N times")
    add("--elastic", action="store_true", help="let the surviving ranks continue when a rank dies (Open MPI's ULFM)")
    add("--elastic-restart", type=_bounds, default=(), metavar="MIN:MAX", help="restart with MIN to MAX ranks")
    add("--discover", default="", metavar="SCRIPT", help="script that prints the hosts; a change restarts the job")
    add = parser.add_argument_group("output").add_argument
    add("--log-dir", type=Path, metavar="D", help="write each rank's output to D/rank-R.log; show only rank 0's")
    add("--profile", type=Path, metavar="D", help="write traces to D/rank-R.json, from mpi.start() to mpi.stop()")
    add("--timeline", type=Path, metavar="FILE", help="write an HTML timeline of each rank's last operations to FILE")
    add = parser.add_argument_group("diagnose and measure").add_argument
    add("--check", action="store_true", help="check that every host can run the job, without running it")
    add("--dry-run", action="store_true", help="print the variables and the command of the job, without running it")
    add("--version", action="store_true", help="print the versions of the package, Python, torch, mpi4py and MPI")
    add("--template", choices=sorted(ready_scripts.PARTS), help="print a script for a batch system")
    add("--layouts", action="store_true", help="measure the program with several numbers of ranks")
    add("--layout-seconds", type=_LIMIT, default=10.0, metavar="S", help="seconds per measurement (default: 10)")
    add = parser.add_argument_group("MPI and network").add_argument
    add("--mpi", choices=mpirun.NAMES, default="", help="MPI to use (default: the first one found)")
    add("--interface", default="", metavar="NAME", help="network interface that connects the hosts, such as ib0")
    add("--launch-agent", default="", metavar="PATH", help="program to use in place of ssh")
    add("--srun-mpi", default="pmix", metavar="TYPE", help="value of srun's --mpi= for --mpi srun (default: pmix)")
    add("--mpi-args", type=shlex.split, default=[], metavar="'...'", help="options for mpirun or srun")
    _add_those_of_other_starters(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program and its arguments")
    return parser
