"""Evaluation on a rank of its own, beside training."""

import copy

import pytest
import torch
from runs import classes, loss_of, train
from support import networks
from torch.utils.data import DataLoader, DistributedSampler

from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, SGDEngine
from torchmpi_py.errors import EndRequested

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


def network():
    return networks.perceptron(6, 5, 3, norm=torch.nn.BatchNorm1d, dtype=torch.float64)


def data():
    return classes(48, dtype=torch.float64)


def content(module):
    return torch.cat([x.detach().double().reshape(-1) for x in [*module.parameters(), *module.buffers()]])


def trained(net, iterator=None, evaluator=lambda module, epoch: epoch, **options):
    return train(net, iterator or DatasetIterator(data(), 4), maxepoch=4, evaluator=evaluator, **options)


@pytest.mark.parametrize("kind", ["DatasetIterator", "DataLoader"])
def test_the_last_rank_evaluates_while_the_others_train(mpi, kind):
    size, net, engine = mpi.size(), network(), AllReduceSGDEngine()
    calls, seen = [], {}

    def evaluate(module, epoch):
        assert (mpi.rank(), mpi.size()) == (0, 1)
        assert not module.training
        assert not torch.is_grad_enabled()
        calls.append(epoch)
        iterator = DatasetIterator(data(), 48)
        end = AllReduceSGDEngine().test(network=module, criterion=loss_of, iterator=iterator)
        return end.loss.item(), content(module)

    def keep(state):
        assert mpi.size() == max(1, size - 1)
        seen[state.epoch] = content(net)

    generator = torch.Generator().manual_seed(0)
    iterators = {
        "DatasetIterator": DatasetIterator(data(), 4, drop_last=True),
        "DataLoader": DataLoader(data(), 4, shuffle=True, drop_last=True, generator=generator),
    }
    state = trained(net, iterators[kind], evaluate, engine=engine, on_end_epoch=keep)
    assert engine.hooks.on_end_epoch is keep
    assert (mpi.size(), state.epoch) == (size, 4)
    assert 4 in state.evaluations
    assert list(state.evaluations) == sorted(state.evaluations)
    assert calls == (list(state.evaluations) if mpi.rank() == size - 1 else [])
    assert (seen == {}) == (size > 1 and mpi.rank() == size - 1)
    if mpi.rank() == 0:
        for epoch in set(state.evaluations) - {4}:
            assert torch.equal(state.evaluations[epoch][1], seen[epoch])
    assert torch.equal(state.evaluations[4][1], content(net))  # the evaluator's too
    assert all(loss > 0 for loss, _ in state.evaluations.values())


def test_training_is_that_of_one_rank_less(mpi):
    """As a group of all ranks but the last trains."""
    net = network()
    other = copy.deepcopy(net)
    trained(net)
    level = mpi.push_communicator("evaluator" if mpi.rank() == mpi.size() - 1 > 0 else "train")
    with mpi.at(level):
        if mpi.communicator(level).key == "train":
            trained(other, evaluator=None)
            assert torch.equal(content(net), content(other))


def test_without_averages_every_rank_evaluates(mpi):
    iterator = DatasetIterator(data(), 4, rank=0, size=1)
    assert trained(network(), iterator, engine=SGDEngine()).evaluations == {epoch: epoch for epoch in range(1, 5)}


@pytest.mark.mpi(min_size=2)
def test_a_slow_evaluator_does_not_hold_training_up(mpi):
    """The evaluation of the first epoch ends when training has ended."""
    whole, last, sent, received = mpi.communicator(), mpi.size() - 1, [], []

    def say_that_training_is_over(state):
        if mpi.rank() == 0:
            sent.append(mpi.send_async(torch.tensor([state.epoch]), last, comm=whole))

    def evaluate(_, epoch):
        if not received:
            received.append(mpi.recv(torch.tensor([0]), 0, comm=whole).item())
        return epoch, received[0]

    state = trained(network(), evaluator=evaluate, on_end=say_that_training_is_over)
    first = min(state.evaluations)  # the last if the evaluator was late
    assert state.evaluations == {epoch: (epoch, 4) for epoch in {first, 4}}
    if mpi.rank() == 0:
        sent[0].wait()


@pytest.mark.mpi(min_size=2)
def test_what_is_divided_among_all_ranks_is_refused(mpi):
    sampler = DistributedSampler(data(), mpi.size(), mpi.rank())
    for iterator in (
        DatasetIterator(data(), 4, rank=mpi.rank(), size=mpi.size()),
        DataLoader(data(), 4, sampler=sampler),
    ):
        with pytest.raises(ValueError, match=f"divided into {mpi.size()} parts"):
            trained(network(), iterator)


def test_parameters_of_one_element_with_a_stride(mpi):
    net = torch.nn.Linear(6, 1).double()
    net.bias.data = torch.zeros(5, dtype=torch.float64)[::5]
    options = {"criterion": lambda output, target: ((output[:, 0] - target) ** 2).mean()}
    assert trained(net, evaluator=lambda module, epoch: float(module.bias), **options).evaluations[4] != 0


def test_an_error_in_training_is_an_error_on_every_rank(mpi):
    def fail(state):
        if state.epoch == 2:
            raise KeyError("in a hook")

    is_evaluator = mpi.rank() == mpi.size() - 1 > 0
    with pytest.raises(mpi.TorchMPIError if is_evaluator else KeyError, match=r"on the other ranks|in a hook"):
        trained(network(), on_end_epoch=fail)
    assert mpi.allreduce(1) == mpi.size()


@pytest.mark.parametrize("raised", [SystemExit(143), SystemExit(0), SystemExit(None), EndRequested()], ids=repr)
def test_a_request_to_end_ends_every_rank(mpi, raised):
    """torchmpirun takes a SystemExit with a code for a failure, and EndRequested for none."""

    def end(_):
        raise raised

    with pytest.raises(SystemExit) as ended:
        trained(network(), on_end_epoch=end)
    assert (type(ended.value), ended.value.code or 0) == (type(raised), raised.code or 0)
    assert mpi.allreduce(1) == mpi.size()
