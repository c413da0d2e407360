"""Start, stop, exit, children: each in a process of its own. And what the ranks of a job learn about themselves."""

import os
import pathlib
import re
import sys

import pytest
from support import jobs

from torchmpi_py.core import config
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import mpirun
from torchmpi_py.launch.command import starter_words
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.runtime import exits

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("full_collections")]


@pytest.fixture
def launch(tmp_path):
    """Run a program on some ranks, which may import its file again; (standard output, standard error)."""

    def run(text, size, *options):
        starter = pathlib.Path(sys.executable).with_name("torchmpirun")
        job = jobs.run(starter, "-n", size, *options, jobs.write(tmp_path, text))
        assert job.returncode == 0, job.stderr
        return job.stdout, job.stderr

    return run


ALONE = """
import os, sys, torchmpi_py as mpi
assert "torch" not in sys.modules, "the launcher must not wait for torch"
mpi.allreduce, mpi.nn, mpi.start
assert "mpi4py.MPI" not in sys.modules
def expect(error, function, **options):
    try:
        function(**options)
    except error as caught:
        print(caught)
expect(mpi.NotStarted, mpi.rank)
import torch
if not torch.cuda.is_available():
    expect(ValueError, mpi.start, with_cuda=True)
for _ in range(100):
    mpi.start()
    mpi.allreduce_async(1.0)
    mpi.stop()
mpi.stop()
assert not mpi.is_started()
os.environ["TORCHMPI_DEADLIN"] = "5"
with mpi.session():
    assert mpi.is_started()
    assert (mpi.rank(), mpi.size(), mpi.local_rank(), mpi.local_size(), mpi.num_nodes()) == (0, 1, 0, 1, 1)
    assert mpi.allreduce(torch.ones(2)).tolist() == [1, 1] and mpi.host_name()
    mpi.barrier()
    expect(mpi.TorchMPIError, mpi.start)
assert not mpi.is_started()
"""


def test_starts_and_stops_without_a_launcher():
    done = jobs.python(ALONE)
    assert done.returncode == 0, done.stderr
    first, *cuda, last = done.stdout.splitlines()
    assert first == "torchmpi_py is not started in this process: call mpi.start() first"
    assert all("sees no CUDA device" in line for line in cuda)
    assert last == "this process is already started; remove this call, or call mpi.stop() first"
    (warning,) = done.stderr.splitlines()
    assert "TORCHMPI_DEADLIN (did you mean TORCHMPI_DEADLINE?)" in warning


CHILDREN = """
import logging, os, sys, torchmpi_py as mpi
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
mpi.start()
def code_of_child(action):
    pid = os.fork()
    if pid == 0:
        action()
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def refuses(call, words):
    try:
        call()
    except mpi.NotStarted as error:
        os._exit(8 if words in str(error) else 9)
assert code_of_child(lambda: sys.exit(7)) == 7
assert code_of_child(lambda: refuses(mpi.rank, "a started rank forked this process")) == 8
assert code_of_child(lambda: refuses(mpi.start, "is a child of a started rank")) == 8
assert mpi.allreduce(1) == mpi.size()
mpi.stop()
assert code_of_child(lambda: refuses(mpi.start, "")) == 8
"""


def test_a_start_logs_one_line_and_forked_children_leave_their_parent_alone(launch):
    """One that exits does not shut the rank down; none is a rank, or can start, also if it is forked after the stop."""
    (line,) = launch(CHILDREN, 2)[0].splitlines()
    assert line.startswith("world of 2 (nodes: 1), ")


@pytest.mark.slow
def test_exit_without_stop_and_with_operations_pending(launch):
    text = """
    import torch, torchmpi_py as mpi
    mpi.start()
    handles = [mpi.allreduce_async(torch.ones(n)) for n in (3, 300000)]
    comm = mpi.split(0)
    if mpi.rank() == 0:
        print("done")
    """
    assert launch(text, 3)[0] == "done\n"


@pytest.mark.slow
def test_spawned_children_get_an_error_instead_of_a_rank(launch):
    text = """
    import multiprocessing, torchmpi_py as mpi

    def child(queue):
        for call in (mpi.rank, mpi.start):
            try:
                queue.put(call())
            except mpi.NotStarted as error:
                queue.put(str(error))

    if __name__ == "__main__":
        mpi.start()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        answers = [queue.get(), queue.get()]
        process.join()
        assert process.exitcode == 0
        if mpi.rank() == 0:
            print(*answers, sep="\\n")
        assert mpi.allreduce(1) == mpi.size()
    """
    first, second = launch(text, 2)[0].splitlines()
    assert "is not started in this process" in first
    assert "is a child of a started rank" in second


def test_an_exception_under_plain_mpirun_ends_the_job(tmp_path):
    """Without the launcher the package itself aborts."""
    text = """
    import torchmpi_py as mpi
    with mpi.session():
        if mpi.rank() == 1:
            raise RuntimeError("planted")
        mpi.barrier()
    """
    vendor, starter = mpirun.find("", os.environ)
    words = [*starter_words(JobSpec(vendor=vendor, num_ranks=2)), sys.executable, jobs.write(tmp_path, text)]
    done = jobs.run(starter, *words, env=vendor.root_environment)
    assert done.returncode != 0
    assert "RuntimeError: planted" in done.stderr + done.stdout


