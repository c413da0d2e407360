"""A rank never comes to ``mpi.start()`` or ``init_process_group``: the others say who is missing, and end the job."""

import contextlib
import os
import re

import harness
import pytest
from support.jobs import needs_mpi, python, write

from torchmpi_py.runtime import arrival

pytestmark = [pytest.mark.timeout(240), needs_mpi]

# argv[1] is the rank that stays away, argv[2] what the others call, all at once. The job ends by the first report.
PROGRAM = """
import datetime as dt, os, pathlib, sys, time
from torchmpi_py.launch import variables
rank = variables.rank_in(os.environ)
if rank == int(sys.argv[1]):
    import torchmpi_py
    time.sleep(300)
import torchmpi_py as mpi
from torchmpi_py.runtime import arrival
arrival._OTHERS_END_SECONDS, arrival.LEAST_SECONDS = 60.0, 5.0
import torch.distributed as dist
import torchmpi_py.torch_backend
here = pathlib.Path(__file__).parent
(here / f"came-{rank}").touch()
while len(list(here.glob("came-*"))) < (2 if int(sys.argv[1]) >= 0 else 1):
    time.sleep(0.01)
exec(sys.argv[2])
"""
# All ranks hang in a function that ``start`` calls, or rank 1 does there, or while it frees what all have built.
HANGS = """
import sys, time
import torchmpi_py as mpi
from torchmpi_py.core import communicators
from torchmpi_py.runtime import arrival, building
arrival.LEAST_SECONDS = building._LEAST_SECONDS = 3.0
def hang(*_, **__):
    if mpi.rank() == 1 or sys.argv[1] == "all":
        time.sleep(300)
    if sys.argv[1] == "rank 1":
        mpi.barrier()
    return 0
mpi.start(custom_communicator_init=None if sys.argv[1] == "stop" else hang)
communicators.Stack.free = hang
mpi.stop()
"""
INIT = "dist.init_process_group('torchmpi', timeout=dt.timedelta(seconds=5))"
STARTED = "import torchmpi_py as mpi; mpi.start()\nif rank =="
ONE_MISSING = r"ranks 0, 2 of 3 still wait in mpi\.start\(\) after 5 s\. Missing: rank 1 \(process \d+\)\. Every rank"
TIMED_OUT = r"(?s)timeout of 5 s has passed, .*init_process_group\. rank 1 \(process \d+\)"
slow = pytest.mark.slow


def run(judge, tmp_path, program, *arguments, codes, starter="torchmpirun", options=(), **environment):
    """Run a job of 3 ranks whose exit code is among ``codes``; return what it printed."""
    line = harness.command(3, *options, str(write(tmp_path, program)), *arguments, starter=starter)
    outcome = harness.run(f"missing: {starter} {arguments}", line, environment, within_seconds=60)
    outcome.expect(outcome.code in codes, f"the exit code is {outcome.code}")
    judge("missing at the start", [outcome])
    return outcome.errors


NOT_0 = range(1, 256)


@pytest.mark.parametrize(
    ("call", "program", "starter", "told"),
    [
        ("mpi.start()", PROGRAM, "torchmpirun", ONE_MISSING),
        pytest.param(
            INIT, PROGRAM, "mpirun", r"still wait in init_process_group after 5 s\. Missing: rank 1\.", marks=slow
        ),
        pytest.param(INIT, PROGRAM.replace("if rank ==", STARTED), "torchmpirun", TIMED_OUT, marks=slow),
    ],
    ids=["start", "group", "group after start"],
)
def test_a_rank_that_never_starts_is_named(judge, tmp_path, call, program, starter, told):
    seconds = "5" if call == "mpi.start()" else "600"  # for the others the timeout counts
    errors = run(judge, tmp_path, program, "1", call, codes=NOT_0, starter=starter, TORCHMPI_DEADLINE=seconds)
    assert len(re.findall(told, errors)) == 1, errors


