"""The exit code of a job and its last line are those of the first rank that ended: one table, as in ends.md."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import jobs

# The last rank ends as argv[1] says, at the place that argv[2] says, while the others wait for it.
PROGRAM = """
import os, signal, sys, time
how, where = sys.argv[1:]
is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
def end():
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    ways = {"exception": "raise RuntimeError('boom')", "MemoryError": "raise MemoryError", "late": "time.sleep(100)"}
    exec(ways.get(how, how))
if where == "before":
    time.sleep(0.3)
    end() if is_last else time.sleep(100)
import torch
if where == "start":
    import torchmpi_py as mpi
    mpi.start()
    mpi.allreduce(torch.ones(3))
    end() if is_last else mpi.allreduce(torch.ones(3))
elif where == "exit":  # after MPI_Finalize
    import ctypes, torchmpi_py as mpi
    mpi.start()
    mpi.stop()
    libc = ctypes.CDLL(None)
    if is_last:
        libc.__cxa_atexit(ctypes.cast(getattr(libc, "raise"), ctypes.c_void_p), getattr(signal, how), None)
    sys.exit()
else:
    from torch import distributed
    import torchmpi_py.torch_backend
    distributed.init_process_group("torchmpi")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    for step in range(3):
        loss = model(torch.ones(1, 3)).sum()
        end() if is_last and step == 1 else loss.backward()
time.sleep(100)
"""

DIES = {"SIGKILL": 137, "SIGSEGV": 139, "SIGABRT": 134, "os._exit(5)": 5, "os._exit(0)": 1}
FAILS = {"exception": 1, "MemoryError": 1, "sys.exit(3)": 3}
CODES = DIES | FAILS | {"late": 1}
CASES = [
    *((how, "start", 2 + number % 2) for number, how in enumerate(CODES)),
    # Without MPI the others have no need of a rank that leaves with code 0, and finish; nobody is late.
    *((how, "before", 3 - number % 2) for number, how in enumerate(CODES) if how not in ("os._exit(0)", "late")),
    *((how, "exit", 2) for how in ("SIGKILL", "SIGSEGV")),
    *((how, "DDP", 2) for how in ("SIGKILL", "SIGSEGV", "os._exit(5)", "exception", "sys.exit(3)")),
]


def last_line(how, rank):
    """A regular expression of the last line of a job, in which this rank ends."""
    if how == "late":
        return rf"rank {rank} \(process \d+\) did not call allreduce .*; rank 0 reported it"
    if how in FAILS:
        return f"rank {rank} failed first, with exit code {FAILS[how]}"
    ends = {"os._exit(5)": "ended .* with exit code 5", "os._exit(0)": "ended .* with exit code 0"}
    return rf"rank {rank} \(process \d+\) {ends.get(how, f'was killed by signal {DIES[how] - 128}')}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@jobs.needs_mpi
def test_the_first_end_decides(program, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHMPI_DUMP_DIR", str(tmp_path))
    path = program(PROGRAM)

    def trial(case):
        how, where, size = case
        deadline = {"TORCHMPI_DEADLINE": "3"} if how == "late" else {}
        job = jobs.torchmpirun("-n", size, "--bind", "none", path, how, where, env=deadline)
        said = [line for line in job.stderr.splitlines() if line.startswith("torchmpirun: ")]
        wanted = f"torchmpirun: {last_line(how, size - 1)}"
        is_right = job.returncode == CODES[how] and len(said) == 1 and re.fullmatch(wanted, said[0])
        return "" if is_right else f"{case}: code {job.returncode}, {said}\n{job.stderr[-800:]}"

    with ThreadPoolExecutor(2) as pool:
        wrong = list(filter(None, pool.map(trial, CASES)))
    assert not wrong, f"{len(wrong)} of {len(CASES)}\n" + "\n".join(wrong)
