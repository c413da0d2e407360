"""Run the user's program in a rank. Bind cores and threads before torch loads, and end the whole job after a failure.

    mpirun -n 4 python .../launch/wrap.py [--bind core|numa|socket|none] [--log-dir D] [--profile D] [--ended FILE]
        [--quoted] [-m] program args...

If a rank fails while the other ranks wait for it in a collective, the other ranks would hang. So after an uncaught
exception, or sys.exit with a code other than 0, the rank prints its traceback once and then ends the job with
MPI_Abort. After a normal end nothing more is needed: the package's ``stop()`` and MPI_Finalize run at interpreter exit.

Ctrl-C and SIGTERM request the end of the job. A rank that then ends by KeyboardInterrupt or sys.exit waits until
torchmpirun kills it, because other ranks may still be saving. If all ranks have agreed to end (EndRequested), each rank
ends normally.

torchmpirun sets TORCHMPIRUN_JOB_DIR to the job's folder. A failing rank records the time of the failure, the exit code,
and the paths of its shared memory in this folder. From these records torchmpirun determines the exit code of the
*first* failure, which becomes the job's exit code, and the shared memory to remove after MPI_Abort.

*Quoted* arguments: Open MPI, MPICH and srun read a bare ``:`` as the start of another program. Open MPI also rewrites
options such as ``--bind-to`` among the program's arguments. So the first character of such a word is written in
hexadecimal (``:`` becomes ``%3A``), and every ``%`` in the arguments becomes ``%25``.
"""

import argparse
import builtins
import contextlib
import functools
import importlib.machinery
import io
import os
import pkgutil
import re
import runpy
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

if __name__ == "__main__":
    # Python has put the folder of this file first in sys.path, because the file is run by its path. Replace the folder,
    # because its modules, such as `hosts` and `signals`, could hide other modules with these names.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from torchmpi_py import trusted_files
from torchmpi_py.errors import EndRequested
from torchmpi_py.launch import binding, exit_marks, handed_input, notices, topology, transports, variables

_ARRIVAL_SECONDS = 30  # Limit for the start of MPI in a rank that failed before MPI_Init.
_SILENT = "99"  # Log level at which torch's profiler does not report its start and stop on stderr.


def needs_quotes(words: list[str], interpreted: str) -> bool:
    """Return whether mpirun would interpret one of the words; ``interpreted`` is a regular expression."""
    return any(re.fullmatch(interpreted, word) for word in words)


def quote(words: list[str], interpreted: str) -> list[str]:
    """Return the words in a form that mpirun passes on unchanged."""
    plain = [word.replace("%", "%25") for word in words]
    return [f"%{ord(word[0]):02X}{word[1:]}" if re.fullmatch(interpreted, word) else word for word in plain]


def unquote(words: list[str]) -> list[str]:
    """Return the words that ``quote`` was called with."""
    return [re.sub("%([0-9A-F]{2})", lambda code: chr(int(code[1], 16)), word) for word in words]


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of this file, with the program and its arguments.

    The program is the first word that is not an option.
    """
    parser = argparse.ArgumentParser(prog="wrap.py", allow_abbrev=False)
    parser.add_argument("--bind", choices=("core", "numa", "socket", "none"), default="core")
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--ended", type=Path, metavar="FILE", help="file that rank 0 writes when ranks agree to end")
    parser.add_argument("--quoted", action="store_true", help="torchmpirun has quoted the program and its arguments")
    parser.add_argument("-m", dest="as_module", action="store_true", help="the program is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.program:
        parser.error("there is no program to run; add a Python file, or -m and a module")
    if options.quoted:
        options.program = unquote(options.program)
    return options


def local_rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this rank's local rank and the number of ranks on its host; (0, 1) if they are unknown or invalid."""
    rank, size = variables.local_rank_in(environment) or 0, variables.local_size_in(environment) or 1
    return (rank, size) if rank < size else (0, 1)


