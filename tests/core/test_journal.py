"""Jobs whose ranks call different things, or nothing: how they are told, and when."""

import re

import pytest
from support import jobs
from torch.distributed.flight_recorder import fr_trace

from torchmpi_py.bench import timeline_calls

pytestmark = [pytest.mark.timeout(240), jobs.needs_mpi]
HEAD = """import os, signal, time, torch, torchmpi_py as mpi
mpi.start()
me, x = mpi.rank(), torch.ones(1000)
def until(holds):
    while not holds():
        time.sleep(0.01)
def path(name):
    return os.path.join(os.environ["TORCHMPI_DUMP_DIR"], str(name))
def tell(calls):
    for call in calls:
        try:
            print("got:", call(), flush=True)
        except Exception as error:
            print(f"told: {type(error).__name__}: {error}", flush=True)
"""
FIRST_LINE = HEAD.count("\n") + 1


def run(tmp_path, program, ranks=2, deadline=30, at_deadline="abort"):
    """A job of this program; its lines begin after those of HEAD."""
    written = jobs.write(tmp_path, HEAD + program.lstrip("\n"))
    limits = {
        "TORCHMPI_DEADLINE": str(deadline),
        "TORCHMPI_AT_DEADLINE": at_deadline,
        "TORCHMPI_DUMP_DIR": str(tmp_path),
    }
    return jobs.torchmpirun("-n", ranks, "--bind", "none", "--timeout", 150, written, env=limits)


def test_ranks_that_call_different_things(tmp_path):
    """Each pair on a communicator of its own: what ranks 0 and 2 launch, and what rank 1 calls later."""
    program = """
us = {"flavour": "mpi"}
pairs = [
    (lambda c: mpi.allreduce_async(x, comm=c, **us), lambda c: mpi.broadcast_async(x, comm=c, **us)),
    (lambda c: mpi.allreduce_async(x, comm=c, **us), lambda c: mpi.allreduce_async(x[:7], comm=c, **us)),
    (lambda c: mpi.allreduce_async(1, comm=c), lambda c: mpi.allreduce_async(1, op="max", comm=c)),
    (lambda c: mpi.gather_async(x, 0, comm=c), lambda c: mpi.gather_async(x, 1, comm=c)),
    (lambda c: mpi.allreduce_async(x, comm=c, **us), lambda c: mpi.allreduce(x, comm=c, **us)),
]
comms = [mpi.split(0) for _ in pairs]
if me != 1:
    launched = [others(comm) for (others, _), comm in zip(pairs, comms)]
    open(path(me), "w")
    time.sleep(100)
until(lambda: all(map(os.path.exists, (path(0), path(2)))))
tell(lambda: odd(comm) for (_, odd), comm in zip(pairs, comms))
os._exit(3)
"""
    job = run(tmp_path, program, ranks=3)
    told = [line for line in job.stdout.splitlines() if "told: RanksDisagree: " in line]
    expected = [
        ("broadcast mpi torch.float32 0, 4000 b", "allreduce mpi torch.float32 sum"),
        ("float32 sum, 28 bytes", "float32 sum, 4000 bytes"),
        (" max", " sum"),
        ("gather tensors any-size 1", "gather tensors any-size 0"),
        ("4000 bytes at", "4000 bytes asynchronously at"),
    ]
    assert len(told) == len(expected), (told, job.stderr)
    for line, words in zip(told, expected, strict=True):
        assert re.search(r"operation 1 of this communicator is not the same .* this rank calls .*; rank 2 calls", line)
        assert all(word in line for word in words), line
        assert line.count("program.py:") >= 2


def test_an_asynchronous_call_never_matches_a_blocking_one(tmp_path):
    """Also where a blocking call is launched because lateness is to be raised."""
    program = """
posted = ["broadcast", "reduce", "allreduce", "reduce_scatter", "alltoall", "scatter"]
calls = [(verb, x, {"flavour": "mpi"}) for verb in posted]
calls += [(verb, x, {"flavour": "shared"}) for verb in [*posted, "allgather", "gather"]]
calls += [(verb, 1.5, {}) for verb in ["broadcast", "reduce", "allreduce", "allgather", "gather"]]
calls += [(verb, "an object", {}) for verb in ["broadcast_object", "allgather_object"]]
comms = [mpi.split(0) for _ in calls]
if me == 0:
    launched = [getattr(mpi, verb + "_async")(x, comm=c, **more) for (verb, x, more), c in zip(calls, comms)]
    open(path("called"), "w")
    time.sleep(100)
until(lambda: os.path.exists(path("called")))
tell(lambda: getattr(mpi, verb)(x, comm=comm, **more) for (verb, x, more), comm in zip(calls, comms))
os._exit(3)
"""
    job = run(tmp_path, program, deadline=8, at_deadline="raise")
    told = [line for line in job.stdout.splitlines() if "told: RanksDisagree: " in line]
    assert "got:" not in job.stdout, job.stdout
    assert len(told) == 21, (told, job.stderr)
    assert all(re.search(r"this rank calls .* at .*rank 0 calls .* asynchronously at ", line) for line in told), told


