"""A step that fails on one rank fails on all, with what the first of them says."""

import gc
import weakref

import pytest

from torchmpi_py.core import agree
from torchmpi_py.errors import RanksDisagree


def failed(descriptions):
    return RanksDisagree("; ".join(f"{rank}: {text}" for rank, text in descriptions.items()))


def test_a_failure_here_is_the_cause_and_holds_no_memory_in_a_cycle():
    class Memory:
        pass

    def step():
        memory.append(weakref.ref(held := Memory()))
        raise ValueError(f"bad\n{held}")

    memory, raised = [], None
    gc.disable()
    try:
        try:
            agree.run_on_all_ranks(lambda mine: [mine, ("result", [])], step, (ValueError,), agree.first_line, failed)
        except RanksDisagree as error:
            raised = str(error), type(error.__cause__)
        assert raised == ("0: bad", ValueError)
        assert memory[0]() is None
    finally:
        gc.enable()


@pytest.mark.mpi
@pytest.mark.parametrize("run", [agree.gather_results, agree.run_on_all_ranks])
def test_the_last_rank_fails_and_all_say_so(mpi, run):
    last, allgather = mpi.size() - 1, mpi.communicator().direct.mpi.allgather

    def step(error):
        if mpi.rank() == last:
            raise error
        return mpi.rank()

    for error in (OSError("full"), OSError()):  # an error without a message is one too
        with pytest.raises(RanksDisagree, match=f"^{last}: {error}$") as caught:
            run(allgather, lambda error=error: step(error), (OSError,), str, failed)
        assert isinstance(caught.value.__cause__, OSError) == (mpi.rank() == last)
    everything = list(range(mpi.size()))
    assert run(allgather, mpi.rank, (OSError,), str, failed) in (everything, mpi.rank())
    assert agree.gather_results(allgather, mpi.rank, (OSError,), str, failed) == everything
    if mpi.rank() == last:  # errors of other types stay here
        with pytest.raises(KeyError, match="mine"):
            run(None, lambda: step(KeyError("mine")), (OSError,), str, failed)


def test_first_different():
    assert [agree.first_different(each) for each in ([1, 1, 2, 1, 3], [1, 1], [])] == [2, None, None]
