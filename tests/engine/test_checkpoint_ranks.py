"""Checkpoints of several ranks: what is each rank's own, other numbers of ranks, and errors that all ranks raise."""

import logging
import random
import types

import numpy as np
import pytest
import torch
from runs import classes, listed, numbers_in, on_few, together, train
from torch.utils.data import TensorDataset

from torchmpi_py import errors, nn as mpinn, optim
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoints, DatasetIterator, SGDEngine, checkpoints

pytestmark = pytest.mark.mpi
BATCH = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))


def trained(mpi, folder=None, maxepoch=4, asynchronous=False, **options):
    """Return what training has made on this rank, buffers and random numbers of its own among them."""
    torch.manual_seed(mpi.rank())
    layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)]
    network = torch.nn.Sequential(*layers)
    iterator = DatasetIterator(classes(83), 4, seed=1, drop_last=True)
    options |= {"engine": AllReduceSGDEngine(asynchronous=asynchronous), "maxepoch": maxepoch, "checkpoint": folder}
    if train(network, iterator, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01), **options) is None:
        return None
    kept = [tensor.double().flatten() for tensor in network.state_dict().values()]
    return torch.cat([*kept, torch.rand(1).double()])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_goes_on_bit_for_bit(mpi, folder, asynchronous):
    """After two epochs, and in the middle of one."""
    expected = trained(mpi, asynchronous=asynchronous)
    trained(mpi, folder / "whole", maxepoch=2, asynchronous=asynchronous)
    assert torch.equal(trained(mpi, folder / "whole", asynchronous=asynchronous), expected)
    for killed_at in (2, 5, 9):
        assert trained(mpi, folder / "cut", killed_at=killed_at, every=2, asynchronous=asynchronous) is None
    assert torch.equal(trained(mpi, folder / "cut", every=2, asynchronous=asynchronous), expected)
    assert len(listed(folder / "cut")) == 3


def test_ranks_that_take_steps_of_their_own(mpi, folder):
    """Parameters and moments are each rank's between two averages, and in a checkpoint too."""

    def run(maxepoch, folder=None):
        torch.manual_seed(3)
        network = torch.nn.Linear(6, 3)
        optimizer = optim.LocalSGD(torch.optim.SGD(network.parameters(), 0.05, momentum=0.9), 500, slow_momentum=0.5)
        iterator = DatasetIterator(classes(83), 4, drop_last=True)
        options = {"optimizer": optimizer, "maxepoch": maxepoch, "checkpoint": folder}
        train(network, iterator, engine=SGDEngine(), **options)
        own = network.weight.detach().clone()
        optimizer.average()
        return torch.cat([own, network.weight.detach()])

    expected = run(3)
    run(1, folder)
    assert torch.equal(run(3, folder), expected)
    assert len(set(mpi.allgather_object(tuple(expected[:3].flatten().tolist())))) == mpi.size()


def drawn():
    return torch.rand(1).item(), np.random.rand(), random.random()


@pytest.mark.mpi(min_size=2)
def test_what_is_a_ranks_own_on_as_many_fewer_and_more_ranks(mpi, folder):
    """Ranks that were not there draw random numbers that follow from rank 0's and their own number."""
    world, few = mpi.rank(), (mpi.size() + 1) // 2

    def of_few():
        checkpoints = Checkpoints(folder)
        assert checkpoints.load() == (3, {"x": 1, "rank": world})
        assert drawn() == expected
        checkpoints.save(4, {"x": 2}, own={"rank": world})

    torch.manual_seed(10 + world)
    Checkpoints(folder).save(3, {"x": 1}, own={"rank": world})
    expected = drawn()
    torch.manual_seed(99)
    assert Checkpoints(folder).load() == (3, {"x": 1, "rank": world})
    assert drawn() == expected
    assert len({numbers[0] for numbers in mpi.allgather_object(expected)}) == mpi.size()
    on_few(mpi, of_few)
    assert Checkpoints(folder).load() == (4, {"x": 2, "rank": world if world < few else 0})
    numbers = drawn()
    Checkpoints(folder).load()
    assert drawn() == numbers
    for of_ranks in zip(*mpi.allgather_object(numbers), strict=True):
        assert len({of_ranks[0], *of_ranks[few:]}) == mpi.size() - few + 1


def used_by(mpi, folder, batch_size, **options):
    """The samples of each saved step that this rank's group has used."""
    dataset = TensorDataset(torch.arange(83.0).unsqueeze(1), torch.arange(83))
    steps = []
    state = train(
        torch.nn.Linear(1, 1),
        DatasetIterator(dataset, batch_size),
        criterion=lambda output, target: output.mean(),
        on_update=lambda state: steps.append(together(mpi, numbers_in(state.sample, state.num_samples))),
        **{"lr": 0.001, "maxepoch": 2, "checkpoint": folder, "every": 1} | options,
    )
    return steps if state else steps[:-1]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["iterator", "batches"])
