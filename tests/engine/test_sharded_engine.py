"""The engine with an optimizer whose state is divided: what it gives is what the plain optimizer gives."""

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import nn, optim
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, resume
from torchmpi_py.nn.compression import BF16

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


class Killed(Exception):
    """Stands for a kill, in between steps, on all ranks."""


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.001)


def adafactor(parameters):  # whole parameters have owners
    return torch.optim.Adafactor(parameters, lr=0.01)


OPTIMIZERS = {"lr": {"lr": 0.05}, "Adam": {"optimizer": adam}, "Adafactor": {"optimizer": adafactor}}


def network():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.LayerNorm(17), torch.nn.Tanh(), torch.nn.Linear(17, 3))


def train(module, hooks=None, *, sharded=True, asynchronous=False, compression=None, maxepoch=2, **options):
    """The state after training, with 83 samples that no number of ranks divides."""
    resume.completed.clear()  # as if in a process of its own
    generator = torch.Generator().manual_seed(7)
    samples = TensorDataset(torch.randn(83, 6, generator=generator), torch.arange(83) % 3)
    engine = AllReduceSGDEngine(sharded=sharded, asynchronous=asynchronous, compression=compression, debug=True)
    for name, hook in (hooks or {}).items():
        setattr(engine.hooks, name, hook)
    return engine.train(
        network=module,
        criterion=torch.nn.CrossEntropyLoss(),
        iterator=DatasetIterator(samples, 4, seed=1),
        maxepoch=maxepoch,
        **options,
    )


def assert_equal(ours, theirs, tolerance=2e-5):
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_that_of_the_plain_optimizer(mpi, kind, asynchronous):
    plain, divided = network(), network()
    train(plain, sharded=False, **OPTIMIZERS[kind])
    state = train(divided, asynchronous=asynchronous, **OPTIMIZERS[kind])
    assert isinstance(state.optimizer, optim.ShardedOptimizer)
    assert_equal(divided.state_dict(), plain.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in divided.parameters())  # nothing else is saved with it


@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
def test_a_network_in_blocks(mpi, kind):
    plain, divided = network(), nn.BlockSequential(2, *network())
    train(plain, sharded=False, **OPTIMIZERS[kind])
    train(divided, **OPTIMIZERS[kind])
    assert_equal(divided.state_dict(), plain.state_dict())


def test_state_is_divided(mpi):
    """Adam has two moments of each element; each rank holds its slice of them."""
    held = []

    def on_update(state):
        held.append(sum(x.numel() for entry in state.optimizer.state.values() for x in entry.values() if x.dim()))

    module = network()
    train(module, {"on_update": on_update}, **OPTIMIZERS["Adam"])
    num_elements = sum(p.numel() for p in module.parameters())
    assert 0 < max(held) <= 2 * (num_elements / mpi.size() + 4)