@slow
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("all", r"mpi\.start\(\) is not complete after 3(?:\.\d)? s"),
        ("rank 1", r"an operation is not complete after 3(?:\.\d)? s\n.* waits in barrier"),
        ("stop", r"an operation is not complete after 3(?:\.\d)? s"),
    ],
)
def test_a_rank_that_hangs_in_start_or_stop_is_shown(judge, tmp_path, where, what):
    errors = run(judge, tmp_path, HANGS, where, codes=NOT_0, TORCHMPI_DEADLINE="3")
    reports = re.sub(r"torchmpirun: .*", "", errors)  # whose last line has the report in a few words
    assert len(re.findall(what, reports)) == 1, errors
    assert "time.sleep(300)" in errors, "the report does not show where rank 1 is"


@slow
def test_with_report_the_wait_goes_on(judge, tmp_path):
    program = PROGRAM.replace("sleep(300)", "sleep(20)")
    call = "mpi.start(); assert mpi.allreduce(1) == 3; mpi.stop()"
    settings = {"TORCHMPI_DEADLINE": "2", "TORCHMPI_AT_DEADLINE": "report"}
    assert "Missing: rank 1" in run(judge, tmp_path, program, "1", call, codes=[0], **settings)


@slow
def test_started_by_the_master_of_futures_alone(judge, tmp_path):
    job = {"codes": [1], "options": ("-m", "mpi4py.futures"), "TORCHMPI_DEADLINE": "2"}
    errors = run(judge, tmp_path, PROGRAM, "-1", "mpi.start()", **job)
    assert re.search(r"rank 0 of 3 still waits in mpi\.start\(\).*Missing: rank 1.*, rank 2", errors), errors


@slow
@pytest.mark.skipif(harness.VENDOR != "mpich", reason="Open MPI's starter ends such a job")
def test_a_rank_that_has_ended_without_it(judge, tmp_path):
    program = PROGRAM.replace("time.sleep(300)", "sys.exit()")
    assert "Missing: rank 1 (has ended)." in run(judge, tmp_path, program, "1", "mpi.start()", codes=[1])


def started(monkeypatch, rank, size, local_size):
    for name, value in {"RANK": rank, "SIZE": size, "LOCAL_SIZE": local_size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("PMIX_NAMESPACE", f"job of {monkeypatch!r}")
    return arrival.Wait("mpi.start()", 5.0, "abort")


def test_of_other_hosts_nothing_is_claimed_and_other_users_do_not_count(monkeypatch):
    with started(monkeypatch, 2, 4, 2).watched():
        report = started(monkeypatch, 2, 4, 2).report()
        assert "1 of 2 ranks are missing on host" in report
        assert "the ranks on other hosts are not known here" in report
        with started(monkeypatch, 3, 4, 2).watched():
            assert "No rank is missing on host" in started(monkeypatch, 2, 4, 2).report()
            assert all(arrival._is_bound(arrival._address("3")) for _ in range(10_000))  # also with a full queue
    with started(monkeypatch, 0, 2, 2).watched():
        address = arrival._address("0")
        assert arrival._is_bound(address)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert not arrival._is_bound(address)


@pytest.mark.parametrize("is_silenced", [True, False])
def test_another_program_does_not_silence_the_rank_and_all_have_time_to_connect(monkeypatch, is_silenced):
    actions = []
    monkeypatch.setattr(arrival.watchdog, "print_to_stderr", actions.append)
    monkeypatch.setattr(arrival, "_OTHERS_END_SECONDS", 0.01)
    monkeypatch.setattr(arrival, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(arrival.Wait, "_end_job", lambda self, report: actions.append("ended"))
    with contextlib.ExitStack() as held:
        if is_silenced:
            assert arrival._bind(arrival._address(arrival._REPORTED), held)
        else:
            held.enter_context(started(monkeypatch, 0, 2, 2).watched())
            held.enter_context(started(monkeypatch, 1, 2, 2).watched())
        wait = started(monkeypatch, 0, 2, 2)
        wait._seconds = 0.01
        wait._watch(held)
    told = "rank 0 of 2 still waits in mpi.start()" if is_silenced else "after 0.5 s. No rank is missing"
    assert told in actions[0]
    assert actions[1:] == ["ended"]


def test_mpi4pys_setting_of_errors_holds():
    text = "import torchmpi_py as mpi; mpi.start(); from mpi4py import MPI\n"
    text += "assert all(c.Get_errhandler() == MPI.ERRORS_ABORT for c in (MPI.COMM_SELF, MPI.COMM_WORLD))"
    assert python(text, env={"MPI4PY_RC_ERRORS": "abort"}).returncode == 0
