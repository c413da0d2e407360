"""What follows the last ``mpi.stop()`` of the ranks: a hang ends the job, and work of the program does not."""

import os
import re
import time

import pytest
import stand_in
from support import jobs

AT_WORK = "; the job continues"

# In the launcher. Its starter has ranks run the program argv[3] on one of argv[4:] each, and then does argv[2].
OPTIONS = """
last_wait.LATER_SECONDS = 1.0
options = {{"num_ranks": len(sys.argv) - 6, "timeout": 50, **{options!r}}}
options["num_ranks"] += options.pop("elsewhere", 0)
"""
STARTER = """
import os, subprocess, sys, time
folder, then, program, *texts = sys.argv[1:]
words = [[program, folder, str(rank), text] for rank, text in enumerate(texts)]
ranks = [subprocess.Popen([sys.executable, "-c", *each]) for each in words]
for rank in ranks:
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
exec(then)
sys.exit(max(rank.wait() for rank in ranks))
"""
RANK = """
import atexit, ctypes, os, signal, sys, time
from torchmpi_py.launch import exit_marks
folder, rank, text = sys.argv[1:]
os.environ["PMIX_RANK"] = rank
def stage(call, seconds=0.5, ends=True):
    exit_marks.record_stage(exit_marks.Stage(call, seconds, ends))
def wait_for_rank_1():
    while not os.path.exists(f"{folder}/through-1") or os.path.exists(f"{folder}/running-1"):
        time.sleep(0.01)
class Computes:
    def __del__(self, clock=time.monotonic, write=os.write):
        until = clock() + 4
        while clock() < until:
            pass
        write(1, b"computed\\n")
def after_python(function, argument=None):
    libc.__cxa_atexit(getattr(libc, function), ctypes.c_void_p(argument), None)
libc = ctypes.CDLL(None)
exit_marks.has_met = lambda: True
with exit_marks.running(folder, int(rank)):
    exec(text)
"""
IN_FINALIZE = "stage('MPI_Finalize'); time.sleep(60)"
IN_STOP = "stage('mpi.stop()'); time.sleep(60)"
WAITS_FOR_1 = "stage('MPI_Finalize'); wait_for_rank_1(); stage('')"
WORKS = "stage(''); atexit.register(time.sleep, 8)"
ENDS = "stage('')"
FAILS = "exit_marks.record_failure(folder, 1, 4); os._exit(4)"
STAYS = "time.sleep(60)"
ONE_IN_STOP = r"rank 1 \(process \d+\) is in mpi.stop\(\), rank 0 \(process \d+\) is in MPI_Finalize, rank 2"
STARTER_IS_ENDED = ["all ranks ended .* ago, but mpirun is still running"]


def row(texts, code=0, said=(), then="", **options):
    """What ranks do; exit code; what is said, in this order; what the starter does after them."""
    return texts, then, options, code, said


STOOD_IN = {
    "full pipe": row([ENDS], then="sys.stdout.write('x' * 1000000)"),
    "all in MPI_Finalize": row([IN_FINALIZE] * 2, 1, [r"rank 1 \(process \d+\) is in MPI_Finalize", "TORCHMPI_"]),
    "one in stop": row([IN_FINALIZE, IN_STOP, IN_FINALIZE], 1, [ONE_IN_STOP]),
    "stopped": row([ENDS, "stage(''); os.kill(os.getpid(), signal.SIGSTOP)"], 1, ["rank 1 .* stopped by a signal"]),
    "shutdown": row([ENDS, f"{ENDS}; after_python('pause')"], 1, ["rank 1 .* in the shutdown of Python"]),
    "time limit": row([IN_FINALIZE], 124, ["--timeout"], timeout=0.2),
    "at work at exit": row([WAITS_FOR_1, WORKS], 0, [f"rank 1 .* in the program.*{AT_WORK}"]),
    "all at work": row([WORKS, WORKS]),
    "slow shutdown": row([f"{ENDS}; sys.last = Computes()", ENDS]),
    "reports only": row(["stage('MPI_Finalize', ends=False); time.sleep(8)"] * 2, 0, [AT_WORK]),
    "no deadline": row(["stage('MPI_Finalize', 0.0); time.sleep(3)"] * 2),
    "a child's stage": row(["if not os.fork(): stage('MPI_Finalize'); os._exit(0)\ntime.sleep(3)"]),
    "another program": row(["stage('mpi.stop()'); stage(''); os.execvp('sleep', ['sleep', '3'])"]),
    "ranks elsewhere": row(["stage('MPI_Finalize'); time.sleep(8)"], 0, [AT_WORK], elsewhere=1),
    "starter": row([ENDS] * 2, 0, STARTER_IS_ENDED, STAYS),
    "starter after a code": row([ENDS, f"{ENDS}; after_python('_exit', 3)"], 3, STARTER_IS_ENDED, STAYS),
    "starter after a failure": row([ENDS, FAILS], 4, ["rank 1 failed first, with exit code 4"], STAYS),
    "starter of an elastic job": row([ENDS] * 2, 0, STARTER_IS_ENDED, STAYS, elastic=True),
}
# Real ranks: rank 1 sleeps behind the last look of its watchdog.
PROGRAM = """
import os, time, torchmpi_py as mpi
from torchmpi_py.watch.watchdog import Watchdog
if os.environ["RANK"] == "1":
    Watchdog.stop = lambda watchdog: time.sleep(200)
mpi.start()
mpi.stop()
"""
SLEEPS = "rank 0 .* is in MPI_Finalize, rank 1 .* is in mpi.stop"
OUTPUT = {"full pipe": "x" * 1000000, "slow shutdown": "computed\n"}


@pytest.mark.slow
@pytest.mark.timeout(240)
@jobs.needs_mpi
def test_the_last_wait_of_a_job(program, no_leftovers):
    """Every row at once, for each one only waits."""
    expected, started = {}, {}
    for name, (texts, then, options, code, said) in STOOD_IN.items():
        before = OPTIONS.format(options=options)
        expected[name], started[name] = (code, said), stand_in.start(STARTER, then, RANK, *texts, before=before)
    environment = os.environ | {"TORCHMPI_DEADLINE": "2"}
    command = [*jobs.TORCHMPIRUN, "-n", 2, "--timeout", 60, program(PROGRAM)]
    expected["real"], started["real"] = (1, [SLEEPS]), jobs.start(*command, env=environment)
    time.sleep(6)  # for the full pipe, which is read first
    wrong = {}
    for name, job in started.items():
        output, errors = job.communicate(timeout=200)
        code, said = expected[name]
        is_right = job.returncode == code and bool(re.search(".*".join(said), errors, re.DOTALL))
        is_whole = name == "real" or output == OUTPUT.get(name, "")
        if not (is_right and is_whole and (said or not errors)):
            wrong[name] = (job.returncode, output[-200:], errors)
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