def test_what_comes_after_a_call_that_broke_off_is_refused(tmp_path):
    """An object that cannot be sent; launches in which a signal's handler raises: are they posted? Nobody knows.

    Else the next call would meet the other rank's first call, and give its object for the result of the second.
    """
    program = """
from torchmpi_py.core.communication_thread import CommunicationThread as thread
a, b, c = (mpi.split(0) for _ in range(3))
def interrupt(*args):
    raise KeyboardInterrupt
before = mpi.allreduce_async(torch.ones(1 << 20))
first = mpi.allgather_object_async((lambda: 0) if me == 0 else 1, comm=a)
if me == 1:
    before.wait()
    time.sleep(100)
calls = [first.wait, lambda: mpi.allgather_object_async("second", comm=a).wait()]
formers = thread.keep, thread.enqueue
thread.keep = thread.enqueue = interrupt
for flavour, comm in (("mpi", b), ("ring", c)):
    try:
        mpi.allreduce_async(x, flavour=flavour, comm=comm)
    except KeyboardInterrupt:
        print("interrupted")
    calls.append(lambda: mpi.allreduce_async(x, flavour=flavour, comm=comm))
thread.keep, thread.enqueue = formers
tell(calls)
print("earlier:", before.wait()[-1].item(), flush=True)
os._exit(3)
"""
    job = run(tmp_path, program)
    assert "earlier: 2.0" in job.stdout, job.stdout + job.stderr
    assert "got:" not in job.stdout, job.stdout
    assert job.stdout.count("interrupted") == 2, job.stderr
    assert re.search("told: .*[Pp]ickl", job.stdout), job.stdout
    assert "told: CommunicatorError: allgather_object: an earlier call on " in job.stdout
    assert job.stdout.count("told: CommunicatorError: allreduce: an earlier call on ") == 2, job.stdout


CIRCLES = {  # what rank 0, rank 1 and perhaps rank 2 do: none of them can go on
    "of all kinds": ("mpi.recv(x, 1)", "mpi.allreduce(x, comm=d)", "mpi.allreduce_async(x, comm=c).wait()"),
    "forms": ("mpi.allreduce_async(x, flavour='shared').wait()", "mpi.allreduce(x, flavour='shared')"),
    "communicators": ("mpi.allreduce(x, comm=a); mpi.allreduce(x, comm=b)", "mpi.barrier(b); mpi.allreduce(x, comm=a)"),
    "a message": ("mpi.recv(x, 1)", "mpi.barrier()"),
    "messages": ["mpi.recv(x, (me + 1) % mpi.size())"] * 3,
    "a step more": ("mpi.allreduce_async(x, flavour='shared').wait(); mpi.allreduce(x)", "mpi.allreduce(1)"),
}
DAILY, *SLOW = CIRCLES


