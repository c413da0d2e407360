"""Checkpoints of several ranks: what is each rank's own, other numbers of ranks, and errors that all ranks raise."""

import contextlib
import random

import pytest
import torch
from checkpoint_folder import listed
from torch.utils.data import TensorDataset

from torchmpi_py import errors, optim
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoints, DatasetIterator, SGDEngine, checkpoint, resume

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


class Killed(Exception):
    """Stands for a kill, in between steps, on all ranks."""


def samples():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(83, 6, generator=generator), torch.arange(83) % 3)


def trained(mpi, folder=None, maxepoch=4, killed_at=None, asynchronous=False, **options):
    """What training has made on this rank, buffers and random numbers of its own among them."""
    torch.manual_seed(mpi.rank())
    resume.completed.clear()  # as if in a process of its own
    layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)]
    network = torch.nn.Sequential(*layers)

    def on_update(state):
        if state.t == killed_at:
            raise Killed

    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    engine.hooks.on_update = on_update
    options |= {} if folder is None else {"checkpoint": folder}
    try:
        engine.train(
            network=network,
            criterion=torch.nn.CrossEntropyLoss(),
            iterator=DatasetIterator(samples(), 4, seed=1, drop_last=True),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            maxepoch=maxepoch,
            **options,
        )
    except Killed:
        return None
    kept = [tensor.double().flatten() for tensor in network.state_dict().values()]
    return torch.cat([*kept, torch.rand(1).double()])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_and_two_epochs_are_four_bit_for_bit(mpi, folder, asynchronous):
    expected = trained(mpi, asynchronous=asynchronous)
    trained(mpi, folder, maxepoch=2, asynchronous=asynchronous)
    assert torch.equal(trained(mpi, folder, asynchronous=asynchronous), expected)


def test_it_goes_on_in_the_middle_of_an_epoch(mpi, folder):
    expected = trained(mpi)
    for killed_at in (2, 5, 9):
        assert trained(mpi, folder, killed_at=killed_at, every=2) is None
    assert torch.equal(trained(mpi, folder, every=2), expected)
    assert len(listed(folder)) == 3


def test_ranks_that_take_steps_of_their_own(mpi, folder):
    """Parameters and moments are each rank's between two averages, and in a checkpoint too."""

    def train(maxepoch, folder=None):
        torch.manual_seed(3)
        resume.completed.clear()
        network = torch.nn.Linear(6, 3)
        optimizer = optim.LocalSGD(torch.optim.SGD(network.parameters(), 0.05, momentum=0.9), 500, slow_momentum=0.5)
        SGDEngine().train(
            network=network,
            criterion=torch.nn.CrossEntropyLoss(),
            iterator=DatasetIterator(samples(), 4, drop_last=True),
            optimizer=optimizer,
            maxepoch=maxepoch,
            checkpoint=folder,
        )
        own = network.weight.detach().clone()
        optimizer.average()
        return torch.cat([own, network.weight.detach()])

    expected = train(3)
    train(1, folder)
    assert torch.equal(train(3, folder), expected)
    assert len({tuple(row.flatten().tolist()) for row in mpi.allgather(expected[:3].unsqueeze(0))}) == mpi.size()


def test_each_rank_gets_what_is_its_own(mpi, folder):
    checkpoints = Checkpoints(folder)
    torch.manual_seed(10 + mpi.rank())
    checkpoints.save(1, {"x": 7}, own={"rank": mpi.rank()})
    drawn = torch.rand(3)
    torch.manual_seed(99)
    step, parts = checkpoints.load()
    assert (step, parts) == (1, {"x": 7, "rank": mpi.rank()})
    assert torch.equal(torch.rand(3), drawn)
    others = mpi.allgather(drawn.unsqueeze(0))
    assert len({tuple(row.tolist()) for row in others}) == mpi.size()


def test_fewer_and_more_ranks(mpi, folder):
    if mpi.size() < 2:
        pytest.skip("needs 2 ranks")
    few = (mpi.size() + 1) // 2
    level = mpi.push_communicator("few" if mpi.rank() < few else "rest")
    Checkpoints(folder).save(3, {"x": 1}, own={"rank": mpi.rank()})
    world = mpi.rank()
    with mpi.at(level):
        if world < few:
            checkpoints = Checkpoints(folder)
            assert checkpoints.load() == (3, {"x": 1, "rank": world})
            checkpoints.save(4, {"x": 2}, own={"rank": world})
    mpi.barrier()
    step, parts = Checkpoints(folder).load()
    assert (step, parts["x"], parts["rank"]) == (4, 2, world if world < few else 0)
    drawn = mpi.allgather(torch.rand(1, 3))
    assert len({tuple(row.tolist()) for row in drawn}) >= mpi.size() - few + 1


