"""A rank never comes to ``mpi.start()`` or ``init_process_group``: the others say who is missing, and end the job."""

import contextlib
import os
import re
import subprocess
import sys

import harness
import pytest

from torchmpi_py.runtime import arrival

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING),
]

# argv[1] is the rank that stays away, argv[2] what the others call. Ranks 0 and 2 begin INIT together, once both are
# imported: its ten seconds count from the call. The job ends by the first report, however late the MPI does that.
PROGRAM = """
import datetime as dt, os, pathlib, sys, time
from torchmpi_py.launch import variables
rank = variables.rank_in(os.environ)
if rank == int(sys.argv[1]):
    import torchmpi_py
    time.sleep(300)
ten = dt.timedelta(seconds=10)
import torchmpi_py as mpi
from torchmpi_py.runtime import arrival
arrival._OTHERS_END_SECONDS = 60.0
import torch.distributed as dist
import torchmpi_py.torch_backend
def meet():
    here = pathlib.Path(__file__).parent
    (here / f"came-{rank}").touch()
    while len(list(here.glob("came-*"))) < 2:
        time.sleep(0.01)
exec(sys.argv[2])
"""
# Rank 1 comes when it is missed; all are there then.
LATE = """
import os, sys, time
from torchmpi_py.launch import variables
if variables.rank_in(os.environ) == 1:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.05)
import torchmpi_py as mpi
from torchmpi_py.watch import watchdog
print_to_stderr = watchdog.print_to_stderr
def seen(text):
    print_to_stderr(text)
    open(sys.argv[1], "w").close()
watchdog.print_to_stderr = seen
mpi.start()
assert mpi.allreduce(1) == mpi.size() == 3
mpi.stop()
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
INIT = "meet(); dist.init_process_group('torchmpi', timeout=ten)"
WHO = r"torchmpi_py: ranks 0, 2 of 3 wait in {}, for {} s now\. Missing: rank 1{}\. Every rank has to call"


def run(tmp_path, text, *arguments, starter="torchmpirun", **environment):
    path = tmp_path / "program.py"
    path.write_text(text)
    line = harness.command(3, path, *arguments, starter=starter)
    return harness.run(f"{starter} {arguments}", line, environment, within_seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starter", "call", "where", "process"),
    [
        ("torchmpirun", "mpi.start()", r"mpi\.start\(\)", r" \(process \d+\)"),
        ("mpirun", INIT, "init_process_group", ""),
    ],
)
def test_a_rank_that_never_starts_is_named(tmp_path, judge, starter, call, where, process):
    seconds = "2" if call == "mpi.start()" else "600"  # for the other the timeout counts
    outcome = run(tmp_path, PROGRAM, "1", call, starter=starter, TORCHMPI_DEADLINE=seconds)
    outcome.expect(outcome.code != 0, "the job succeeded")
    reports = re.findall(WHO.format(where, 20 if call == "mpi.start()" else 10, process), outcome.errors)
    outcome.expect(len(reports) == 1, f"the missing rank was named {len(reports)} times")
    judge("missing at the start", [outcome])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("all", r"mpi\.start\(\) is not complete after 3 s"),
        ("rank 1", r"an operation is not complete after 3 s\n.* waits in barrier"),
        ("stop", r"an operation is not complete after 3 s"),
    ],
)
def test_a_rank_that_hangs_in_start_or_stop_is_shown(tmp_path, judge, where, what):
    outcome = run(tmp_path, HANGS, where, TORCHMPI_DEADLINE="3")
    outcome.expect(outcome.code != 0, "the job succeeded")
    reports = re.sub(r"torchmpirun: .*", "", outcome.errors)  # whose last line has the report in a few words
    found = re.findall(what, reports)
    outcome.expect(len(found) == 1, f"{len(found)} reports")
    outcome.expect("time.sleep(300)" in outcome.errors, "the report does not show where rank 1 is")
    judge(f"hangs in {where}", [outcome])


@pytest.mark.skipif(not harness.ALL, reason="for scripts/test_faults")
def test_with_report_the_wait_goes_on(tmp_path, judge):
    settings = {"TORCHMPI_DEADLINE": "2", "TORCHMPI_AT_DEADLINE": "report"}
    outcome = run(tmp_path, LATE, str(tmp_path / "missed"), **settings)
    outcome.expect(outcome.code == 0, "the job failed")
    outcome.expect("Missing: rank 1" in outcome.errors, "the missing rank was not named")
    judge("missing at the start", [outcome])


@pytest.mark.slow
def test_started_by_the_master_of_futures_alone(tmp_path, judge):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    line = harness.command(3, "-m", "mpi4py.futures", str(path), "-1", "mpi.start()")
    outcome = harness.run("futures", line, {"TORCHMPI_DEADLINE": "2"}, within_seconds=60)
    outcome.expect(outcome.code == 1, "the job did not end with code 1")
    report = re.search(r"rank 0 of 3 waits in mpi\.start\(\).*Missing: rank 1.*, rank 2", outcome.errors)
    outcome.expect(report is not None, "the missing ranks were not named")
    judge("missing at the start", [outcome])


def test_a_rank_that_never_calls_init_process_group_after_start(tmp_path, judge):
    text = PROGRAM.replace("if rank ==", "import torchmpi_py as mpi; mpi.start()\nif rank ==")
    outcome = run(tmp_path, text, "1", INIT, TORCHMPI_DEADLINE="600")
    outcome.expect(outcome.code == 1, "the job did not end with code 1")
    report = re.search(r"timeout of 10 s has passed, .*init_process_group\. rank 1 \(process \d+\)", outcome.errors)
    outcome.expect(report is not None, "the missing rank was not named")
    judge("missing at init_process_group", [outcome])


@pytest.mark.skipif(not harness.ALL or harness.VENDOR != "mpich", reason="Open MPI's starter ends such a job")
def test_a_rank_that_has_ended_without_it(tmp_path, judge):
    outcome = run(tmp_path, PROGRAM.replace("time.sleep(300)", "sys.exit()"), "1", "mpi.start()", TORCHMPI_DEADLINE="2")
    outcome.expect(outcome.code == 1, "the job did not end with code 1")
    outcome.expect("Missing: rank 1 (has ended)." in outcome.errors, "the missing rank was not named")
    judge("missing at the start", [outcome])


def started(monkeypatch, rank, size, local_size):
    for name, value in {"RANK": rank, "SIZE": size, "LOCAL_SIZE": local_size}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("PMIX_NAMESPACE", f"job of {monkeypatch!r}")
    return arrival.Wait("mpi.start()", 5.0, "abort")


def test_a_world_of_one_is_not_watched(monkeypatch):
    for size in (1, 2):
        with started(monkeypatch, 0, size, size).watched():
            assert arrival._is_bound(arrival._address("0")) == (size > 1)
    assert not arrival._is_bound(arrival._address("0"))


def test_of_other_hosts_nothing_is_claimed(monkeypatch):
    with started(monkeypatch, 2, 4, 2).watched():
        report = started(monkeypatch, 2, 4, 2).report()
        assert report.startswith("rank 2 of 4 waits in mpi.start(), for 5 s now. 1 of 2 ranks are missing on host ")
        assert "of other hosts nothing is known here" in report
        with started(monkeypatch, 3, 4, 2).watched():
            report = started(monkeypatch, 2, 4, 2).report()
            assert report.startswith("ranks 2, 3 of 4 wait in mpi.start(), for 5 s now. None is missing on host ")


def test_an_address_of_another_user_does_not_count(monkeypatch):
    with started(monkeypatch, 0, 2, 2).watched():
        address = arrival._address("0")
        assert arrival._is_bound(address)
        monkeypatch.setattr(os, "getuid", lambda: -1)
        assert not arrival._is_bound(address)


def test_another_program_that_has_the_address_does_not_silence_the_rank(monkeypatch):
    actions = []
    monkeypatch.setattr(arrival.watchdog, "print_to_stderr", actions.append)
    monkeypatch.setattr(arrival, "_OTHERS_END_SECONDS", 0.01)
    monkeypatch.setattr(arrival.Wait, "_end_job", lambda self, report: actions.append("ended"))
    wait = started(monkeypatch, 0, 2, 2)
    wait._seconds = 0.01
    with contextlib.ExitStack() as held:
        assert arrival._bind(arrival._address(arrival._REPORTED), held)
        wait._watch(held)
    assert actions[0].startswith("torchmpi_py: rank 0 of 2 waits in mpi.start()")
    assert actions[1:] == ["ended"]


def test_ranks_that_are_all_here_have_time_to_connect(monkeypatch):
    actions = []
    monkeypatch.setattr(arrival.watchdog, "print_to_stderr", actions.append)
    monkeypatch.setattr(arrival, "_CONNECT_SECONDS", 1.5)
    monkeypatch.setattr(arrival.Wait, "_end_job", lambda self, report: actions.append("ended"))
    with started(monkeypatch, 0, 2, 2).watched(), started(monkeypatch, 1, 2, 2).watched():
        wait = started(monkeypatch, 0, 2, 2)
        wait._seconds = 0.01
        with contextlib.ExitStack() as held:
            wait._watch(held)
    assert "for 1.5 s now. No rank is missing" in actions[0]
    assert actions[1:] == ["ended"]


def test_mpi4pys_setting_of_errors_holds():
    text = "import torchmpi_py as mpi; mpi.start(); from mpi4py import MPI\n"
    text += "assert all(c.Get_errhandler() == MPI.ERRORS_ABORT for c in (MPI.COMM_SELF, MPI.COMM_WORLD))"
    line = [sys.executable, "-c", text]
    done = subprocess.run(line, env=os.environ | {"MPI4PY_RC_ERRORS": "abort"}, timeout=200, check=False)
    assert done.returncode == 0
