"""Data-parallel training equals training on one rank. Every rank computes both and compares."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchmpi_py import errors
from torchmpi_py.engine import AllReduceSGDEngine, Average, DatasetIterator, SGDEngine

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
cross_entropy = torch.nn.CrossEntropyLoss()


def data(total):
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(total, 5, generator=generator), torch.randint(3, (total,), generator=generator))


def network(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def trained(mpi, engine, total, *, seed=0, batch_size=4, **options):
    net = network(seed)
    iterator = DatasetIterator(data(total), batch_size, seed=2)
    state = engine.train(
        network=net, criterion=cross_entropy, iterator=iterator, maxepoch=3, **(options or {"lr": 0.2})
    )
    assert state.t == 3 * len(iterator)
    return net


def trained_alone(total, global_batch, **options):
    net = network(0)
    iterator = DatasetIterator(data(total), global_batch, seed=2, rank=0, size=1)
    SGDEngine().train(network=net, criterion=cross_entropy, iterator=iterator, maxepoch=3, **(options or {"lr": 0.2}))
    return net


def assert_close(one, other):
    for (name, x), y in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6), f"{name}: {(x - y).abs().max()}"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("total", [1, 7, 40, 61])
def test_any_number_of_ranks_trains_as_one(mpi, total, asynchronous):
    # Sizes at which ranks have unequal shares of the last batch, or none. Ranks start from different parameters.
    net = trained(mpi, AllReduceSGDEngine(asynchronous=asynchronous), total, seed=mpi.rank())
    mpi.nn.check_with_allreduce(net)
    assert_close(net, trained_alone(total, 4 * mpi.size()))


def test_with_momentum_too(mpi):
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)

    net = trained(mpi, AllReduceSGDEngine(), 50, optimizer=optimizer)
    assert_close(net, trained_alone(50, 4 * mpi.size(), optimizer=optimizer))


def test_it_starts_from_what_rank_0_loads_in_on_start(mpi):
    saved = network(9)

    def run(loading_rank, engine, rank, size):
        def load(state):
            state.epoch = 1
            if mpi.rank() == loading_rank:
                state.network.load_state_dict(saved.state_dict())

        engine.hooks.on_start = load
        net = network(0)
        iterator = DatasetIterator(data(40), 4 * mpi.size() // size, seed=2, rank=rank, size=size)
        engine.train(network=net, criterion=cross_entropy, iterator=iterator, maxepoch=3, lr=0.2)
        return net

    net = run(0, AllReduceSGDEngine(), mpi.rank(), mpi.size())
    mpi.nn.check_with_allreduce(net)
    assert_close(net, run(mpi.rank(), SGDEngine(), 0, 1))


def test_buffers_that_rank_0_loads_in_on_start(mpi):
    net = torch.nn.Sequential(torch.nn.Linear(5, 3))
    net.register_buffer("scale", torch.zeros(2))
    engine = AllReduceSGDEngine()
    engine.hooks.on_start = lambda state: state.network.scale.fill_(6.0 if mpi.rank() == 0 else 0.0)
    engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(8), 4), lr=0.1)
    assert net.scale.tolist() == [6.0, 6.0]


def test_epochs_that_differ_from_on_start_on(mpi):
    engine = AllReduceSGDEngine()
    engine.hooks.on_start = lambda state: setattr(state, "epoch", int(mpi.rank() == 0))
    if mpi.size() == 1:
        trained(mpi, AllReduceSGDEngine(), 8)
        return
    with pytest.raises(ValueError, match=r"the ranks' states differ: epoch is \[1, 0"):
        trained(mpi, engine, 8)


def test_it_starts_from_rank_0s_optimizer_state(mpi):
    """As if every rank had loaded what rank 0 has."""

    def run(engine, has_loaded, iterator):
        net = network(0)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05 if has_loaded else 0.5)
        for number in range(3 if has_loaded else 0):
            net.zero_grad()
            cross_entropy(net(torch.full((2, 5), float(number))), torch.tensor([0, 1])).backward()
            optimizer.step()
        engine.train(network=net, criterion=cross_entropy, iterator=iterator, optimizer=optimizer, maxepoch=2)
        return net

    net = run(AllReduceSGDEngine(), mpi.rank() == 0, DatasetIterator(data(30), 4))
    mpi.nn.check_with_allreduce(net)
    assert_close(net, run(SGDEngine(), True, DatasetIterator(data(30), 4 * mpi.size(), rank=0, size=1)))


def test_synchronous_and_asynchronous_agree(mpi):
    one = trained(mpi, AllReduceSGDEngine(), 30)
    other = trained(mpi, AllReduceSGDEngine(asynchronous=True), 30)
    # Not bit for bit: a large reduction may add the ranks in another order than a small one.
    assert_close(one, other)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_see_averaged_gradients(mpi, asynchronous):
    engine = AllReduceSGDEngine(asynchronous=asynchronous)
    seen = []
    engine.hooks.on_backward = lambda state: seen.append(state.network.weight.grad.item())
    sample = (torch.tensor([[float(mpi.rank() + 1)]]), torch.zeros(1))
    engine.train(
        network=torch.nn.Linear(1, 1), criterion=lambda output, target: output.sum(), iterator=[sample, sample], lr=0.1
    )
    assert seen == [pytest.approx((mpi.size() + 1) / 2)] * 2


@pytest.mark.mpi(min_size=2)
def test_debug_finds_ranks_that_differ(mpi):
    def spoil(state):
        if mpi.rank() == 1:
            with torch.no_grad():
                state.network[2].bias[0] += 1e-6

    engine = AllReduceSGDEngine(debug=True)
    engine.hooks.on_update = spoil
    with pytest.raises(errors.RanksDisagree, match="bias"):
        trained(mpi, engine, 50)


def test_the_registration_ends_also_when_a_hook_fails(mpi):
    net = network(0)
    engine = AllReduceSGDEngine(asynchronous=True)
    engine.hooks.on_update = lambda state: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(30), 4), lr=0.1)
    for _ in range(2):  # a registration left behind would refuse the second pass
        cross_entropy(net(torch.randn(2, 5)), torch.tensor([0, 1])).backward()
    engine.hooks.on_update = lambda state: None
    engine.train(network=net, criterion=cross_entropy, iterator=DatasetIterator(data(30), 4), lr=0.1)
    mpi.nn.check_with_allreduce(net)


def test_testing_in_the_middle_of_training(mpi):
    losses = Average()
    engine = AllReduceSGDEngine(asynchronous=True)
    test_set = DatasetIterator(data(11), 4, shuffle=False)

    def measure(state):
        if not state.training:
            losses.add(state.loss, state.num_samples)

    engine.hooks.on_forward_criterion = measure
    engine.hooks.on_end_epoch = lambda state: engine.test(
        network=state.network, criterion=cross_entropy, iterator=test_set
    )
    net = trained(mpi, engine, 30)
    assert_close(net, trained_alone(30, 4 * mpi.size()))
    losses.reset()
    engine.test(network=net, criterion=cross_entropy, iterator=test_set)
    inputs, targets = data(11).tensors
    assert losses.reduced() == pytest.approx(cross_entropy(net(inputs), targets).item(), rel=1e-5)


def test_a_dataloader_with_a_distributed_sampler(mpi):
    dataset = data(12 * mpi.size())
    sampler = torch.utils.data.DistributedSampler(dataset, mpi.size(), mpi.rank(), shuffle=True)
    orders = []
    engine = AllReduceSGDEngine()
    engine.hooks.on_start_epoch = lambda state: orders.append([])
    engine.hooks.on_sample = lambda state: orders[-1].extend(state.sample[1].tolist())
    net = network(0)
    state = engine.train(
        network=net, criterion=cross_entropy, iterator=DataLoader(dataset, 4, sampler=sampler), lr=0.1, maxepoch=2
    )
    assert (state.t, state.num_samples) == (6, 4)
    assert orders[0] != orders[1]
    mpi.nn.check_with_allreduce(net)


@pytest.mark.mpi(min_size=4)
def test_on_a_level_of_groups(mpi):
    # Two groups train two networks; the iterator takes rank and size from the level too.
    group = mpi.rank() % 2
    with mpi.at(mpi.push_communicator(f"group {group}")):
        net = trained(mpi, AllReduceSGDEngine(asynchronous=True), 30, seed=group)
        mpi.nn.check_with_allreduce(net)
        size = mpi.size()
    if group == 0:
        assert_close(net, trained_alone(30, 4 * size))
    first_weights = mpi.allgather(net[0].weight.detach()[:1, :1].contiguous()).flatten().tolist()
    assert first_weights[0] == first_weights[2] != first_weights[1] == first_weights[3]


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 13:
            raise LookupError("sample 13 is broken")
        return torch.zeros(5), 0


def test_an_error_in_the_dataset_reaches_the_caller(mpi):
    # Every rank iterates over the whole set, so that all fail alike and none is left waiting.
    iterator = DatasetIterator(Slow(), 4, shuffle=False, rank=0, size=1)
    with pytest.raises(LookupError, match="sample 13"):
        AllReduceSGDEngine(asynchronous=True).train(
            network=network(0), criterion=cross_entropy, iterator=iterator, lr=0.1
        )


def test_network_and_samples_move_to_the_device_of_the_rank(mpi, monkeypatch):
    # The meta device stands in for a GPU: it takes part in everything but communication.
    monkeypatch.setattr("torchmpi_py.runtime.process.device", lambda: torch.device("meta"))
    net = network(0)
    iterator = DatasetIterator(data(4), 4, rank=0, size=1)
    state = AllReduceSGDEngine(usegpu=True).test(network=net, criterion=cross_entropy, iterator=iterator)
    assert next(net.parameters()).is_meta
    assert state.sample[1].is_meta
    assert state.loss.is_meta


def test_usegpu_in_a_session_without_gpus_is_refused(mpi):
    with pytest.raises(ValueError, match="with_cuda=True"):
        trained(mpi, AllReduceSGDEngine(usegpu=True), 30)


def test_without_a_session_the_remedy_is_named(mpi, monkeypatch):
    monkeypatch.setattr("torchmpi_py.runtime.process.is_started", lambda: False)
    with pytest.raises(errors.NotStarted, match=r"mpi\.start\(\)"):
        trained(mpi, AllReduceSGDEngine(), 30)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("training", [False, True])
def test_an_iterator_made_elsewhere_is_refused(mpi, monkeypatch, training):
    with monkeypatch.context() as patch:
        patch.setattr("torchmpi_py.runtime.process.is_started", lambda: False)
        early = DatasetIterator(data(30), 4)  # as if before mpi.start()
    engine, run = AllReduceSGDEngine(), {"network": network(0), "criterion": cross_entropy}
    run_it = functools.partial(engine.train, lr=0.1) if training else engine.test
    with pytest.raises(ValueError, match=rf"rank 0 of 1, but this is rank {mpi.rank()} of .*after mpi\.start\(\)"):
        run_it(iterator=early, **run)
    run_it(iterator=DatasetIterator(data(30), 4, rank=0, size=1), **run)  # asked for: the whole of it, on every rank
    with mpi.at(mpi.push_communicator(f"alone {mpi.rank()}")):
        on_level = DatasetIterator(data(30), 4)
        run_it(iterator=on_level, **run)
    with pytest.raises(ValueError, match="at the level at which it is used"):
        run_it(iterator=on_level, **run)
