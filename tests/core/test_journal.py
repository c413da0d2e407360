"""What is recorded of operations, and what becomes of ranks that call different things, or nothing."""

import _thread
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from torchmpi_py.bench import timeline_calls
from torchmpi_py.core import backoff, channels, config, journal, status_board
from torchmpi_py.core.status_board import (
    CHECKSUM_BITS,
    FINGERPRINTS_PER_SLOT,
    NUM_RECORDS,
    NUM_STRINGS,
    SEQUENCE_NUMBER_BITS,
)
from torchmpi_py.watch import flight_recorder

pytestmark = pytest.mark.timeout(240)
LAUNCHER = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
HEAD = "import os, signal, time, torch, torchmpi_py as mpi\nmpi.start()\nme = mpi.rank()\nx = torch.ones(1000)\n"


def run(tmp_path, program, ranks=3, deadline=30, at_deadline="abort"):
    """A job of this program; its lines begin after HEAD's four."""
    (tmp_path / "program.py").write_text(HEAD + program)
    limits = {"TORCHMPI_DEADLINE": str(deadline), "TORCHMPI_AT_DEADLINE": at_deadline}
    environment = {**os.environ, **limits, "TORCHMPI_DUMP_DIR": str(tmp_path)}
    command = [LAUNCHER, "-n", str(ranks), "--bind", "none", "--timeout", "150", tmp_path / "program.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


@pytest.mark.mpi
def test_what_is_recorded(mpi):
    used = status_board.current
    x = torch.ones(4)
    mpi.allreduce(x, flavour="mpi")
    line = sys._getframe().f_lineno - 1
    last = used.records(used.index)[0]
    assert last.what == "allreduce mpi torch.float32 sum, 16 bytes"
    assert last.site == f"{__file__}:{line} in test_what_is_recorded"[-status_board.STRING_BYTES :]
    assert 0 < last.begun <= last.ended
    handle = mpi.allreduce_async(x, flavour="mpi")
    launched = used.records(used.index)[0]
    assert launched.launched > 0
    handle.wait()
    assert used.records(used.index)[0].ended > 0
    assert not journal.under_way(status_board.current)


@pytest.mark.mpi
def test_calls_of_a_thread_in_which_only_the_package_has_frames(mpi):
    """As autograd's for a GPU, which calls hooks. Elsewhere the same lines have callers."""
    torch.manual_seed(0)
    used, x, module = status_board.current, torch.ones(4), torch.nn.Linear(2, 1)
    for call, argument in ((mpi.allreduce, x), (mpi.nn.check_with_allreduce, module)):
        for _ in range(2):
            call(argument)
            before = used.records(used.index)[0]
            assert "test_journal.py" in before.site
            deadline = time.monotonic() + 60
            thread = _thread.start_new_thread(call, (argument,))
            while used.records(used.index)[0].number == before.number or thread in sys._current_frames():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            last = used.records(used.index)[0]
            assert last.ended > 0
            assert "test_journal.py" not in last.site
    assert x.tolist() == [mpi.size() ** 4] * 4


@pytest.mark.mpi
def test_fingerprints_of_neighbours(mpi):
    """After a common operation the neighbour's fingerprint is there, and another checksum would not do."""
    with mpi.split(0) as comm:
        for _ in range(2 * FINGERPRINTS_PER_SLOT):
            mpi.allreduce(1, comm=comm)
        mpi.barrier(comm)
        sequence, used = comm.sequences[0], status_board.current
        assert (sequence.neighbour is None) == (mpi.size() == 1)
        number = 2 * FINGERPRINTS_PER_SLOT + 1
        assert used.records(used.index)[0].sequence_number == number
        fingerprint, (mine, theirs) = sequence.next_fingerprint()
        assert fingerprint == (sequence.generation << SEQUENCE_NUMBER_BITS | number + 1) << CHECKSUM_BITS
        assert (mine - theirs) % FINGERPRINTS_PER_SLOT == 0
        assert used.words[theirs] >> CHECKSUM_BITS == (fingerprint >> CHECKSUM_BITS) - FINGERPRINTS_PER_SLOT
        if mpi.size() > 1:
            theirs = used.counterpart(
                sequence.index, used.records(used.index)[0].fingerprint, sequence.neighbours_index
            )
            assert theirs.text == "barrier"
        mpi.barrier(comm)


@pytest.mark.mpi
def test_who_waits_is_active_and_no_longer(mpi):
    """Waits that are given up, dropped handles, failed operations: nothing is left to be reported."""
    x = torch.ones(4)
    if mpi.size() > 1:
        source = (mpi.rank() + 1) % mpi.size()
        handle = mpi.recv_async(x, source)
        with pytest.raises(mpi.CollectiveTimeout):
            handle.wait(0.01)
        assert not journal.under_way(status_board.current)
        mpi.barrier()
        mpi.send(x, (mpi.rank() - 1) % mpi.size())
        handle.wait()
    for count in (4, 1 << 18):
        mpi.wait_all([mpi.allreduce_async(torch.ones(count)) for _ in range(3)])
    mpi.allreduce_async(x)
    mpi.barrier()
    assert not journal.under_way(status_board.current)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_may_come_late_while_they_work(mpi):
    """Rank 0 is not late in what it waits for as long as others call something; and is, when they are silent."""

    def counts(wanted, number):
        until = time.monotonic() + 20
        while (number in journal.under_way(status_board.current)) != wanted and time.monotonic() < until:
            time.sleep(0.02)
        return (number in journal.under_way(status_board.current)) == wanted

    def look():
        number = status_board.current.records(status_board.current.index)[0].number
        assert counts(False, number)
        backoff.barrier(turn)  # from now on the others are silent
        assert counts(True, number)

    with mpi.split(0) as comm, mpi.split(mpi.rank()) as own:
        turn = comm.background.mpi
        mpi.barrier()
        if mpi.rank() == 0:
            journal.run_while_others_work("the end of training", comm, look)
        else:
            request = turn.Ibarrier()
            while not request.Test():
                mpi.barrier(own)
            time.sleep(2)
            journal.run_while_others_work("the end of training", comm, lambda: None)
        assert not journal.under_way(status_board.current)


@pytest.mark.mpi
def test_a_wait_of_one_rank_alone(mpi):
    """It counts, and moves no rank's place in the sequence that all have to call alike."""
    with mpi.split(0) as comm:
        for _ in range(mpi.rank()):
            assert len(journal.run_alone("alone", comm, lambda: journal.under_way(status_board.current))) == 1
        assert mpi.allreduce(1, comm=comm) == mpi.size()
        with pytest.raises(LookupError):
            journal.run_alone("alone", comm, lambda: {}["nothing"])
        assert not journal.under_way(status_board.current)


@pytest.mark.mpi
def test_roots_of_other_types(mpi):
    """Whatever counts as a whole number is the same root on all ranks."""
    root = [0, torch.tensor(0), np.int64(0), np.array(0)][mpi.rank() % 4]
    x = torch.full((3,), float(mpi.rank()))
    assert mpi.broadcast(x, root).tolist() == [0, 0, 0]
    gathered = mpi.gather(x, root)
    assert (gathered is None) == (mpi.rank() > 0)
    forced = {"flavour": "mpi"} if mpi.rank() == 0 and mpi.size() > 1 else {}
    here = mpi.communicator()
    chosen = mpi.selector.flavour_for("allgather", here, x.device, 12 * mpi.size(), symmetric=False, name=None)
    if chosen.name == "mpi":
        assert len(mpi.allgather(x, **forced)) == 3 * mpi.size()


@pytest.mark.mpi
def test_a_difference_that_is_seen_at_the_end(mpi):
    """The neighbour comes later, with something else."""
    with mpi.split(mpi.rank()) as comm:
        entry = journal.record_plain("this", comm)
        status_board.current.words[entry[3]] ^= 1
        with pytest.raises(mpi.RanksDisagree):
            journal.end(entry)


@pytest.mark.mpi
def test_what_is_under_way_outlives_its_record(mpi):
    with mpi.split(mpi.rank()) as comm, mpi.split(mpi.rank()) as other:
        entry = journal.record_plain("long", comm)
        for _ in range(NUM_RECORDS + 600):
            mpi.barrier(other)
        assert journal.under_way(status_board.current) == {entry[0]}
        assert journal.find_record(status_board.current, entry[0]).text == "long"
        journal.end(entry)
        assert not journal.under_way(status_board.current)
        journal.record_plain("left without an end", comm)
        mpi.barrier(comm)
        for _ in range(NUM_RECORDS + 600):
            mpi.barrier(other)
        assert not journal.under_way(status_board.current)


@pytest.mark.mpi
def test_what_was_left_without_an_end_is_not_under_way(mpi):
    """Once its communicator is freed, also when another one has its slot."""
    used = status_board.current
    with mpi.split(mpi.rank()) as comm:
        slots = {sequence.index for sequence in comm.sequences}
        left = journal.record_plain("left without an end", comm)
        mpi.barrier(comm)  # several operations of one sequence may be open: of a call that records them together
        assert journal.under_way(used) == {left[0]}
        comm._release()
    assert used.record(left[0]).is_open
    assert not journal.under_way(used)
    with mpi.split(mpi.rank()) as comm:
        assert slots == {sequence.index for sequence in comm.sequences}
        assert used.record(left[0]).is_open
        assert not journal.under_way(used)
        message = journal.record(journal.Plain("a message", comm, None), channels.DIRECT)
        mpi.barrier(comm)
        assert journal.under_way(used) == {message[0]}
        journal.end(message)


@pytest.mark.mpi
def test_what_belonged_to_a_freed_communicator(mpi):
    """Its slot is another's now, and its operations are not the new one's."""
    for _ in range(2):
        with mpi.split(0) as comm:
            mpi.barrier(comm)
            mpi.barrier(comm)
    with mpi.split(0) as comm:
        used, sequence = status_board.current, comm.sequences[0]
        fingerprint = (sequence.generation << SEQUENCE_NUMBER_BITS | 1) << CHECKSUM_BITS
        mpi.barrier()
        assert all(used.counterpart(sequence.index, fingerprint, index) is None for index in used.indices)
        dump = flight_recorder.of_rank(used, used.index)
        assert {"split 0", "a communicator that was freed"} >= {
            group["desc"] for group in dump["pg_config"].values() if "." not in group["name"]
        }
        mpi.barrier()
        mpi.barrier(comm)
    assert {"split", "free"} <= {record.text for record in used.records(used.index)}


@pytest.mark.mpi
def test_more_places_of_call_than_are_kept(mpi, monkeypatch):
    monkeypatch.setattr(journal, "MOST_CALLS_KEPT", 3)
    names = {"mpi": mpi, "module": torch.nn.Linear(2, 2)}
    for number in range(9):
        exec(compile("mpi.nn.synchronize_parameters(module)", f"generated{number}.py", "exec"), names)


@pytest.mark.mpi
def test_rows_and_strings_run_out(mpi):
    """Then operations go on, without being compared, or with the verb and the file alone as words."""
    used = status_board.current
    slots = []
    while (slot := used.acquire_slot()) is not None:
        slots.append(slot)
    with mpi.split(0) as comm:
        assert mpi.allreduce(mpi.rank(), comm=comm) == sum(range(mpi.size()))
    for slot in slots:
        used.release_slot(slot)
    assert len({slot.number for slot in slots}) == len(slots)
    for number in range(NUM_STRINGS):
        used.keep_string(f"{number}", "one of many")
    x = torch.ones(3, dtype=torch.int16)
    assert mpi.allreduce(x).tolist() == [mpi.size()] * 3
    latest = used.records(used.index)[0]
    assert latest.text == "allreduce"
    assert latest.site.endswith("test_journal.py")
    assert len(used.records(used.index)) <= NUM_RECORDS


def test_a_rank_that_calls_something_else(tmp_path):
    program = """
us = {"flavour": "mpi"}
pairs = [
    (lambda c: mpi.broadcast_async(x, comm=c, **us), lambda c: mpi.allreduce_async(x, comm=c, **us)),
    (lambda c: mpi.allreduce_async(x[:7], comm=c, **us), lambda c: mpi.allreduce_async(x, comm=c, **us)),
    (lambda c: mpi.allreduce_async(1, op="max", comm=c), lambda c: mpi.allreduce_async(1, comm=c)),
    (lambda c: mpi.gather_async(x, 1, comm=c), lambda c: mpi.gather_async(x, 0, comm=c)),
]
comms = [mpi.split(0) for _ in pairs]
called = [os.path.join(os.environ["TORCHMPI_DUMP_DIR"], str(rank)) for rank in (0, 2)]
while me == 1 and not all(map(os.path.exists, called)):
    time.sleep(0.01)
handles = []
for (odd, others), comm in zip(pairs, comms):
    try:
        handles.append((odd if me == 1 else others)(comm))
    except mpi.RanksDisagree as error:
        print("told:", error)
if me == 1:
    raise SystemExit(os._exit(3))
open(called[me // 2], "w")
time.sleep(100)
"""
    job = run(tmp_path, program)
    told = [line for line in job.stdout.splitlines() if "told:" in line]
    expected = [
        ("broadcast mpi torch.float32 0, 4000 b", "allreduce mpi torch.float32 sum"),
        ("float32 sum, 28 bytes", "float32 sum, 4000 bytes"),
        (" max", " sum"),
        ("gather tensors any-size 1", "gather tensors any-size 0"),
    ]
    assert len(told) == len(expected), (told, job.stderr)
    for line, words in zip(told, expected, strict=True):
        assert re.search(r"operation 1 of this communicator is not the same .* this rank calls .*; rank 2 calls", line)
        assert all(word in line for word in words), line
        assert line.count("program.py:") >= 2


@pytest.mark.parametrize("at_deadline", ["raise", "abort"])
def test_an_asynchronous_call_never_matches_a_blocking_one(tmp_path, at_deadline):
    """Where a blocking call is launched too, and where an asynchronous one is posted beside blocking ones."""
    program = f"""
posted = ["broadcast", "reduce", "allreduce", "reduce_scatter", "alltoall", "scatter"]
calls = [(verb, x, {{"flavour": "mpi"}}) for verb in posted]
if "{at_deadline}" == "raise":
    calls += [(verb, x, {{"flavour": "shared"}}) for verb in [*posted, "allgather", "gather"]]
    calls += [(verb, 1.5, {{}}) for verb in ["broadcast", "reduce", "allreduce", "allgather", "gather"]]
    calls += [(verb, "an object", {{}}) for verb in ["broadcast_object", "allgather_object"]]
comms, pending = [mpi.split(0) for _ in calls], []
called = os.path.join(os.environ["TORCHMPI_DUMP_DIR"], "called")
if me == 0:
    pending = [getattr(mpi, verb + "_async")(x, comm=c, **more) for (verb, x, more), c in zip(calls, comms)]
    open(called, "w")
    time.sleep(100)
while not os.path.exists(called):
    time.sleep(0.01)
for (verb, x, more), comm in zip(calls, comms):
    try:
        print("mixed:", verb, getattr(mpi, verb)(x, comm=comm, **more), flush=True)
    except mpi.RanksDisagree as error:
        print("told:", error, flush=True)
os._exit(3)
"""
    job = run(tmp_path, program, ranks=2, deadline=8, at_deadline=at_deadline)
    told = [line for line in job.stdout.splitlines() if "told:" in line]
    assert "mixed:" not in job.stdout, job.stdout
    assert len(told) == (21 if at_deadline == "raise" else 6), (told, job.stderr)
    assert all(re.search(r"this rank calls .* at .*rank 0 calls .* asynchronously at ", line) for line in told), told


def test_what_is_queued_behind_a_call_that_broke_off(tmp_path):
    """It would meet the other rank's first call, and give its object for the result of the second."""
    program = """
first = mpi.allgather_object_async((lambda: 0) if me == 0 else 1)
calls = [first.wait]
try:
    calls = [first.wait, mpi.allgather_object_async("second").wait]
except mpi.CommunicatorError as error:  # the first one has failed already
    print(f"told: {type(error).__name__}: {error}", flush=True)
for call in calls:
    try:
        print(f"got: {call()}", flush=True)
    except Exception as error:
        print(f"told: {type(error).__name__}: {error}", flush=True)
os._exit(3)
"""
    job = run(tmp_path, program, ranks=2)
    assert "got:" not in job.stdout, job.stdout
    assert re.search("told: .*[Pp]ickl", job.stdout), job.stdout
    assert "told: CommunicatorError: allgather_object: an earlier call on " in job.stdout


@pytest.mark.parametrize("launch", ["mpi.allreduce_async(x[:3])", "mpi.allreduce_async(x, flavour='ring')"])
def test_a_launch_that_a_signal_breaks_off(tmp_path, launch):
    """Its handler raises after the call has its number: whether it is posted nobody knows, and the next is refused."""
    program = f"""
from torchmpi_py.core.communication_thread import CommunicationThread as thread
def interrupt(*args):
    raise KeyboardInterrupt
before = mpi.allreduce_async(torch.ones(1 << 20))
if me == 1:
    before.wait()
    time.sleep(100)
formers = thread.keep, thread.enqueue
thread.keep = thread.enqueue = interrupt
try:
    {launch}
except KeyboardInterrupt:
    print("interrupted")
thread.keep, thread.enqueue = formers
try:
    {launch}
except mpi.CommunicatorError as error:
    print("told:", error, flush=True)
print("earlier:", before.wait()[-1].item(), flush=True)
os._exit(3)
"""
    job = run(tmp_path, program, ranks=2)
    assert "earlier: 2.0" in job.stdout, job.stdout + job.stderr
    assert "interrupted" in job.stdout, job.stderr
    assert "told: allreduce: an earlier call on " in job.stdout


def test_ranks_that_wait_in_different_operations(tmp_path):
    """None of them sees the other as it comes: ranks 2, 0, 1 look at 0, 1, 2. Then their watchdogs do."""
    program = """
time.sleep([0.4, 0.8, 0][me])
if me == 0:
    mpi.broadcast(x, 1, flavour="mpi")
else:
    mpi.allreduce(x, flavour="mpi")
"""
    job = run(tmp_path, program)
    assert job.returncode == 1, job.stderr
    assert "RanksDisagree: operation 1 " in job.stderr
    assert "broadcast mpi torch.float32 1" in job.stderr
    assert "program.py:8 in <module>" in job.stderr
    assert "program.py:10 in <module>" in job.stderr


CIRCLES = {  # what rank 0, and what the other ranks do: none of them can go on
    "forms": ("mpi.allreduce_async(x, flavour='shared').wait()", "mpi.allreduce(x, flavour='shared')"),
    "communicators": ("mpi.allreduce(x, comm=a); mpi.allreduce(x, comm=b)", "mpi.barrier(b); mpi.allreduce(x, comm=a)"),
    "a message": ("mpi.recv(x, 1)", "mpi.barrier()"),
    "messages": ("mpi.recv(x, (me + 1) % mpi.size())", "mpi.recv(x, (me + 1) % mpi.size())"),
    "a step more": ("mpi.allreduce_async(x, flavour='shared').wait(); mpi.allreduce(x)", "mpi.allreduce(1)"),
}


@pytest.mark.parametrize("kind", CIRCLES)
def test_ranks_that_wait_for_each_other_in_a_circle(tmp_path, kind):
    """Named by their watchdogs, long before the deadline."""
    first, others = CIRCLES[kind]
    program = f"a, b = mpi.split(0), mpi.split(0)\nif me == 0:\n    {first}\nelse:\n    {others}\n"
    job = run(tmp_path, program, ranks=3 if kind == "messages" else 2, deadline=100)
    assert job.returncode == 1, job.stderr
    assert re.search(r"RanksDisagree: .*rank 0 waits in .* at .*program.py:7.*; rank 1 waits in .*:9 ", job.stderr)


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
    job = run(tmp_path, program, ranks=2, deadline=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("complete") == 2
    assert job.stderr.count("no rank can go on") == 1, job.stderr


def test_a_rank_that_does_not_come(tmp_path):
    """The report names it, where it is, and where the others wait; a file has what each did."""
    job = run(
        tmp_path, "mpi.allreduce(x)\nif me == 1:\n    time.sleep(100)\nmpi.allreduce_async(x).wait()\n", deadline=6
    )
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("torchmpi_py: report of rank") == 1
    assert re.search(r"rank [02] waits in allreduce mpi .*4000 bytes, called at .*program.py:8 in <module>", job.stderr)
    assert re.search(r"rank 1 \(process \d+\): has not come to it; its last, allreduce .* was complete", job.stderr)
    assert re.search(r"rank 2 \(process \d+\): is there too, called at .*program.py:8", job.stderr)
    assert 'program.py", line 7, in <module>' in job.stderr
    (folder,) = tmp_path.glob("torchmpi_py-hang-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    dumps = timeline_calls.load(tmp_path)
    assert [len(dump["entries"]) for dump in dumps.values()] == [2, 1, 2]
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder]
    found = subprocess.run(analyzer, capture_output=True, text=True, timeout=200)
    assert "missing ranks: {1}" in found.stdout + found.stderr, found


@pytest.mark.slow
def test_a_late_operation_that_raises(tmp_path):
    """In user code, and what it says; the operations go on, and complete, while the others wait in mpi.stop()."""
    program = """
others = [os.path.join(os.environ["TORCHMPI_DUMP_DIR"], str(rank)) for rank in (0, 2)]
while me == 1 and not all(map(os.path.exists, others)):
    time.sleep(0.01)
pending = [lambda: mpi.allreduce(x), mpi.barrier, lambda: mpi.allreduce_async(torch.ones(1 << 20)).wait()]
for call in pending:
    try:
        call()
    except mpi.CollectiveTimeout as error:
        if me != 1:
            print("late:", error)
if me != 1:
    open(others[me // 2], "w")
"""
    job = run(tmp_path, program, deadline=5, at_deadline="raise")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("late:") == 6, job.stdout
    assert re.search(r"late: .* not complete after 5 s.* rank 1 \(process \d+\): has .*not", job.stdout)
    assert "report" not in job.stderr


@pytest.mark.slow
def test_a_blocking_call_that_was_late_can_be_waited_for_again(tmp_path):
    """By the handle of its error. The calls after it meet those of the late rank."""
    program = """
told = os.path.join(os.environ["TORCHMPI_DUMP_DIR"], "told")
while me == 1 and not os.path.exists(told):
    time.sleep(0.01)
for k, count in enumerate((4, 1 << 18), 1):
    x = torch.full((count,), 10.0 * k)
    try:
        mpi.allreduce(x)
    except mpi.CollectiveTimeout as error:
        open(told, "w")
        assert error.handle.wait() is x
    print("sum", x[0].item(), x[-1].item())
"""
    job = run(tmp_path, program, ranks=2, deadline=5, at_deadline="raise")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("sum 20.0 20.0") == job.stdout.count("sum 40.0 40.0") == 2, job.stdout


@pytest.mark.slow
def test_a_late_reduction_of_gradients_is_waited_for_again(tmp_path):
    """A rank that calls synchronize() again after a CollectiveTimeout gets averages, not the gradients of this rank."""
    program = """
told, net = os.path.join(os.environ["TORCHMPI_DUMP_DIR"], "told"), torch.nn.Linear(1, 1, bias=False)
reduction = mpi.nn.register_async_backward(net)
net(torch.ones(1)).sum().backward()
reduction.synchronize()
net.zero_grad()
while me == 1 and not os.path.exists(told):
    time.sleep(0.01)
net(torch.tensor([1.0 + 2 * me])).sum().backward()
while True:
    try:
        reduction.synchronize()
        break
    except mpi.CollectiveTimeout:
        open(told, "w")
print("late:", os.path.exists(told), "gradient:", net.weight.grad.item())
"""
    job = run(tmp_path, program, ranks=2, deadline=5, at_deadline="raise")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("late: True gradient: 2.0") == 2, job.stdout


@pytest.mark.slow
def test_a_late_operation_has_another_deadline_in_stop(tmp_path):
    """After its lateness was raised. Rank 1 comes while the others complete their operations in mpi.stop()."""
    program = """
others = [os.path.join(os.environ["TORCHMPI_DUMP_DIR"], str(rank)) for rank in (0, 2)]
while me == 1 and not all(map(os.path.exists, others)):
    time.sleep(0.01)
time.sleep(2 if me == 1 else 0)
try:
    mpi.allreduce(x)
except mpi.CollectiveTimeout:
    open(others[me // 2], "w")
"""
    job = run(tmp_path, program, deadline=10, at_deadline="raise")
    assert job.returncode == 0, job.stderr
    assert all((tmp_path / str(rank)).exists() for rank in (0, 2)), job.stderr
    assert "report" not in job.stderr


def test_a_rank_that_does_not_stop(tmp_path):
    """It calls one operation fewer, which is found there."""
    job = run(tmp_path, "if me != 1:\n    mpi.allreduce(x)\n")
    assert job.returncode == 1, job.stderr
    assert "RanksDisagree: operation 1 " in job.stderr
    assert re.search(r"calls mpi.stop\(\) .* calls allreduce|calls allreduce .* calls mpi.stop", job.stderr)


@pytest.mark.slow
def test_what_was_left_without_an_end_ends_no_job(tmp_path):
    """Nor where the others are in mpi.stop() already, and its communicator's slot is one of all ranks."""
    program = """
from torchmpi_py.core import journal
if me == 1:
    with mpi.split(mpi.rank()) as alone:
        mpi.barrier(alone)
        journal.record_plain("left without an end", alone)
        alone._release()
else:
    mpi.split(mpi.rank()).free()
later = mpi.split(0)
if me == 1:
    time.sleep(3)
"""
    job = run(tmp_path, program)
    assert job.returncode == 0, job.stderr
    assert "report of rank" not in job.stderr


def test_a_report_that_is_asked_for(tmp_path):
    """By a signal, while the main thread is in MPI; the job goes on, and children have the signal's usual meaning."""
    program = """
import subprocess, sys
told = os.path.join(os.environ["TORCHMPI_DUMP_DIR"], "told")
class Hearing:
    def write(self, text):
        if "report of" in text:
            open(told, "w")
        return sys.stderr.write(text)
    def flush(self):
        sys.stderr.flush()
if me == 0:
    sys.__stderr__ = Hearing()
    subprocess.Popen(["sh", "-c", f"sleep 4; kill -USR1 {os.getpid()}; kill -USR1 $$"])
while me == 1 and not os.path.exists(told):
    time.sleep(0.01)
mpi.barrier()
print("went on")
"""
    job = run(tmp_path, program, ranks=2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on") == 2
    assert job.stderr.count("torchmpi_py: report of rank 0: asked for by SIGUSR1") == 1, job.stderr
    assert re.search(r"rank 0 \(process \d+\): in barrier for", job.stderr)


def test_tuning_of_deadlines():
    assert config.from_environment({"TORCHMPI_DEADLINE": "5"}).deadline_seconds == 5
    assert config.from_environment({"TORCHMPI_DEADLINE_SECONDS": "2.5"}).deadline_seconds == 2.5
    with pytest.raises(ValueError, match="the same setting"):
        config.from_environment({"TORCHMPI_DEADLINE_SECONDS": "5", "TORCHMPI_DEADLINE": "6"})
    with pytest.raises(ValueError, match="TORCHMPI_DEADLINE='soon': give a number of seconds"):
        config.from_environment({"TORCHMPI_DEADLINE": "soon"})
    with pytest.raises(ValueError, match="deadline_seconds = inf: give a number of seconds, 0 or more"):
        config.from_environment({"TORCHMPI_DEADLINE": "inf"})
    with pytest.raises(ValueError, match="at_deadline = 'stop': give one of abort, report, raise"):
        config.from_environment({"TORCHMPI_AT_DEADLINE": "stop"})


def test_a_rank_that_is_stopped(tmp_path):
    """The others wait for it, in stop."""
    program = """
process_ids = mpi.allgather_object(os.getpid())
if me == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while open(f"/proc/{process_ids[1]}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
"""
    job = run(tmp_path, program, deadline=2)
    assert "its process is stopped (SIGSTOP)" in job.stderr, job.stderr
    assert re.search(r"rank [02] waits in mpi.stop\(\)", job.stderr)


@pytest.mark.skipif(os.environ.get("TORCHMPI_FAULTS") != "all", reason="scripts/test_faults runs it")
def test_what_takes_long_without_being_late(tmp_path):
    """Posted and queued operations that nobody waits for; a wait that was given up; and what is only reported."""
    program = """
handle, y = mpi.allreduce_async(x), torch.ones(1 << 20)
if me == 1:
    time.sleep(3)
large = mpi.allreduce_async(y)
got = mpi.recv_async(torch.ones(3), 1 - me)
try:
    got.wait(0.1)
except mpi.CollectiveTimeout:
    pass
time.sleep(4 if me == 0 else 1)
assert (handle.wait() == mpi.size()).all() and (large.wait() == mpi.size()).all()
mpi.send(torch.zeros(3), 1 - me)
got.wait()
if me == 1:
    time.sleep(4)
mpi.barrier()
print("went on")
"""
    job = run(tmp_path, program, ranks=2, deadline=2, at_deadline="report")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on") == 2
    assert job.stderr.count("report of") == 1, job.stderr
    assert "waits in barrier" in job.stderr
