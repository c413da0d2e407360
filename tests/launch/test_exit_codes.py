"""The exit code of a job and its last line are those of the first rank that ended: one table, as in ends.md."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import jobs

# Rank argv[3] ends as argv[1] says, at the place that argv[2] says, while the others wait for it.
PROGRAM = """
import os, signal, sys, time
how, where, rank = sys.argv[1:]
is_dying = os.environ["RANK"] == rank
def end():
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    ways = {"exception": "raise RuntimeError('boom')", "MemoryError": "raise MemoryError", "late": "time.sleep(100)"}
    ways |= {"MPI_Abort(7)": "from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)"}
    exec(ways.get(how, how))
if where == "before":
    time.sleep(0.3)
    end() if is_dying else time.sleep(100)
import torch
if where == "start":
    import torchmpi_py as mpi
    mpi.start()
    mpi.allreduce(torch.ones(3))
    end() if is_dying else mpi.allreduce(torch.ones(3))
elif where == "exit":  # after MPI_Finalize
    import ctypes, torchmpi_py as mpi
    mpi.start()
    mpi.stop()
    libc = ctypes.CDLL(None)
    if is_dying:
        libc.__cxa_atexit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), getattr(signal, how), None)
    sys.exit()
else:
    from torch import distributed
    import torchmpi_py.torch_backend
    distributed.init_process_group("torchmpi")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        loss = model(torch.ones(1, 3)).sum()
        end() if is_dying and step == 1 else loss.backward()
time.sleep(100)
"""

DIES = {"SIGKILL": 137, "SIGSEGV": 139, "os.abort()": 134, "os._exit(5)": 5, "os._exit(0)": 1, "MPI_Abort(7)": 7}
FAILS = {"exception": 1, "MemoryError": 1, "sys.exit(3)": 3}
CODES = DIES | FAILS | {"late": 1}
CASES = [  # how it ends, where, the number of ranks, and which of them
    *((how, "start", 2 + number % 2, (1 + number % 2) * (number % 3 > 0)) for number, how in enumerate(CODES)),
    # Without MPI the others have no need of a rank that leaves with code 0, and finish; nobody is late.
    *((how, "before", 3, 2 * (number % 2)) for number, how in enumerate(CODES) if how not in ("os._exit(0)", "late")),
    *((how, "exit", 2, 1) for how in ("SIGKILL", "SIGSEGV")),
    *((how, "DDP", 2, 1) for how in CODES if how != "late"),
]
DAILY = [("SIGKILL", "start", 2, 0), ("os._exit(5)", "start", 3, 0), ("exception", "before", 3, 0)]


def last_line(how, rank):
    """A regular expression of the last line of a job, in which this rank ends."""
    if how == "late":
        return rf"rank {rank} \(process \d+\) did not call allreduce .*; rank \d reported it"
    if how in FAILS:
        return f"rank {rank} failed first, with exit code {FAILS[how]}"
    if how == "MPI_Abort(7)" and jobs.VENDOR in ("mpich", "intel"):
        return "a rank called MPI_Abort, with exit code 7"
    code = re.search(r"\((\d)\)", how)
    end = f"ended .* with exit code {code[1]}" if code else f"was killed by signal {CODES[how] - 128}"
    return rf"rank {rank} \(process \d+\) {end}"


def end(path, how, where, size, rank):
    """Run a job; return what is wrong with its end."""
    deadline = {"TORCHMPI_DEADLINE": "3"} if how == "late" else {}
    job = jobs.torchmpirun("-n", size, "--bind", "none", path, how, where, rank, env=deadline)
    said = [line for line in job.stderr.splitlines() if line.startswith("torchmpirun: ")]
    is_right = len(said) == 1 and re.fullmatch(f"torchmpirun: {last_line(how, rank)}", said[0])
    if how in FAILS:
        shown = [job.stderr.count(text) for text in (f"[rank {rank}] Traceback", "Traceback", "wrap.py", "runpy")]
        is_right = is_right and shown == [how != "sys.exit(3)"] * 2 + [0, 0]
    if job.returncode == CODES[how] and is_right:
        return ""
    return f"{how, where, size, rank}: code {job.returncode}, {said}\n{job.stderr[-800:]}"


@pytest.mark.parametrize(
    "cases", [DAILY, pytest.param(sorted({*CASES} - {*DAILY}), marks=pytest.mark.slow)], ids=["some", "others"]
)
@pytest.mark.timeout(900)
@jobs.needs_mpi
def test_the_first_end_decides(program, monkeypatch, tmp_path, cases):
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", str(tmp_path))
    path = program(PROGRAM)
    with ThreadPoolExecutor(2) as pool:
        wrong = list(filter(None, pool.map(lambda case: end(path, *case), cases)))
    assert not wrong, f"{len(wrong)} of {len(cases)}\n" + "\n".join(wrong)
