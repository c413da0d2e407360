"""Data-parallel training equals training on one rank. Every rank computes both and compares."""

import functools

import pytest
import torch
from runs import classes, loss_of, train
from support import networks

from torchmpi_py import errors, optim
from torchmpi_py.engine import AllReduceSGDEngine, Average, DatasetIterator, SGDEngine

pytestmark = pytest.mark.mpi
both_ways = pytest.mark.parametrize("asynchronous", [False, True])


def network(seed=0):
    return networks.perceptron(6, 16, 3, seed=seed)


def trained(engine, total, *, seed=0, batch_size=4, **options):
    """Return the network after three epochs; ``rank`` and ``size`` are the iterator's."""
    place = {name: options.pop(name) for name in ("rank", "size") if name in options}
    net, iterator = network(seed), DatasetIterator(classes(total), batch_size, seed=2, **place)
    assert train(net, iterator, engine=engine, maxepoch=3, **options).t == 3 * len(iterator)
    return net


def trained_alone(total, global_batch, **options):
    return trained(SGDEngine(), total, batch_size=global_batch, rank=0, size=1, **options)


def assert_close(one, other):
    torch.testing.assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=1e-5, atol=1e-6)


@both_ways
@pytest.mark.parametrize("total", [1, 7, 40, 61])
def test_any_number_of_ranks_trains_as_one(mpi, total, asynchronous):
    # Sizes at which ranks have unequal shares of the last batch, or none. Ranks start from different parameters.
    net = trained(AllReduceSGDEngine(asynchronous=asynchronous), total, seed=mpi.rank())
    mpi.nn.check_with_allreduce(net)
    assert_close(net, trained_alone(total, 4 * mpi.size()))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("option", ["debug", "asynchronous", "sharded"])
def test_ranks_without_samples_in_the_last_step_train_as_one(mpi, option):
    """They compute nothing then; momentum goes on."""

    def run(engine, batch_size, **options):
        place = {name: options.pop(name) for name in ("rank", "size") if name in options}
        iterator = DatasetIterator(classes(8 * mpi.size() + mpi.size() - 1, dtype=torch.float64), batch_size, **place)
        net = networks.perceptron(6, 16, 3, dtype=torch.float64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        assert train(net, iterator, engine=engine, optimizer=optimizer, maxepoch=2, **options).t == 6
        return net

    moments = {"on_sample": [], "on_backward": [], "on_update": []}
    counts = {name: lambda state, name=name: moments[name].append(state.num_samples) for name in moments}
    net = run(AllReduceSGDEngine(**{option: True}), 4, **counts)
    mpi.nn.check_with_allreduce(net)
    alone = run(SGDEngine(), 4 * mpi.size(), rank=0, size=1)
    torch.testing.assert_close(dict(net.named_parameters()), dict(alone.named_parameters()), rtol=1e-9, atol=1e-12)
    last = int(mpi.rank() < mpi.size() - 1)
    assert moments["on_backward"] == moments["on_update"] == [4, 4, last] * 2
    assert moments["on_sample"] == ([4, 4, 1] if last else [4, 4]) * 2


@pytest.mark.mpi(min_size=2)
def test_a_loop_of_ones_own_takes_part_in_a_step_without_samples(mpi):
    def run(reduce, batch_size, **place):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        optimizer = optim.DistributedOptimizer(optimizer, net) if reduce else optimizer
        iterator = DatasetIterator(classes(8 * mpi.size() + 1), batch_size, **place)
        for batch in iterator:
            optimizer.zero_grad()
            if batch is not None:
                (loss_of(net(batch[0]), batch[1]) * iterator.weight).backward()
            optimizer.step()
        return net

    net = run(True, 4)
    mpi.nn.check_with_allreduce(net)
    assert_close(net, run(False, 4 * mpi.size(), rank=0, size=1))


def test_it_starts_from_what_rank_0_loads_in_on_start(mpi):
    def load(state, loading_rank=0):
        if mpi.rank() == loading_rank:
            state.network.load_state_dict(saved.state_dict())

    saved = network(9)
    net = trained(AllReduceSGDEngine(), 40, on_start=load)
    mpi.nn.check_with_allreduce(net)
    assert_close(net, trained_alone(40, 4 * mpi.size(), on_start=functools.partial(load, loading_rank=mpi.rank())))

    net = torch.nn.Linear(6, 3)
    net.register_buffer("scale", torch.zeros(2))
    iterator = DatasetIterator(classes(8), 4)
    train(net, iterator, on_start=lambda state: state.network.scale.fill_(6.0 if mpi.rank() == 0 else 0.0))
    assert net.scale.tolist() == [6.0, 6.0]


@pytest.mark.mpi(min_size=2)
def test_epochs_that_differ_from_on_start_on_are_refused(mpi):
    with pytest.raises(ValueError, match=r"epoch is \[1, 0"):
        trained(AllReduceSGDEngine(), 8, on_start=lambda state: setattr(state, "epoch", int(mpi.rank() == 0)))


def test_it_starts_from_rank_0s_optimizer_state(mpi):
    """As if every rank had loaded what rank 0 has."""

    def run(engine, has_loaded, iterator):
        net = network()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05 if has_loaded else 0.5)
        for number in range(3 if has_loaded else 0):
            net.zero_grad()
            loss_of(net(torch.full((2, 6), float(number))), torch.tensor([0, 1])).backward()
            optimizer.step()
        train(net, iterator, engine=engine, optimizer=optimizer, maxepoch=2)
        return net

    net = run(AllReduceSGDEngine(), mpi.rank() == 0, DatasetIterator(classes(30), 4))
    mpi.nn.check_with_allreduce(net)
    assert_close(net, run(SGDEngine(), True, DatasetIterator(classes(30), 4 * mpi.size(), rank=0, size=1)))