def test_an_optimizer_made_before_has_its_state_again(mpi):
    """Through two runs, with a schedule of the optimizer itself."""
    final = {}
    for sharded in (False, True):
        module = network()
        optimizer = adam(module.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            hooks = {"on_end_epoch": lambda state, schedule=schedule: schedule.step()}
            state = train(module, hooks, sharded=sharded, optimizer=optimizer)
            assert state.optimizer is optimizer
            assert optimizer.param_groups[0]["params"] == list(module.parameters())
        final[sharded] = module.state_dict(), optimizer.state_dict()
    assert_equal(final[True][0], final[False][0])
    states = [final[sharded][1] for sharded in (True, False)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, entries in states[1]["state"].items():
        assert_equal(states[0]["state"][number], entries)


def test_a_state_that_only_the_root_has_is_broadcast(mpi):
    module = network()
    optimizer = adam(module.parameters())
    if mpi.rank() == 0:
        module(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    first = train(network(), optimizer=adam, maxepoch=1).t
    train(module, optimizer=optimizer, maxepoch=1)
    assert [entries["step"] for entries in optimizer.state_dict()["state"].values()] == [first + 1] * 6


def test_a_sharded_optimizer_is_taken_and_left(mpi):
    plain, divided = network(), network()
    train(plain, sharded=False, optimizer=adam)
    optimizer = optim.ShardedOptimizer(divided.parameters(), torch.optim.Adam, lr=0.01, weight_decay=0.001)
    for _ in range(2):  # the second run of as few epochs goes on
        assert train(divided, optimizer=optimizer, maxepoch=1).optimizer is optimizer
    again = network()
    plain_optimizer = adam(again.parameters())
    for _ in range(2):
        train(again, sharded=False, optimizer=plain_optimizer, maxepoch=1)
    assert_equal(divided.state_dict(), again.state_dict())
    optimizer.remove()


@pytest.mark.parametrize("kind", ["Adam", "Adafactor"])
@pytest.mark.parametrize("before", [True, False])
def test_checkpoints_pass_between_sharded_and_plain(mpi, folder, kind, before):
    whole, cut = network(), network()
    train(whole, sharded=False, **OPTIMIZERS[kind])

    def on_update(state):
        if state.t == 5:
            raise Killed

    with pytest.raises(Killed):
        train(cut, {"on_update": on_update}, sharded=before, checkpoint=folder / kind, every=3, **OPTIMIZERS[kind])
    later = network()
    train(later, sharded=not before, checkpoint=folder / kind, **OPTIMIZERS[kind])
    assert_equal(later.state_dict(), whole.state_dict())


def test_clipping_by_the_sharded_optimizer(mpi):
    norms = {True: [], False: []}
    modules = {True: network(), False: network()}

    def clip(state):
        sharded = isinstance(state.optimizer, optim.ShardedOptimizer)
        if sharded:
            norms[True].append(state.optimizer.clip_grad_norm_(0.1))
        else:
            norms[False].append(torch.nn.utils.clip_grad_norm_(state.network.parameters(), 0.1))

    for sharded, module in modules.items():
        train(module, {"on_backward": clip}, sharded=sharded, lr=0.5)
    torch.testing.assert_close(norms[True], norms[False], rtol=1e-4, atol=1e-6, check_dtype=False)
    assert_equal(modules[True].state_dict(), modules[False].state_dict())


def test_no_update_needs_no_optimizer(mpi):
    module = network()
    before = [p.clone() for p in module.parameters()]
    assert train(module, lr=0, maxepoch=1).optimizer is None
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_an_error_in_a_hook_ends_the_sharding(mpi):
    module = network()
    optimizer = adam(module.parameters())

    def on_update(state):
        raise Killed

    with pytest.raises(Killed):
        train(module, {"on_update": on_update}, optimizer=optimizer)
    with pytest.raises(Killed):
        train(module, {"on_update": on_update}, **OPTIMIZERS["lr"])
    train(module, maxepoch=1, **OPTIMIZERS["lr"])  # nothing is registered any more


@pytest.mark.parametrize("asynchronous", [False, True])
def test_compressed_gradients(mpi, asynchronous):
    """Parameters near those of plain training, and not the same: 16 bits have travelled."""
    plain, divided = network(), network()
    train(plain, sharded=False, **OPTIMIZERS["lr"])
    train(divided, asynchronous=asynchronous, compression=BF16(), **OPTIMIZERS["lr"])
    assert_equal(divided.state_dict(), plain.state_dict(), 5e-3)
    is_equal = all(torch.equal(p, q) for p, q in zip(divided.parameters(), plain.parameters(), strict=True))
    assert not is_equal or mpi.size() == 1


def test_what_does_not_go_together(mpi):
    module = network()
    optimizer = optim.ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="give the engine sharded=True"):
        train(module, sharded=False, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"give it compression=BF16\(\), not the engine"):
        train(module, optimizer=optimizer, compression=BF16())
    optimizer.remove()