@pytest.mark.parametrize("kind", [DAILY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_ranks_that_wait_for_each_other_in_a_circle(tmp_path, kind):
    """Named by their watchdogs, long before the deadline."""
    calls = CIRCLES[kind]
    program = "a, b, c, d = (mpi.split(None if me == out else 0) for out in (9, 9, 1, 0))\n"
    program += "".join(f"if me == {rank}:\n    {call}\n" for rank, call in enumerate(calls))
    job = run(tmp_path, program, ranks=len(calls), deadline=100)
    assert job.returncode == 1, job.stderr
    sides = [rf"rank {rank} waits in .*program.py:{FIRST_LINE + 2 * rank + 2} " for rank in range(len(calls))]
    assert re.search("RanksDisagree: .*" + ".*; ".join(sides), job.stderr), job.stderr


@pytest.mark.slow
def test_waits_that_end_are_no_circle(tmp_path):
    """A late rank, one whose call has a limit, and one with a thread that makes the missing call."""
    program = """
import threading
a, b = mpi.split(0), mpi.split(0)
if me == 0:
    threading.Thread(target=lambda: (time.sleep(4), mpi.allreduce(x, comm=b))).start()
    mpi.allreduce(x, comm=a)
else:
    mpi.allreduce(x, comm=b)
    time.sleep(3)
    mpi.allreduce(x, comm=a)
if me == 0:
    try:
        mpi.recv_async(x, 1).wait(timeout_seconds=4)
    except mpi.CollectiveTimeout as error:
        mpi.barrier()
        error.handle.wait()
else:
    mpi.barrier()
    mpi.send(x, 0)
print("complete")
"""
    job = run(tmp_path, program, deadline=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("complete") == 2
    assert job.stderr.count("the ranks wait for each other") == 1, job.stderr


def test_a_rank_that_does_not_come_and_one_that_is_stopped(tmp_path, caplog):
    """The report names them, where they are, and where the others wait; torch's analyzer reads what each did."""
    program = """
process_ids = mpi.allgather_object(os.getpid())
if me == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
until(lambda: open(f"/proc/{process_ids[2]}/stat").read().rpartition(")")[2].split()[0] == "T")
if me == 1:
    time.sleep(100)
mpi.allreduce_async(x).wait()
"""
    job = run(tmp_path, program, ranks=4, deadline=5)
    line = FIRST_LINE + 6
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("torchmpi_py: report of rank") == 1
    assert re.search(
        rf"rank [03] waits in allreduce .*4000 bytes, called at .*program.py:{line} in <module>", job.stderr
    )
    assert re.search(
        r"rank 1 \(process \d+\): has not called it; its last call, allgather_object.* completed", job.stderr
    )
    assert re.search(rf"rank 3 \(process \d+\): is in it too, called at .*program.py:{line}", job.stderr)
    assert f'program.py", line {line - 1}, in <module>' in job.stderr
    assert "its process is stopped (SIGSTOP)" in job.stderr, job.stderr
    (folder,) = tmp_path.glob("torchmpi_py-hang-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [len(dump["entries"]) for dump in timeline_calls.load(tmp_path).values()] == [2, 1, 1, 2]
    fr_trace.main([str(folder)])
    assert "missing ranks: {1, 2}" in caplog.text


def test_a_report_that_is_asked_for(tmp_path):
    """By a signal, while the main thread is in MPI; and the job goes on."""
    program = """
import sys
from torchmpi_py.core import status_board
class Hearing:
    def write(self, text):
        if "report of" in text:
            open(path("told"), "w")
        return sys.stderr.write(text)
    def flush(self):
        sys.stderr.flush()
process_ids = mpi.allgather_object(os.getpid())
if me == 0:
    sys.__stderr__ = Hearing()
else:
    until(lambda: status_board.current.records(0)[0].text == "barrier")
    os.kill(process_ids[0], signal.SIGUSR1)
    until(lambda: os.path.exists(path("told")))
mpi.barrier()
print("went on")
"""
    job = run(tmp_path, program)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on") == 2
    assert job.stderr.count("torchmpi_py: report of rank 0: requested by SIGUSR1") == 1, job.stderr
    assert re.search(r"rank 0 \(process \d+\): in barrier for", job.stderr)


@pytest.mark.slow
def test_what_was_late_is_waited_for_again(tmp_path):
    """Blocking calls by the handle of the error, gradients by another synchronize(); the next calls meet as ever."""
    program = """
def come_late(name):
    until(lambda: me != 1 or os.path.exists(path(name)))
come_late("told")
for k, count in enumerate((4, 1 << 18), 1):
    x = torch.full((count,), 10.0 * k)
    try:
        mpi.allreduce(x)
    except mpi.CollectiveTimeout as error:
        open(path("told"), "w")
        print("told:", error)
        assert error.handle.wait() is x
    print("sum", x[0].item(), x[-1].item())
net = torch.nn.Linear(1, 1, bias=False)
reduction = mpi.nn.register_async_backward(net)
net(torch.ones(1)).sum().backward()
reduction.synchronize()
net.zero_grad()
come_late("again")
net(torch.tensor([1.0 + 2 * me])).sum().backward()
while True:
    try:
        reduction.synchronize()
        break
    except mpi.CollectiveTimeout:
        open(path("again"), "w")
print("late:", os.path.exists(path("again")), "gradient:", net.weight.grad.item())
"""
    job = run(tmp_path, program, deadline=5, at_deadline="raise")
    assert job.returncode == 0, job.stderr
    assert re.search(r"told: .* not complete after 5 s.* rank 1 \(process \d+\): has .*not", job.stdout), job.stdout
    assert "report" not in job.stderr
    assert job.stdout.count("sum 20.0 20.0") == job.stdout.count("sum 40.0 40.0") == 2, job.stdout
    assert job.stdout.count("late: True gradient: 2.0") == 2, job.stdout
