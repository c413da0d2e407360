"""The barrier through flags, as the ranks of flavour ``shared`` use it."""

import time

import pytest
import torch
from support import jobs

from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.memory import symmetric


@pytest.mark.mpi
@pytest.mark.usefixtures("one_node")
def test_no_rank_passes_before_all_have_come(mpi):
    """Each counts in a word of its own, and finds no other behind, or more than one ahead."""
    word = mpi.symmetric_empty(1, dtype=torch.int64).zero_()
    node = mpi.communicator(0).direct.keep(NodeGroup, NodeGroup)
    peers = node.views(word, [symmetric.find(word)[1]] * node.size)
    for turn in range(1, 2000):
        word.fill_(turn)
        if turn % 97 == 0 and turn % node.size == node.rank:
            time.sleep(0.002)  # this rank is late: the others sleep between their looks
        node.barrier()
        assert all(turn <= int(peer) <= turn + 1 for peer in peers), turn


@pytest.mark.mpi
@pytest.mark.usefixtures("one_node")
def test_a_long_wait_leaves_the_core_to_others(mpi):
    x = mpi.allreduce(torch.ones(10), flavour="shared")
    if mpi.rank() == 0:
        time.sleep(1)
    before = time.process_time()
    mpi.allreduce(x, flavour="shared")
    assert time.process_time() - before < 0.5


@jobs.needs_mpi
def test_messages_go_on_while_a_rank_waits(tmp_path):
    """Rank 1 comes to the allreduce after a message that rank 0 has only begun to send, in many pieces."""
    program = jobs.write(
        tmp_path,
        """
        import torch, torchmpi_py as mpi
        from mpi4py import MPI
        mpi.start()
        x, big, comm = torch.ones(10), torch.arange(1 << 20, dtype=torch.float32), MPI.COMM_WORLD
        mpi.allreduce(x, flavour="shared")  # the first one goes by MPI as well
        request = comm.Isend(big.numpy(), 1) if mpi.rank() == 0 else MPI.REQUEST_NULL
        if mpi.rank() == 1:
            received = torch.empty_like(big)
            comm.Recv(received.numpy(), 0)
            assert torch.equal(received, big)
        mpi.allreduce(x, flavour="shared")
        request.Wait()
        mpi.stop()
        """,
    )
    in_pieces = {"OMPI_MCA_smsc": "^cma"}  # else Open MPI lets rank 1 read the memory of rank 0, which may do nothing
    ended = jobs.torchmpirun("-n", 2, "--timeout", 60, program, env=in_pieces)
    assert ended.returncode == 0, ended.stderr