def bind(how: str) -> None:
    """Bind this rank to its cores, and set the number of threads to match unless the environment sets it.

    ``how`` is the value of ``--bind``.
    """
    local_rank, local_size = local_rank_and_size(os.environ)
    cores = topology.cores()
    num_cores = topology.num_usable_cores(len(cores))
    os.environ[variables.CORES] = str(num_cores)
    threads = binding.threads_per_rank(num_cores, local_size)
    if how != "none":
        part, most = binding.bound_cores(how, cores, local_rank, local_size)
        os.sched_setaffinity(0, [cpu for core in part for cpu in core.cpus])
        threads = min(threads, most)
    for name in binding.THREAD_VARIABLES:
        os.environ.setdefault(name, os.environ.get("OMP_NUM_THREADS", str(threads)))


def log_to(folder: Path, rank: int) -> None:
    """Redirect the output of this rank, its libraries and its child processes to the file ``rank-R.log``.

    This function replaces descriptors 1 and 2, because child processes inherit them. A restarted job appends to the
    logs of the earlier attempt. Raise SystemExit if the log cannot be opened.
    """
    is_first = os.environ.get("TORCHMPIRUN_RESTART", "0") == "0"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if is_first else 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = trusted_files.open_file(folder / f"rank-{rank}.log", flags)
    except OSError as error:
        host = os.uname().nodename
        sys.exit(f"[rank {rank}] --log-dir {folder}: cannot write rank-{rank}.log on host {host}: {error.strerror}")
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def run_program(program: list[str], *, as_module: bool) -> None:
    """Run the program as ``python program`` would: as __main__, with its own sys.argv and sys.path.

    The program's __main__ module remains in sys.modules after the program has returned, because threads, atexit
    functions and finalizers of the program use the module.
    """
    sys.argv, path = program, os.path.abspath(program[0])
    # Create a new __main__ module, because the functions of this file still need the variables of the old one.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if as_module:
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(program[0])  # type: ignore[attr-defined]  # what Python itself calls for -m
    elif pkgutil.get_importer(path) is not None:  # The program is a folder or a zip file.
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        main.__file__, main.__loader__ = path, importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            if (code := pkgutil.read_code(file)) is None:  # The file contains source code, not bytecode.
                file.seek(0)
                code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def exit_code(error: BaseException) -> int:
    """Return the exit code that plain Python would use, except for Ctrl-C: 130, the code that a shell uses."""
    if isinstance(error, SystemExit):
        code = error.code
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def explain(error: BaseException, rank: int, folder: str, outlets: Sequence[int]) -> None:
    """Print the error as plain Python would, with the rank, and without the frames of this file and runpy.

    If another rank of this host has printed the same error, print one line that refers to it. ``folder`` is the job's
    folder. ``outlets`` are duplicates of descriptor 2 from before the program ran: [stderr], or [log, stderr] if this
    rank has a log. A log always gets the complete error. If the log cannot be written, the error goes to stderr.
    """
    if isinstance(error, SystemExit):
        write_whole("" if isinstance(error.code, int) or error.code is None else f"{error.code}\n", rank, outlets)
    # Do not print a KeyboardInterrupt. Every rank would print it, and the user has pressed Ctrl-C.
    elif not isinstance(error, KeyboardInterrupt):
        error = error.with_traceback(_without_ours(error.__traceback__))
        if _shown_by_the_programs_hook(error):
            return
        text = notices.traceback_text(error)
        with notices.said_once(folder if len(outlets) == 1 else "", text, rank) as other:
            if other is not None:
                text = f"{type(error).__name__}: the same error as on rank {other}\n"
            write_whole(f"[rank {rank}] {text}", rank, outlets)