def used_by(mpi, folder, batch_size, killed_at=None):
    """The samples of each step that this rank's group has used."""
    dataset = TensorDataset(torch.arange(83.0).unsqueeze(1), torch.arange(83))
    used = []

    def on_update(state):
        target = state.sample[1][: state.num_samples]
        used.append(mpi.allgather(target).tolist())
        if state.t == killed_at:
            raise Killed

    engine = AllReduceSGDEngine()
    engine.hooks.on_update = on_update
    try:
        engine.train(
            network=torch.nn.Linear(1, 1),
            criterion=lambda output, target: output.mean(),
            iterator=DatasetIterator(dataset, batch_size),
            lr=0.001,
            maxepoch=2,
            checkpoint=folder,
            every=1,
        )
    except Killed:
        used.pop()  # it was not saved
    return used


def test_the_rest_of_an_epoch_on_fewer_ranks_uses_each_sample_once(mpi, folder):
    few = (mpi.size() + 1) // 2
    level = mpi.push_communicator(mpi.rank() < few)
    used = used_by(mpi, folder, 4, killed_at=3)
    is_one_of_few, rest = mpi.rank() < few, []
    with mpi.at(level):
        if is_one_of_few:
            rest = used_by(mpi, folder, 5)
    rest = mpi.broadcast_object(rest)
    everything = [number for step in used + rest for number in step]
    assert sorted(everything[:83]) == list(range(83))
    assert sorted(everything[83:]) == list(range(83))


def test_the_middle_of_an_epoch_of_batches_needs_the_same_number_of_ranks(mpi, folder):
    if mpi.size() < 2:
        pytest.skip("needs 2 ranks")
    level = mpi.push_communicator(mpi.rank() < 1)
    is_first = mpi.rank() == 0
    sample = (torch.zeros(2, 3), torch.zeros(2, 1))

    def on_update(state):
        if state.t == 2:
            raise Killed

    def train():
        engine = AllReduceSGDEngine()
        engine.hooks.on_update = on_update
        network, criterion = torch.nn.Linear(3, 1), torch.nn.MSELoss()
        engine.train(network=network, criterion=criterion, iterator=[sample] * 4, lr=0.1, checkpoint=folder, every=1)

    with pytest.raises(Killed):
        train()
    with mpi.at(level):
        if is_first:
            with pytest.raises(ValueError, match=r"of \d ranks after 1 batches of an epoch; on 1 ranks"):
                train()
    mpi.barrier()


def test_each_rank_with_a_dataset_of_its_own(mpi, folder):
    used = []

    def run(killed_at=None, seed=100):
        def on_update(state):
            used.extend(state.sample[1].tolist())
            if state.t == killed_at:
                raise Killed

        engine = AllReduceSGDEngine()
        engine.hooks.on_update = on_update
        mine = TensorDataset(torch.zeros(30, 1), torch.arange(30) + 100 * mpi.rank())
        network = torch.nn.Linear(1, 1)
        iterator = DatasetIterator(mine, 4, seed=seed + mpi.rank(), rank=0, size=1)
        options = {"checkpoint": folder, "every": 1}
        engine.train(network=network, criterion=lambda o, t: o.mean(), iterator=iterator, lr=0.1, **options)

    with pytest.raises(Killed):
        run(killed_at=4)
    del used[12:]  # the step that was not saved
    last = mpi.size() - 1
    message = "in the middle of an epoch over 30 samples, seed .*; this is another order"
    with pytest.raises(ValueError, match=message if last == 0 else rf"rank {last} on .*{message}"):
        run(seed=100 if mpi.rank() < last else 200)
    run()
    assert sorted(used) == [100 * mpi.rank() + index for index in range(30)]


class Refusing:
    """What has a state, and does not give or take it."""

    def __init__(self, refuses):
        self.refuses = refuses

    def state_dict(self):
        return self.attempt("state_dict")

    def load_state_dict(self, state):
        self.attempt("load_state_dict")

    def attempt(self, name):
        if self.refuses == name:
            raise RuntimeError(f"no {name} today")
        return {}