def test_the_registration_ends_also_when_a_hook_fails(mpi):
    net, engine = network(), AllReduceSGDEngine(asynchronous=True)
    with pytest.raises(ZeroDivisionError):
        train(net, DatasetIterator(classes(30), 4), engine=engine, on_update=lambda state: 1 / 0)
    mpi.nn.register_async_backward(net).remove()  # refused while there is one


def test_testing_in_the_middle_of_training(mpi):
    losses, engine = Average(), AllReduceSGDEngine(asynchronous=True)
    test_set = DatasetIterator(classes(11), 4, shuffle=False)

    def measure(state):
        if not state.training:
            losses.add(state.loss, state.num_samples)

    def test(state):
        engine.test(network=state.network, criterion=loss_of, iterator=test_set)

    net = trained(engine, 30, on_forward_criterion=measure, on_end_epoch=test)
    assert_close(net, trained_alone(30, 4 * mpi.size()))
    losses.reset()
    engine.test(network=net, criterion=loss_of, iterator=test_set)
    inputs, targets = classes(11).tensors
    assert losses.reduced() == pytest.approx(loss_of(net(inputs), targets).item(), rel=1e-5)


@pytest.mark.mpi(min_size=4)
def test_on_a_level_of_groups(mpi):
    # Two groups train two networks; the iterator takes rank and size from the level too.
    group = mpi.rank() % 2
    with mpi.at(mpi.push_communicator(f"group {group}")):
        net = trained(AllReduceSGDEngine(asynchronous=True), 30, seed=group)
        mpi.nn.check_with_allreduce(net)
        size = mpi.size()
    if group == 0:
        assert_close(net, trained_alone(30, 4 * size))
    first_weights = mpi.allgather(net[0].weight.detach()[:1, :1].contiguous()).flatten().tolist()
    assert first_weights[0] == first_weights[2] != first_weights[1] == first_weights[3]


def test_network_and_samples_move_to_the_device_of_the_rank(mpi, monkeypatch):
    # The meta device stands in for a GPU: it takes part in everything but communication.
    monkeypatch.setattr("torchmpi_py.runtime.process.device", lambda: torch.device("meta"))
    net, iterator = network(), DatasetIterator(classes(4), 4, rank=0, size=1)
    state = AllReduceSGDEngine(usegpu=True).test(network=net, criterion=loss_of, iterator=iterator)
    assert next(net.parameters()).is_meta
    assert state.sample[1].is_meta
    assert state.loss.is_meta


def test_a_session_that_does_not_fit_is_refused_with_the_remedy(mpi, monkeypatch):
    with pytest.raises(ValueError, match="with_cuda=True"):
        trained(AllReduceSGDEngine(usegpu=True), 30)
    monkeypatch.setattr("torchmpi_py.runtime.process.is_started", lambda: False)
    with pytest.raises(errors.NotStarted, match=r"mpi\.start\(\)"):
        trained(AllReduceSGDEngine(), 30)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("training", [False, True])
def test_an_iterator_made_elsewhere_is_refused(mpi, monkeypatch, training):
    with monkeypatch.context() as patch:
        patch.setattr("torchmpi_py.runtime.process.is_started", lambda: False)
        early = DatasetIterator(classes(30), 4)  # as if before mpi.start()
    engine, run = AllReduceSGDEngine(), {"network": network(), "criterion": loss_of}
    run_it = functools.partial(engine.train, lr=0.1) if training else engine.test
    with pytest.raises(ValueError, match=rf"rank 0 of 1, .* rank {mpi.rank()} of .*mpi\.start\(\)"):
        run_it(iterator=early, **run)
    run_it(iterator=DatasetIterator(classes(30), 4, rank=0, size=1), **run)  # asked for: the whole, on every rank
    with mpi.at(mpi.push_communicator(f"alone {mpi.rank()}")):
        on_level = DatasetIterator(classes(30), 4)
        run_it(iterator=on_level, **run)
    with pytest.raises(ValueError, match="at the level at which it is used"):
        run_it(iterator=on_level, **run)
