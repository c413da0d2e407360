"""Evaluation on a rank of its own, beside training."""

import copy

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine
from torchmpi_py.errors import EndRequested
from torchmpi_py.nn import ColumnParallelLinear

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


def task():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).double()
    return TensorDataset(x, (x.sum(1) > 0).long()), network


def parameters(network):
    return torch.cat([x.detach().double().reshape(-1) for x in [*network.parameters(), *network.buffers()]])


def trained(engine, network, iterator, **options):
    return engine.train(
        network=network, criterion=torch.nn.CrossEntropyLoss(), iterator=iterator, lr=0.1, maxepoch=4, **options
    )


@pytest.mark.parametrize("kind", ["DatasetIterator", "DataLoader"])
def test_the_last_rank_evaluates_while_the_others_train(mpi, kind):
    size = mpi.size()
    dataset, network = task()
    calls = []

    def evaluate(module, epoch):
        assert (mpi.rank(), mpi.size()) == (0, 1)
        assert not module.training
        assert not torch.is_grad_enabled()
        calls.append(epoch)
        engine = AllReduceSGDEngine()
        end = engine.test(network=module, criterion=torch.nn.CrossEntropyLoss(), iterator=DatasetIterator(dataset, 48))
        return end.loss.item(), parameters(module)

    if kind == "DatasetIterator":
        iterator = DatasetIterator(dataset, 4, drop_last=True)
    else:
        iterator = DataLoader(dataset, 4, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    engine, seen = AllReduceSGDEngine(), {}

    def keep(state):
        assert mpi.size() == max(1, size - 1)
        seen[state.epoch] = parameters(network)

    engine.hooks.on_end_epoch = keep
    state = trained(engine, network, iterator, evaluator=evaluate)
    assert engine.hooks.on_end_epoch is keep
    assert (mpi.size(), state.epoch) == (size, 4)
    assert 4 in state.evaluations
    assert list(state.evaluations) == sorted(state.evaluations)
    assert calls == (list(state.evaluations) if mpi.rank() == size - 1 else [])
    assert (seen == {}) == (size > 1 and mpi.rank() == size - 1)
    if mpi.rank() == 0:
        for epoch in set(state.evaluations) - {4}:
            assert torch.equal(state.evaluations[epoch][1], seen[epoch])
    assert torch.equal(state.evaluations[4][1], parameters(network))  # the evaluator's too
    assert all(loss > 0 for loss, _ in state.evaluations.values())


def test_training_is_that_of_one_rank_less(mpi):
    """As a group of all ranks but the last trains."""
    dataset, network = task()
    other = copy.deepcopy(network)
    trained(AllReduceSGDEngine(), network, DatasetIterator(dataset, 4), evaluator=lambda module, epoch: epoch)
    level = mpi.push_communicator("evaluator" if mpi.rank() == mpi.size() - 1 > 0 else "train")
    with mpi.at(level):
        if mpi.communicator(level).key == "train":
            trained(AllReduceSGDEngine(), other, DatasetIterator(dataset, 4))
            assert torch.equal(parameters(network), parameters(other))


def test_without_averages_every_rank_evaluates(mpi):
    dataset, network = task()
    state = trained(
        SGDEngine(), network, DatasetIterator(dataset, 4, rank=0, size=1), evaluator=lambda _, epoch: -epoch
    )
    assert state.evaluations == {epoch: -epoch for epoch in range(1, 5)}


def test_a_slow_evaluator_does_not_hold_training_up(mpi):
    """The evaluation of the first epoch ends when training has ended."""
    if mpi.size() == 1:
        pytest.skip("needs another rank")
    dataset, network = task()
    engine, whole, last = AllReduceSGDEngine(), mpi.communicator(), mpi.size() - 1
    sent, received = [], []

    def say_that_training_is_over(state):
        if mpi.rank() == 0:
            sent.append(mpi.send_async(torch.tensor([state.epoch]), last, comm=whole))

    def evaluate(_, epoch):
        if not received:
            received.append(mpi.recv(torch.tensor([0]), 0, comm=whole).item())
        return epoch, received[0]

    engine.hooks.on_end = say_that_training_is_over
    iterator = DatasetIterator(dataset, 4)
    state = trained(engine, network, iterator, evaluator=evaluate)
    first = min(state.evaluations)  # the last if the evaluator was late
    assert state.evaluations == {epoch: (epoch, 4) for epoch in {first, 4}}
    if mpi.rank() == 0:
        sent[0].wait()


def test_an_iterator_that_is_divided_for_all_ranks_is_refused(mpi):
    if mpi.size() == 1:
        pytest.skip("needs another rank")
    dataset, network = task()
    sampler = DistributedSampler(dataset, mpi.size(), mpi.rank())
    for iterator in (
        DatasetIterator(dataset, 4, rank=mpi.rank(), size=mpi.size()),
        DataLoader(dataset, 4, sampler=sampler),
    ):
        with pytest.raises(
            ValueError, match=f"divided into {mpi.size()} parts, and with evaluator= {mpi.size() - 1} of"
        ):
            trained(AllReduceSGDEngine(), network, iterator, evaluator=lambda *_: None)


def test_split_layers_are_refused(mpi):
    if mpi.size() == 1:
        pytest.skip("needs another rank")
    dataset, _ = task()
    network = torch.nn.Sequential(ColumnParallelLinear(6, 2)).double()
    with pytest.raises(ValueError, match="evaluator= has a rank of its own, and a parameter is split"):
        trained(AllReduceSGDEngine(), network, DatasetIterator(dataset, 4), evaluator=lambda *_: None)


def test_layers_that_are_split_over_one_rank(mpi):
    dataset, _ = task()
    network = torch.nn.Sequential(ColumnParallelLinear(6, 2, comm=mpi.split(mpi.rank()))).double()
    state = trained(AllReduceSGDEngine(), network, DatasetIterator(dataset, 4), evaluator=lambda network, epoch: epoch)
    assert state.evaluations


def test_parameters_of_one_element_with_a_stride(mpi):
    dataset, _ = task()
    network = torch.nn.Linear(6, 1).double()
    network.bias.data = torch.zeros(5, dtype=torch.float64)[::5]
    options = {"criterion": lambda output, target: ((output[:, 0] - target) ** 2).mean(), "lr": 0.1, "maxepoch": 2}
    iterator, evaluate = DatasetIterator(dataset, 4), lambda network, epoch: float(network.bias)
    state = AllReduceSGDEngine().train(network=network, iterator=iterator, evaluator=evaluate, **options)
    assert state.evaluations[2] != 0


def test_an_error_in_training_is_an_error_on_every_rank(mpi):
    dataset, network = task()
    engine = AllReduceSGDEngine()

    def fail(state):
        if state.epoch == 2:
            raise KeyError("in a hook")

    engine.hooks.on_end_epoch = fail
    is_evaluator = mpi.rank() == mpi.size() - 1 > 0
    with pytest.raises(mpi.TorchMPIError if is_evaluator else KeyError, match=r"on the other ranks|in a hook"):
        trained(engine, network, DatasetIterator(dataset, 4), evaluator=lambda *_: None)
    assert mpi.allreduce(1) == mpi.size()


@pytest.mark.parametrize("raised", [SystemExit(143), SystemExit(0), SystemExit(None), EndRequested()], ids=repr)
def test_a_request_to_end_ends_every_rank(mpi, raised):
    """torchmpirun takes a SystemExit with a code for a failure, and EndRequested for none."""
    dataset, network = task()
    engine = AllReduceSGDEngine()

    def end(_):
        raise raised

    engine.hooks.on_end_epoch = end
    with pytest.raises(SystemExit) as ended:
        trained(engine, network, DatasetIterator(dataset, 4), evaluator=lambda *_: None)
    assert (type(ended.value), ended.value.code or 0) == (type(raised), raised.code or 0)
    assert mpi.allreduce(1) == mpi.size()