def test_what_fails_on_one_rank_is_raised_on_all(mpi, folder):
    last = mpi.size() - 1

    def run(refuses):
        resume.completed.clear()
        part = Refusing(refuses if mpi.rank() == last else None)
        sample = (torch.zeros(2, 3), torch.zeros(2, 1))
        options = {"lr": 0.1, "checkpoint": folder, "stateful": {"part": part}}
        criterion = torch.nn.MSELoss()
        AllReduceSGDEngine().train(network=torch.nn.Linear(3, 1), criterion=criterion, iterator=[sample], **options)

    with pytest.raises(errors.CheckpointError, match=rf"training cannot begin: rank {last} on .*no state_dict today"):
        run("state_dict")
    run(None)
    with pytest.raises(errors.CheckpointError, match=rf"does not fit.* rank {last} on .*no load_state_dict today"):
        run("load_state_dict")
    with pytest.raises(TypeError, match=r"own\['f'\] is a builtins.function"):
        Checkpoints(folder).save(9, {}, own={"f": test_each_rank_gets_what_is_its_own} if mpi.rank() == last else {})
    mpi.barrier()


def test_another_optimizer_is_an_error_on_all_ranks(mpi, folder):
    """What reduces gradients, or divides the state among ranks, is not what the state belongs to."""

    def run(made, maxepoch, sharded=False):
        resume.completed.clear()
        AllReduceSGDEngine(sharded=sharded).train(
            network=torch.nn.Linear(6, 3),
            criterion=torch.nn.CrossEntropyLoss(),
            iterator=DatasetIterator(samples(), 4),
            optimizer=made,
            maxepoch=maxepoch,
            checkpoint=folder,
        )

    run(torch.optim.AdamW, 1, sharded=True)
    with pytest.raises(errors.CheckpointError, match="trained by the optimizer AdamW, and this one is Adam"):
        run(torch.optim.Adam, 2)
    run(torch.optim.AdamW, 2)
    with pytest.raises(errors.CheckpointError, match="trained by the optimizer AdamW, and this one is Adam"):
        run(torch.optim.Adam, 3, sharded=True)


@pytest.mark.parametrize("which", ["first", "last"])
def test_no_space_on_one_rank_is_raised_on_all(mpi, folder, full_disk, which):
    victim = 0 if which == "first" else mpi.size() - 1
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, {"x": torch.zeros(9)})
    message = rf"step 2 cannot be saved: rank {victim} on .*/rank-{victim}.pt: No space left on device"
    with (
        full_disk() if mpi.rank() == victim else contextlib.nullcontext(),
        pytest.raises(errors.CheckpointError, match=message),
    ):
        checkpoints.save(2, {"x": torch.zeros(9)})
    mpi.barrier()
    assert listed(folder) == ["step-000001"]
    assert checkpoints.load()[0] == 1
    checkpoints.save(2, {"x": torch.zeros(9)})


def test_a_folder_that_one_rank_does_not_see(mpi, folder, monkeypatch):
    if mpi.size() < 2:
        pytest.skip("needs 2 ranks")
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_SECONDS", 0.3)
    last = mpi.size() - 1
    mine = folder / "elsewhere" if mpi.rank() == last else folder
    with pytest.raises(errors.CheckpointError, match=rf"not the same for all ranks: rank {last} on .*/elsewhere lacks"):
        Checkpoints(mine).load()


def test_what_one_rank_finds_damaged_all_pass_over(mpi, folder, caplog, monkeypatch):
    monkeypatch.setattr(checkpoint, "SEEN_WITHIN_SECONDS", 0.0)
    for step in (1, 2):
        Checkpoints(folder).save(step, {"x": step}, own={"y": random.random()})
    last = mpi.size() - 1
    if mpi.rank() == 0:
        path = folder / "step-000002" / f"rank-{last}.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    mpi.barrier()
    assert Checkpoints(folder).load().step == 1
    assert mpi.rank() != 0 or f"found by rank {last}: rank-{last}.pt does not hold what was written" in caplog.text


def test_ranks_with_steps_of_their_own(mpi, folder):
    """Each has so many more that one which waits for the others after a step would wait in another one's save."""
    steps = 10 + 7 * mpi.rank()
    for maxepoch in (2, 3):  # the second run goes on from the first, each rank at its own step
        resume.completed.clear()
        assert trained_on_batches(steps, maxepoch=maxepoch, checkpoint=folder).t == maxepoch * steps


def trained_on_batches(number, **options):
    batches = [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))] * number
    network, criterion = torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss()
    return SGDEngine().train(network=network, criterion=criterion, iterator=batches, lr=0.1, **options)


def test_every_so_many_steps_needs_epochs_of_the_same_length(mpi, folder):
    if mpi.size() < 2:
        pytest.skip("needs 2 ranks")
    with pytest.raises(ValueError, match=r"every=5: .* \[4, 5.*\] batches in an epoch.*every='epoch'"):
        trained_on_batches(4 + mpi.rank(), checkpoint=folder, every=5)
    steps = 4 + mpi.rank() % 2
    assert trained_on_batches(steps, checkpoint=folder, every=2).t == steps  # two saves each
