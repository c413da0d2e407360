import collections
import itertools
import time

import pytest
import torch

from torchmpi_py.collectives import timing
from torchmpi_py.core.mpi_api import MPI


@pytest.mark.parametrize("num_functions", range(1, 8))
def test_every_function_follows_every_other_one_equally_often(num_functions):
    pairs = collections.Counter()
    for turn in range(2 * num_functions):
        order = timing.order(num_functions, turn)
        assert sorted(order) == list(range(num_functions))
        pairs.update(itertools.pairwise(order))
    assert len(pairs) == num_functions * (num_functions - 1)
    assert set(pairs.values()) <= {2}


@pytest.mark.mpi
def test_all_ranks_get_the_times_of_the_slowest(mpi):
    calls = []
    functions = {"quick": lambda: calls.append("quick"), "slow": lambda: time.sleep(0.02 * (mpi.rank() == 0))}
    times = timing.interleaved(MPI.COMM_WORLD, functions, seconds=0, min_turns=3, max_turns=9)
    assert list(times) == ["quick", "slow"]
    assert [len(of_function) for of_function in times.values()] == [3, 3]
    assert len(calls) == 4  # one is untimed
    assert min(times["slow"]) >= 0.02
    assert MPI.COMM_WORLD.allgather(times) == [times] * mpi.size()


def test_a_call_on_a_gpu_ends_when_the_gpu_has_carried_it_out(monkeypatch):
    device, said = torch.device("cuda", 3), []
    monkeypatch.setattr(torch.cuda, "synchronize", said.append)
    timing.until_done(lambda: said.append("call"), device)()
    assert said == ["call", device]
    call = list
    assert timing.until_done(call, torch.device("cpu")) is call
