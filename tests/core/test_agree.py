"""A step that fails on one rank fails on all, with what the first of them says."""

import gc
import weakref

import pytest

from torchmpi_py.core import agree
from torchmpi_py.errors import RanksDisagree


def failed(descriptions):
    return RanksDisagree("; ".join(f"{rank}: {text}" for rank, text in descriptions.items()))


def allgather_with(*others):
    """The exchange of rank 0 with ranks that bring ``others``."""
    return lambda mine: [mine, *others]


WELL, FAILED = ("result", []), (None, ["no room"])


def test_results_in_rank_order():
    assert agree.gather_results(allgather_with(WELL), lambda: 3, (), str, failed) == [3, "result"]
    here = object()
    assert agree.run_on_all_ranks(lambda mine: [WELL, mine, WELL], lambda: here, (), str, failed) is here


@pytest.mark.parametrize("run", [agree.gather_results, agree.run_on_all_ranks])
def test_a_failure_elsewhere_is_one_here(run):
    with pytest.raises(RanksDisagree, match=r"^2: no room; 3: no room$") as caught:
        run(allgather_with(WELL, FAILED, FAILED), lambda: 3, (ValueError,), str, failed)
    assert caught.value.__cause__ is None


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
            agree.run_on_all_ranks(allgather_with(WELL), step, (ValueError,), agree.first_line, failed)
        except RanksDisagree as error:
            raised = str(error), type(error.__cause__)
        assert raised == ("0: bad", ValueError)
        assert memory[0]() is None
    finally:
        gc.enable()


def test_an_error_without_a_message_is_a_failure():
    def step():
        raise ValueError

    with pytest.raises(RanksDisagree, match=r"^0: $"):
        agree.run_on_all_ranks(allgather_with(WELL), step, (ValueError,), str, failed)


def test_other_errors_stay_here():
    def step():
        raise KeyError("mine")

    def never(mine):
        raise AssertionError

    with pytest.raises(KeyError, match="mine"):
        agree.run_on_all_ranks(never, step, (ValueError,), str, failed)


@pytest.mark.mpi
def test_on_ranks(mpi):
    """The last rank fails."""
    last, comm = mpi.size() - 1, mpi.communicator().direct.mpi

    def step():
        if mpi.rank() == last:
            raise OSError("full")
        return mpi.rank()

    with pytest.raises(RanksDisagree, match=f"^{last}: full$"):
        agree.run_on_all_ranks(comm.allgather, step, (OSError,), str, failed)
    assert agree.gather_results(comm.allgather, mpi.rank, (OSError,), str, failed) == list(range(mpi.size()))


def test_first_different():
    assert agree.first_different([1, 1, 2, 1, 3]) == 2
    assert agree.first_different([1, 1]) is None
    assert agree.first_different([]) is None
