"""Jobs: how process groups begin and end, in which order, and what becomes of calls that some rank never makes."""

import textwrap

import pytest
from support import jobs

pytestmark = pytest.mark.usefixtures("full_collections")
HEAD = """
import datetime as dt, gc, os, threading, time, torch, torch.distributed as dist
import torchmpi_py as mpi, torchmpi_py.torch_backend as backend

def use(group=None):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size(group)).all()

"""
BEGIN = 'dist.init_process_group("torchmpi")\nme = dist.get_rank()\n'


def job(tmp_path, program, **environment):
    path = jobs.write(tmp_path, HEAD + textwrap.dedent(program))
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return jobs.torchmpirun("-n", 3, "--timeout", 150, path, env=environment)


def test_begin_and_end_in_any_order(tmp_path):
    """And what nobody received comes to no later session."""
    done = job(
        tmp_path,
        """
        for number in range(3):
            dist.init_process_group("torchmpi")
            for _ in range(2):  # the communicators are used again
                dist.destroy_process_group()
                dist.init_process_group("torchmpi")
                use(dist.new_group())
                dist.all_reduce(torch.ones(3), async_op=True)
            groups = [None, dist.new_group()]
            following, before = (dist.get_rank() + 1) % 3, (dist.get_rank() - 1) % 3
            works = [dist.isend(torch.tensor([number]), following, each) for each in groups]
            for each in groups:
                dist.recv(got := torch.tensor([-2]), before, each)
                assert got.item() == number, (number, got)
                works.append(dist.isend(torch.tensor([-1]), following, each))  # which nobody receives
            for work in works:
                work.wait()
            dist.barrier()
            if number < 2:
                dist.destroy_process_group()
            mpi.stop()
        try:
            use()
        except mpi.NotStarted as error:
            assert "mpi.stop() was called" in str(error)
        dist.destroy_process_group()
        mpi.start()
        dist.init_process_group("cpu:torchmpi,cuda:nccl")
        use()
        inner = dist.new_group([0, 2])
        if mpi.rank() != 1:
            use(inner)
        dist.destroy_process_group()
        # As in a job of very many ranks, rank 0 serves a store; the other ranks connect when they first use it.
        from torchmpi_py.collectives.flavours import rendezvous
        rendezvous._MOST_AT_ONCE = 0
        folder, served, made = os.environ.pop("TORCHMPIRUN_JOB_DIR"), dist.TCPStore, []
        dist.TCPStore = lambda *words, **options: made.append(words) or served(*words, **options)
        dist.init_process_group("torchmpi")
        use(dist.new_group())
        gc.collect()
        assert len(made) == (mpi.rank() == 0), made
        use(dist.new_group(backend="gloo"))
        store = dist.distributed_c10d._get_default_store()
        store.set(f"key{mpi.rank()}", "value")
        assert [store.get(f"key{rank}") for rank in range(3)] == [b"value"] * 3
        assert (store.add("number", 0), store.check(["another"]), len(made)) == (0, False, 1)
        dist.destroy_process_group()
        os.environ["TORCHMPIRUN_JOB_DIR"] = folder
        dist.init_process_group("gloo")  # it meets over MPI, too
        use()
        ours = dist.new_group(backend="torchmpi")
        assert isinstance(ours, backend.ProcessGroup)
        works = [dist.all_reduce(torch.ones(300), group=ours, async_op=True) for _ in range(100)]  # and forget it all
        """,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "so nccl is not used" in done.stderr
    assert done.stderr.count("\n") == 1


CALLS = {
    "allreduce": "dist.all_reduce(torch.ones(3))",
    "barrier": "dist.barrier()",
    "ddp": "ddp(torch.ones(4)).backward()",
}


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_a_rank_never_makes(tmp_path, call):
    """It raises after the group's timeout, and names that rank. The job ends; in order, if nothing is stuck in MPI."""
    done = job(
        tmp_path,
        f"""
        dist.init_process_group("torchmpi")
        use()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(dt.timedelta(seconds=1))  # now: on a busy machine the start takes longer
        dist.irecv(torch.empty(3))  # which nobody sends
        before = time.monotonic()
        if dist.get_rank() != 1:
            try:
                {CALLS[call]}
            except RuntimeError as error:
                assert isinstance(error, TimeoutError) or "{call}" == "ddp"
                for words in (" timeout ", "rank 1 (process", "has not called it"):
                    assert words in str(error), error
                assert 0.9 < time.monotonic() - before < 30
                print("told", flush=True)
                open(f"{tmp_path}/told-{{dist.get_rank()}}", "w")
        else:
            while not all(os.path.exists(f"{tmp_path}/told-{{rank}}") for rank in (0, 2)):
                time.sleep(0.01)
        """,
    )
    assert done.stdout.count("told") == 2, done
    assert done.returncode == (0 if call == "barrier" else 1), done
    assert call == "barrier" or "an operation that timed out is still under way" in done.stderr


PARTS = {
    "a part that is not expected": "sizes, out = [int(me == 0 and to == 1) for to in range(3)], torch.empty(0)\n"
    "dist.all_to_all_single(out, torch.ones(sum(sizes)), [0, 0, 0], sizes)",
    "another dtype": "x = torch.ones(3, dtype=torch.int32 if me == 1 else torch.float32)\n"
    "dist.all_to_all_single(torch.empty_like(x), x, [1, 1, 1], [1, 1, 1])",
    "other lengths": "lengths = [5 if rank == me else 7 for rank in range(3)]\n"
    "dist.all_gather([torch.empty(n) for n in lengths], torch.ones(5))",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PARTS)
def test_parts_that_do_not_fit_are_an_error(tmp_path, what):
    """Not values that nobody has sent, and no message that a later call takes for its own."""
    done = job(tmp_path, f'{BEGIN}{PARTS[what]}\nprint("went on")\nuse()\nuse()\nprint("to the end")')
    assert done.returncode == 1, done
    assert "to the end" not in done.stdout, done
    assert "RanksDisagree" in done.stderr or "MPI_ERR_TRUNCATE" in done.stderr, done


@pytest.mark.slow
def test_a_receive_that_is_waited_for_to_the_end(tmp_path):
    """By a thread, whose wait raises when the group is destroyed, or by a future. No thread is in MPI when MPI ends."""
    done = job(
        tmp_path,
        """
        dist.init_process_group("torchmpi")
        errors = []

        def listen():
            try:
                dist.recv(torch.zeros(1), 0)
            except mpi.CommunicatorError as error:
                errors.append(str(error))

        rank = dist.get_rank()
        if rank == 1:
            (listening := threading.Thread(target=listen, daemon=True)).start()
            time.sleep(1)
        elif rank == 2:
            future = dist.irecv(torch.zeros(1), 0).get_future()
        dist.barrier()
        dist.destroy_process_group()
        if rank == 1:
            listening.join()
            assert "was cancelled: no message has arrived for it" in errors[0]
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_timeout_may_be_longer_than_the_deadline(tmp_path):
    done = job(
        tmp_path,
        """
        dist.init_process_group("torchmpi")
        slow = dist.new_group(timeout=dt.timedelta(seconds=100))
        time.sleep(8 * (dist.get_rank() == 0))
        dist.barrier(group=slow)
        time.sleep(8 * (dist.get_rank() == 0))
        dist.all_reduce(torch.ones(3), group=slow, async_op=True).get_future().wait()
        """,
        TORCHMPI_DEADLINE="4",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
