"""The command: ``torchmpirun -n N -m torchmpi_py.bench run | compare | step | ps | modes | tune | watch | plot | ...``.

Exit codes: 0; 1 for a wrong value; 2 for a command line that cannot be carried out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

import torchmpi_py as mpi
from torchmpi_py.bench import (
    UsageError,
    WrongValue,
    command_line,
    compare,
    gpu,
    hang,
    modes,
    parameter_server,
    results,
    step,
    trace,
    watching,
)
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.launch import variables

_NO_MATPLOTLIB = "drawing needs matplotlib: pip install 'torchmpi-py[bench]'"


def main(argv: list[str] | None = None) -> int:
    """Carry out one subcommand; return the exit code, the same on every rank."""
    try:
        options = command_line.parse(argv)
        if options.command == "plot":
            _plot(results.load(options.json), options)
        elif options.command == "trace":
            trace.main(options)
        elif options.command == "hang":
            hang.main(options)
        else:
            _measure(options)
    except (UsageError, WrongValue) as error:
        _tell(error)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _measure(options: argparse.Namespace) -> None:
    gpu.start(getattr(options, "device", "cpu"))

    comm = MPI.COMM_WORLD.Dup()
    _check_outputs(comm, options)
    if options.command == "step":
        step.main(comm, options)
    elif options.command == "ps":
        parameter_server.main(comm, options)
    elif options.command == "modes":
        modes.main(comm, options)
    elif options.command == "watch":
        watching.main(comm, options)
    elif options.command == "tune":
        _tune(options)
    else:
        _conclude(compare.report(comm, options), options)
    mpi.stop()


def _tune(options: argparse.Namespace) -> None:
    """Measure, keep, and show what is chosen from now on."""
    given = {"verbs": options.verbs, "flavours": options.flavours}
    chosen = {name: names for name, names in given.items() if names is not None}
    try:
        mpi.autotune(
            **chosen, device=options.device, max_bytes=options.max_bytes, seconds=options.seconds, path=options.json
        )
    except (ValueError, mpi.TorchMPIError) as error:
        raise UsageError(str(error)) from error
    if mpi.rank() == 0:
        print(mpi.selector, flush=True)


def _conclude(report: results.Report, options: argparse.Namespace) -> None:
    """Print, store and draw, on rank 0."""
    if mpi.rank() != 0:
        return
    print(results.render(report), flush=True)
    if options.json is not None:
        results.store(report, options.json)
    if options.plot is not None:
        _plot(report, options)


def _check_outputs(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Before hours of measuring: can rank 0 write what is asked for? UsageError on every rank if not."""
    problem = ""
    for path in filter(None, (options.json, getattr(options, "plot", None))):
        if not os.access(path.parent, os.W_OK):
            problem = f"cannot write {path}: {path.parent} is no folder that may be written to"
    if getattr(options, "plot", None) is not None and importlib.util.find_spec("matplotlib") is None:
        problem = _NO_MATPLOTLIB
    problem = comm.bcast(problem)
    if problem:
        raise UsageError(problem)


def _plot(report: results.Report, options: argparse.Namespace) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(_NO_MATPLOTLIB)
    from torchmpi_py.bench import results

    results.draw(report, options.plot)


def _tell(error: Exception) -> None:
    """Say it once. In a job the ranks meet first, for the first one to end takes the others with it."""
    is_in_job = mpi.is_started() or variables.rank_in(os.environ) is not None
    if is_in_job and not mpi.is_started():
        mpi.start()
    if not is_in_job or mpi.rank() == 0:
        print(error, file=sys.stderr, flush=True)
    if is_in_job:
        mpi.stop()


if __name__ == "__main__":
    sys.exit(main())