@pytest.mark.slow
def test_a_rank_that_takes_its_time_in_stop_has_not_left(launch):
    """Its operations are still under way, while another waits for it in ``mpi.stop()``."""
    text = """
    import time, torchmpi_py as mpi
    from torchmpi_py.core import communication_thread
    mpi.start()
    mpi.allreduce(1)
    if mpi.rank() == 1:
        thread = communication_thread.current()
        drain = thread.drain
        thread.drain = lambda: (time.sleep(4), drain())
    mpi.stop()
    print("stopped")
    """
    assert launch(text, 3)[0].count("stopped") == 3


def test_tuning_from_the_environment():
    assert config.from_environment({"TORCHMPI_FUSE_BYTES": "4096"}).fuse_bytes == 4096
    for name in ("TORCHMPI_DEADLINE", "TORCHMPI_DEADLINE_SECONDS"):
        assert config.from_environment({name: "2.5"}).deadline_seconds == 2.5
    for settings, words in (
        ({"TORCHMPI_FUSE_BYTES": "many"}, r"TORCHMPI_FUSE_BYTES='many'.*whole number"),
        ({"TORCHMPI_DEADLINE_SECONDS": "5", "TORCHMPI_DEADLINE": "6"}, "set the same timeout; set only one"),
        ({"TORCHMPI_DEADLINE": "soon"}, "'soon': expected a number of seconds"),
        ({"TORCHMPI_DEADLINE": "inf"}, "expected a number of seconds, 0 or more"),
        ({"TORCHMPI_AT_DEADLINE": "stop"}, "'stop': expected one of abort, report, raise"),
        ({"TORCHMPI_MESSAGE_BYTES": "-1"}, "message_bytes = -1"),
        ({"TORCHMPI_NATIVE_ASYNC_BYTES": "4194304"}, "native_async_bytes = 4194304: expected at most message_bytes"),
        ({"TORCHMPI_STAGING_BYTES": "4096"}, "staging_bytes"),  # allreduce would take no chunk at all
        ({"TORCHMPI_CHUNK_BYTES": "1"}, "chunk_bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            config.from_environment(settings)


def test_variables_that_nothing_reads_are_named():
    given = {"TORCHMPI_DEADLIN": "5", "TORCHMPI_WHATEVER": "", "TORCHMPI_PROFILE": "p", "TORCHMPIRUN_RESTART": "0"}
    assert config.unknown_settings(given).startswith(
        "TORCHMPI_DEADLIN (did you mean TORCHMPI_DEADLINE?), TORCHMPI_WHATEVER have no effect"
    )


def test_every_variable_in_use_is_known():
    root = pathlib.Path(__file__).parents[2]
    files = [path for folder in ("torchmpi_py", "tests", "scripts") for path in (root / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".sh", "") and path.is_file()]
    used = {name for text in texts for name in re.findall(r"\bTORCHMPI_[A-Z_]*[A-Z]\b", text)}
    assert len(used) > 10
    assert config.unknown_settings(dict.fromkeys(used - {"TORCHMPI_DEADLIN", "TORCHMPI_WHATEVER"}, "")) == ""


@pytest.mark.skipif(jobs.VENDOR != "mpich", reason="only MPICH can present one host as two nodes")
@pytest.mark.parametrize("by_block", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nodes_are_counted_whatever_the_placement(launch, by_block):
    """MPICH can present one host as two nodes, with ranks 0 1 | 2 3 or 0 2 | 1 3."""
    text = """
    import torch, torchmpi_py as mpi
    mpi.start()
    assert mpi.num_nodes() == 2 and mpi.local_size() == 2
    with mpi.at(1) as node:
        assert mpi.size() == 2 and mpi.num_nodes() == 1 and mpi.local_rank() == mpi.rank()
        members = mpi.allgather(node.rank * 0 + mpi.communicator(0).rank)
        assert node.outer.size == (2 if node.rank == 0 else 1)
    assert mpi.allreduce(torch.ones(100000))[7] == 4
    if mpi.rank() == 0:
        print(*members)
    """
    options = ["--env", "MPIR_CVAR_NUM_CLIQUES=2", "--env", f"MPIR_CVAR_CLIQUES_BY_BLOCK={by_block}"]
    assert launch(text, 4, *options)[0] == ("0 1\n" if by_block else "0 2\n")


@pytest.mark.mpi
def test_every_rank_knows_its_place(mpi):
    assert mpi.is_started()
    assert sorted(mpi.allgather_object((mpi.rank(), mpi.size()))) == [(r, mpi.size()) for r in range(mpi.size())]
    assert sorted(mpi.allgather_object(mpi.local_rank())) == list(range(mpi.size()))
    assert mpi.local_size() == mpi.size()
    assert mpi.num_nodes() == 1
    mpi.barrier()
    with pytest.raises(TorchMPIError, match="is already started"):
        mpi.start()


@pytest.mark.parametrize("how", ["raise OSError('of the hook')", "sys.exit(0)", "print('shown', file=sys.stderr)"])
def test_a_hook_that_fails_does_not_keep_the_job_from_its_end(monkeypatch, capsys, how):
    aborted = []
    monkeypatch.setattr(exits.abort, "abort", aborted.append)
    hook = exits._aborting(lambda *failure: exec(how))
    hook(RuntimeError, RuntimeError("heard"), None)
    assert aborted == [1]
    assert ("shown" if "shown" in how else "RuntimeError: heard") in capsys.readouterr().err