def write_whole(text: str, rank: int, outlets: Sequence[int]) -> None:
    """Write the text to stderr in one piece, so that the texts of several ranks do not mix.

    ``outlets`` is as in ``explain``. If this rank's log cannot be written, write to the original stderr. The program
    may have closed or replaced sys.stderr or descriptor 2. If the program has replaced sys.stderr, also write the text
    to the new object, with descriptor 2 redirected to /dev/null so that the text does not appear twice. Afterwards
    descriptor 2 is open again, because the MPI writes messages to it.
    """
    outlet, *former = outlets
    message = text.encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        if not os.path.sameopenfile(2, outlet):  # The program has redirected descriptor 2, so write to it too.
            os.write(2, message)
    with contextlib.suppress(BaseException), open(os.devnull, "wb") as nowhere:
        sys.stderr.flush()  # Write the text that the program has buffered.
        os.dup2(nowhere.fileno(), 2)
        sys.stderr.write(text)
        sys.stderr.flush()
    os.dup2(outlet, 2)
    try:
        with open(outlet, "wb", closefd=False) as file:
            file.write(message)
    except OSError as obstacle:
        if not former:
            raise
        text = f"[rank {rank}] cannot write to this rank's log: {obstacle.strerror}\n{text}"
        os.write(former[0], text.encode(errors="backslashreplace"))


def _shown_by_the_programs_hook(error: BaseException) -> bool:
    """Call the excepthook of the program or of a library, if there is one; return whether the hook succeeded."""
    # The hooks of this package and of torch.distributed may wrap a hook of the program.
    hook: Any = sys.excepthook
    while (former := _wrapped_by(hook)) is not None:
        hook = former
    if hook is sys.__excepthook__:
        return False
    with contextlib.suppress(BaseException):
        hook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        return True
    return False


def _wrapped_by(hook: Any) -> Any:
    """Return the excepthook that ``hook`` wraps; None if ``hook`` is the program's own or Python's."""
    if getattr(hook, "aborts", False):  # Skip this package's hook, which would end the job: `fail` does that later.
        return getattr(hook, "former", sys.__excepthook__)
    # Skip the hook of torch.distributed, which only writes "[rank0]:" before each line.
    if getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        return cells["old_hook"].cell_contents if "old_hook" in cells else sys.__excepthook__
    return None


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return frames


def ignore_signals() -> None:
    """Ignore every signal that the program handles, so that no error in a handler replaces the report of a failure.

    For example, torch's handler of SIGCHLD raises when a worker of a DataLoader dies, even while the error of the
    worker's pipe is being reported.
    """
    for signum in sorted(signal.valid_signals()) * 2:
        with contextlib.suppress(BaseException):  # A handler may raise if its signal arrives before it is ignored.
            if callable(signal.getsignal(signum)):
                signal.signal(signum, signal.SIG_IGN)


def fail(error: BaseException, code: int, folder: str, rank: int, outlets: Sequence[int]) -> None:
    """Record and print the failure, write the trace, and end the job, even with a closed stderr or a full disk.

    If the user has requested the end of the job, record the failure last, because torchmpirun kills the ranks once
    all of them have ended or recorded a failure.
    """
    _try(os.close, 0)  # Free a descriptor, because the following steps need one.
    if not _is_asked_to_end(error, folder):
        _try(exit_marks.record_failure, folder, rank, code)
    _try(lambda: sys.stdout.flush())
    _try(explain, error, rank, folder, outlets)
    # Save the trace of this rank. The abort kills the other ranks before they can save a trace.
    if "torchmpi_py.watch.tracing" in sys.modules:
        _try(sys.modules["torchmpi_py.watch.tracing"].save)
    if _is_asked_to_end(error, folder):
        _try(exit_marks.wait_for_output)
        _try(exit_marks.record_failure, folder, rank, code)
        while os.path.isdir(folder):  # Wait until torchmpirun kills this rank.
            time.sleep(0.1)
    if "torchmpi_py.watch.abort" in sys.modules:
        _try(sys.modules["torchmpi_py.watch.abort"].announce)
    end_job(code, folder, rank)