def test_on_another_number_of_ranks_an_epoch_goes_on(mpi, folder, kind, caplog):
    """In the second epoch of two, on few ranks and on all again; what has no place in an epoch begins it again."""

    def run(**options):
        options |= {"maxepoch": 2, "checkpoint": folder, "every": 1}
        if kind == "iterator":
            return used_by(mpi, folder, 4, **options)
        train(torch.nn.Linear(6, 3), [BATCH] * 25, on_update=lambda state: used.append([state.t]), **options)
        return used

    used, first = [], 25 if kind == "batches" else -(-83 // (4 * mpi.size()))
    steps = run(killed_at=first + 2)[first:]
    used.clear()
    caplog.set_level(logging.WARNING, "torchmpi_py")
    if kind == "iterator":
        steps += on_few(mpi, lambda: run(killed_at=first + 3)) + run()
        assert sorted(number for step in steps for number in step) == list(range(83))
    else:
        assert len(on_few(mpi, run)) == 25
    said = [record for record in caplog.records if "the epoch begins again" in record.getMessage()]
    assert len(said) == (mpi.rank() == 0 and kind == "batches")


def test_each_rank_with_a_dataset_of_its_own(mpi, folder):
    used = []

    def run(seed=100, **options):
        mine = TensorDataset(torch.zeros(30, 1), torch.arange(30) + 100 * mpi.rank())
        iterator = DatasetIterator(mine, 4, seed=seed + mpi.rank(), rank=0, size=1)
        hooks = {"on_update": lambda state: used.extend(state.sample[1].tolist())}
        options |= {"criterion": lambda output, _: output.mean(), "checkpoint": folder, "every": 1}
        return train(torch.nn.Linear(1, 1), iterator, **hooks, **options)

    assert run(killed_at=4) is None
    del used[12:]  # the step that was not saved
    last = mpi.size() - 1
    message = "the saved order is {'samples': 30, 'seed': .*, but this iterator has .*; use the same data"
    with pytest.raises(errors.CheckpointError, match=message if last == 0 else rf"rank {last} on .*{message}"):
        run(seed=100 if mpi.rank() < last else 200)
    run()
    assert sorted(used) == [100 * mpi.rank() + index for index in range(30)]


def test_what_fails_on_one_rank_is_raised_on_all(mpi, folder):
    last = mpi.size() - 1

    def refuse(*state):
        raise RuntimeError("not today")

    def run(refuses):
        part = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        if refuses and mpi.rank() == last:
            setattr(part, refuses, refuse)
        train(torch.nn.Linear(6, 3), [BATCH], checkpoint=folder, stateful={"part": part})

    with pytest.raises(errors.CheckpointError, match=rf"training cannot begin: rank {last} on .*not today"):
        run("state_dict")
    run(None)
    with pytest.raises(errors.CheckpointError, match=rf"does not match this run:.* rank {last} on .*not today"):
        run("load_state_dict")
    with pytest.raises(errors.CheckpointError, match=r"TypeError: checkpoint\['own'\]\['f'\] is a function"):
        Checkpoints(folder).save(9, {}, own={"f": drawn} if mpi.rank() == last else {})
    mpi.barrier()


def test_another_optimizer_is_an_error_on_all_ranks(mpi, folder):
    """What reduces gradients, or divides the state among ranks, is not what the state belongs to."""

    def run(made, maxepoch, sharded=False):
        options = {"optimizer": made, "maxepoch": maxepoch, "checkpoint": folder}
        train(torch.nn.Linear(6, 3), [BATCH], engine=AllReduceSGDEngine(sharded=sharded), **options)

    run(torch.optim.AdamW, 1, sharded=True)
    with pytest.raises(errors.CheckpointError, match="saved with the optimizer AdamW, but this run has Adam"):
        run(torch.optim.Adam, 2)
    run(torch.optim.AdamW, 2)
    with pytest.raises(errors.CheckpointError, match="saved with the optimizer AdamW, but this run has Adam"):
        run(torch.optim.Adam, 3, sharded=True)


def test_no_space_is_raised_on_all_ranks(mpi, folder, full_disk):
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"x": torch.zeros(9)})
    with full_disk(), pytest.raises(errors.CheckpointError, match=r"rank 0 on .*/step-000002.pt: No space left on dev"):
        checkpoints.save(2, {"x": torch.zeros(9)})
    mpi.barrier()
    assert listed(folder) == ["step-000001.pt"]
    assert checkpoints.load()[0] == 1
    checkpoints.save(2, {"x": torch.zeros(9)})


@pytest.mark.parametrize("piece", [1 << 30, 1000])
def test_what_rank_0_alone_has_on_its_disk(mpi, tmp_path, monkeypatch, piece):
    """Each rank names a folder of its own, and only rank 0's is made; messages have any size."""
    monkeypatch.setattr(checkpoints, "_PIECE_BYTES", piece)
    folder, mine = tmp_path / "checkpoints", torch.arange(700.0 * (mpi.rank() + 1))
    Checkpoints(folder).save(1, {"x": torch.arange(3000.0)}, own={"mine": mine})
    assert folder.exists() == (mpi.rank() == 0)
    parts = Checkpoints(folder).load().parts
    assert torch.equal(parts["x"], torch.arange(3000.0))
    assert torch.equal(parts["mine"], mine)


def test_ranks_with_steps_of_their_own(mpi, folder):
    """They save together at the end of an epoch, each at its own step."""

    def run(maxepoch, **options):
        options = {"checkpoint": folder, "engine": SGDEngine(), "maxepoch": maxepoch} | options
        return train(torch.nn.Linear(6, 3), [BATCH] * steps, **options).t

    steps = 10 + 7 * mpi.rank()
    if mpi.size() > 1:
        with pytest.raises(ValueError, match=r"Checkpoint\(every=5\): all ranks save together, .*every='epoch'"):
            run(2, every=5)
    for maxepoch in (2, 3):  # the second run goes on from the first
        assert run(maxepoch) == maxepoch * steps
    network = torch.nn.Linear(6, 3)  # all ranks go on from rank 0's parameters if they take steps together
    train(network, [BATCH] * 5, checkpoint=folder, maxepoch=4)
    mpinn.check_with_allreduce(network)
