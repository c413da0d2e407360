"""What is noted of operations, and what becomes of ranks that call different things, or nothing."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from torchmpi_py import board, watch
from torchmpi_py.board import MARKS_PER_ROW, NUM_RECORDS, NUM_STRINGS
from torchmpi_py.sequences import CHECKSUM_BITS

pytestmark = pytest.mark.timeout(120)
LAUNCHER = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
HEAD = "import os, signal, time, torch, torchmpi_py as mpi\nmpi.start()\nme = mpi.rank()\nx = torch.ones(1000)\n"


def run(tmp_path, program, ranks=3, deadline=0, at_deadline="abort"):
    """A job of this program; its lines begin after HEAD's four."""
    (tmp_path / "program.py").write_text(HEAD + program)
    limits = {"TORCHMPI_DEADLINE": str(deadline), "TORCHMPI_AT_DEADLINE": at_deadline}
    environment = {**os.environ, **limits, "TORCHMPI_DUMP_DIR": str(tmp_path)}
    command = [LAUNCHER, "-n", str(ranks), "--bind", "none", "--timeout", "60", tmp_path / "program.py"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


@pytest.mark.mpi
def test_what_is_noted(mpi):
    used = board.current
    x = torch.ones(4)
    mpi.allreduce(x, flavour="mpi")
    line = sys._getframe().f_lineno - 1
    last = used.records(used.index)[0]
    assert last.what == "allreduce mpi torch.float32 sum, 16 bytes"
    assert last.site == f"{__file__}:{line} in test_what_is_noted"[-board.STRING_BYTES :]
    assert 0 < last.begun <= last.ended
    handle = mpi.allreduce_async(x, flavour="mpi")
    noted = used.records(used.index)[0]
    assert noted.launched > 0
    handle.wait()
    assert used.records(used.index)[0].ended > 0
    assert not watch.under_way(board.current)


@pytest.mark.mpi
def test_marks_of_neighbours(mpi):
    """After a common operation the neighbour's mark is there, and another checksum would not do."""
    with mpi.split(0) as comm:
        for _ in range(2 * MARKS_PER_ROW):
            mpi.allreduce(1, comm=comm)
        mpi.barrier(comm)
        sequence = comm.sequences[0]
        assert sequence.position == 2 * MARKS_PER_ROW + 1
        assert (sequence.neighbour is None) == (mpi.size() == 1)
        _, checksum = board.current.texts["barrier",]
        slot = sequence.neighbours_first + sequence.position % MARKS_PER_ROW
        mark = (sequence.use | sequence.position) << CHECKSUM_BITS | checksum
        assert board.current.words[slot] == (mark if mpi.size() > 1 else 0)
        if mpi.size() > 1:
            theirs = board.current.counterpart(sequence.index, sequence.position, sequence.neighbours_index)
            assert theirs.words == "barrier"
        mpi.barrier(comm)


@pytest.mark.mpi
def test_rows_and_strings_run_out(mpi):
    """Then operations go on, without being compared, or without words."""
    used = board.current
    rows = []
    while (row := used.take_row()) is not None:
        rows.append(row)
    with mpi.split(0) as comm:
        assert mpi.allreduce(mpi.rank(), comm=comm) == sum(range(mpi.size()))
    for row in rows:
        used.give_row_back(row)
    assert len({row.place for row in rows}) == len(rows)
    for number in range(NUM_STRINGS):
        used.keep_string(f"{number}")
    x = torch.ones(3, dtype=torch.int16)
    assert mpi.allreduce(x).tolist() == [mpi.size()] * 3
    assert used.records(used.index)[0].words == "?"
    assert len(used.records(used.index)) <= NUM_RECORDS


@pytest.mark.mpi
def test_who_waits_is_active_and_no_longer(mpi):
    """Waits that are given up, dropped handles, failed operations: nothing is left to be reported."""
    x = torch.ones(4)
    if mpi.size() > 1:
        source = (mpi.rank() + 1) % mpi.size()
        handle = mpi.recv_async(x, source)
        with pytest.raises(mpi.CollectiveTimeout):
            handle.wait(0.01)
        assert not watch.under_way(board.current)
        mpi.barrier()
        mpi.send(x, (mpi.rank() - 1) % mpi.size())
        handle.wait()
    for count in (4, 1 << 18):
        mpi.wait_all([mpi.allreduce_async(torch.ones(count)) for _ in range(3)])
    mpi.allreduce_async(x)
    mpi.barrier()
    assert not watch.under_way(board.current)


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


@pytest.mark.parametrize(
    ("odd", "others", "words"),
    [
        (
            "mpi.broadcast(x)",
            "mpi.allreduce(x)",
            ("broadcast mpi torch.float32 0, 4000 b", "allreduce mpi torch.float32 sum"),
        ),
        ("mpi.allreduce(x[:7])", "mpi.allreduce(x)", ("float32 sum, 28 bytes", "float32 sum, 4000 bytes")),
        ("mpi.allreduce_async(x, op='max').wait()", "mpi.allreduce_async(x).wait()", ("float32 max", "float32 sum")),
        ("mpi.gather(x, 1)", "mpi.gather(x, 0)", ("gather tensors any-size 1", "gather tensors any-size 0")),
    ],
)
def test_a_rank_that_calls_something_else(tmp_path, odd, others, words):
    job = run(tmp_path, f"mpi.allreduce(x)\nif me == 1:\n    {odd}\nelse:\n    {others}\n")
    assert job.returncode == 1, job.stderr
    assert "RanksDisagree: operation" in job.stderr
    assert all(word in job.stderr for word in words), job.stderr
    assert "program.py:7 in <module>" in job.stderr
    assert "program.py:9 in <module>" in job.stderr


def test_a_rank_that_does_not_come(tmp_path):
    """The report names it, where it is, and where the others wait; a file has what each did."""
    job = run(
        tmp_path, "mpi.allreduce(x)\nif me == 1:\n    time.sleep(50)\nmpi.allreduce_async(x).wait()\n", deadline=2
    )
    assert job.returncode == 1, job.stderr
    assert job.stderr.count("torchmpi_py: report of rank") == 1
    assert re.search(r"rank [02] waits in allreduce mpi .*4000 bytes, called at .*program.py:8 in <module>", job.stderr)
    assert re.search(r"rank 1 \(process \d+\): has not come to it; its last, allreduce .* was complete", job.stderr)
    assert re.search(r"rank 2 \(process \d+\): is there too, called at .*program.py:8", job.stderr)
    assert 'program.py", line 7, in <module>' in job.stderr
    (folder,) = tmp_path.glob("torchmpi_py-hang-*")
    dumps = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(3)]
    assert [len(dump["entries"]) for dump in dumps] == [2, 1, 2]


def test_a_rank_that_is_stopped(tmp_path):
    stopped = "if me == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nmpi.barrier()\n"
    job = run(tmp_path, stopped, deadline=2)
    assert "its process is stopped (SIGSTOP)" in job.stderr, job.stderr
    assert "waits in barrier" in job.stderr


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
print("went on")
"""
    job = run(tmp_path, program, ranks=2, deadline=2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on") == 2
    assert "report" not in job.stderr
    job = run(
        tmp_path,
        "if me == 1:\n    time.sleep(4)\nmpi.barrier()\nprint('went on')\n",
        ranks=2,
        deadline=2,
        at_deadline="report",
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("went on") == 2
    assert "waits in barrier" in job.stderr