def _try(step: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(BaseException):
        step(*arguments)


def _is_asked_to_end(error: BaseException, folder: str) -> bool:
    return isinstance(error, (KeyboardInterrupt, SystemExit)) and exit_marks.is_left(folder, "ending")


def end_job(code: int, folder: str, rank: int) -> NoReturn:
    """Call MPI_Abort if MPI is running, or can be started where nothing else would end the job; otherwise exit."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    # torchmpirun detects the failure by its mark. On another host or on a full disk there is no mark, so start MPI to
    # abort the job.
    if mpi is None and not exit_marks.is_left(folder, f"failed-{rank}") and (variables.size_in(os.environ) or 1) > 1:
        mpi = _start_mpi()
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        exit_marks.abort(mpi, code)
    sys.exit(code)


def _start_mpi() -> Any:
    """Start MPI so that the job can be aborted, and return mpi4py.MPI; None if MPI cannot be loaded or started.

    If MPI takes longer than `_ARRIVAL_SECONDS` to start, an alarm signal ends this process. Without MPI, the exit of
    this rank may go unnoticed. MPICH's mpirun never detects that a rank exits before MPI_Init. Open MPI's mpirun does,
    but sometimes hangs or crashes when it kills a rank that is connecting.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_ARRIVAL_SECONDS)
    try:
        return importlib.import_module("mpi4py.MPI")
    except Exception:
        return None


def record_interrupts(folder: str, rank: int) -> None:
    """Write ``heard-R`` when Ctrl-C raises KeyboardInterrupt, and ``own-R`` when the program sets its own handler.

    Without these marks torchmpirun could not detect whether Ctrl-C has reached the program, because Python runs no
    handler while the rank waits in the MPI library.
    """
    interrupt, set_handler, process_id = signal.default_int_handler, signal.signal, os.getpid()
    if signal.getsignal(signal.SIGINT) is not interrupt:  # SIGINT is ignored or has another handler.
        return

    def leave_mark(signum: int, frame: FrameType | None) -> NoReturn:
        if os.getpid() == process_id:  # A forked child is not the rank.
            exit_marks.leave(folder, f"heard-{rank}")
        interrupt(signum, frame)

    @functools.wraps(set_handler)
    def look_at_handler(signalnum: int, handler: Any) -> Any:
        if signalnum == signal.SIGINT and handler is not leave_mark and os.getpid() == process_id:
            exit_marks.leave(folder, f"own-{rank}")
        return set_handler(signalnum, handler)

    set_handler(signal.SIGINT, leave_mark)
    signal.default_int_handler = leave_mark  # asyncio compares the handler of SIGINT with this function.
    signal.signal = look_at_handler


def run_and_end(options: argparse.Namespace, folder: str, rank: int) -> None:
    """Run the program, and end the job if it fails."""
    process_id, outlets, failure = os.getpid(), list[int](), None
    with contextlib.suppress(OSError):  # Descriptor 2 may be closed.
        outlets.append(os.dup(2))
    try:
        record_interrupts(folder, rank)
        if options.log_dir is not None:
            log_to(options.log_dir, rank)
            outlets.insert(0, os.dup(2))
        run_program(options.program, as_module=options.as_module)
        if options.log_dir is not None and sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()  # Let a full disk raise an error here. At exit, Python would only return code 120.
    except EndRequested as error:
        if options.ended is not None and rank == 0 and os.getpid() == process_id:
            options.ended.write_text(f"{exit_code(error)}\n")
        if os.getpid() != process_id or not exit_marks.leave(folder, f"ended-{rank}", str(exit_code(error))):
            raise
    except BaseException as error:
        code = exit_code(error)
        if code == 0 or os.getpid() != process_id:  # A forked child is not the rank.
            raise
        failure = error
    if failure is None:
        return
    ignore_signals()
    fail(failure, code, folder, rank, outlets)


def main() -> None:
    """Prepare the rank and run the program."""
    options = parse(sys.argv[1:])
    folder, rank = os.environ.get("TORCHMPIRUN_JOB_DIR", ""), variables.rank_in(os.environ) or 0
    bind(options.bind)
    transports.leave_tcp_out()
    if rank == 0:
        handed_input.take(folder)
    if options.profile is not None:  # mpi.start() starts a trace if TORCHMPI_PROFILE is set.
        os.environ["TORCHMPI_PROFILE"] = str(options.profile.absolute())
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    # Write each line to mpirun's pipe in one piece as soon as the line is complete, even with python -u.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # A stream is None if its descriptor was closed.
            stream.reconfigure(line_buffering=True, write_through=False)
    with exit_marks.running(folder, rank):
        run_and_end(options, folder, rank)


if __name__ == "__main__":
    main()
