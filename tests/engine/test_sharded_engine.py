"""The engine with an optimizer whose state is divided: what it gives is what the plain optimizer gives."""

import pytest
import torch
from runs import classes, train
from support import networks

from torchmpi_py import nn, optim
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator
from torchmpi_py.nn.compression import BF16

pytestmark = pytest.mark.mpi


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.001)


def adafactor(parameters):  # whole parameters have owners
    return torch.optim.Adafactor(parameters, lr=0.01)


OPTIMIZERS = {"lr": {"lr": 0.05}, "Adam": {"optimizer": adam}, "Adafactor": {"optimizer": adafactor}}


def network():
    return networks.perceptron(6, 17, 3, norm=torch.nn.LayerNorm)


def trained(module, *, sharded=True, asynchronous=False, compression=None, maxepoch=2, **options):
    """Return the state after training with samples that no number of ranks divides."""
    engine = AllReduceSGDEngine(sharded=sharded, asynchronous=asynchronous, compression=compression, debug=True)
    return train(module, DatasetIterator(classes(43), 4, seed=1), engine=engine, maxepoch=maxepoch, **options)


def assert_close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [("lr", False), ("lr", True), ("Adam", False), ("Adam", True), ("Adafactor", True)]
)
def test_training_is_that_of_the_plain_optimizer(mpi, kind, asynchronous):
    """Also of a network in blocks."""
    plain, divided, blocks = network(), network(), nn.BlockSequential(2, *network())
    trained(plain, sharded=False, **OPTIMIZERS[kind])
    state = trained(divided, asynchronous=asynchronous, **OPTIMIZERS[kind])
    assert isinstance(state.optimizer, optim.ShardedOptimizer)
    assert_close(divided.state_dict(), plain.state_dict())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in divided.parameters())  # nothing else is saved with it
    if kind != "lr":
        trained(blocks, **OPTIMIZERS[kind])
        assert_close(blocks.state_dict(), plain.state_dict())


def test_an_optimizer_made_before_has_its_state_again(mpi):
    """Through two runs, with a schedule of the optimizer itself."""
    final = {}
    for sharded in (False, True):
        module = network()
        optimizer = adam(module.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            hooks = {"on_end_epoch": lambda state, schedule=schedule: schedule.step()}
            assert trained(module, sharded=sharded, optimizer=optimizer, **hooks).optimizer is optimizer
            assert optimizer.param_groups[0]["params"] == list(module.parameters())
        final[sharded] = module.state_dict(), optimizer.state_dict()
    assert_close(final[True][0], final[False][0])
    assert final[True][1]["param_groups"] == final[False][1]["param_groups"]
    assert_close(final[True][1]["state"], final[False][1]["state"])


def test_a_state_that_only_the_root_has_is_broadcast(mpi):
    module = network()
    optimizer = adam(module.parameters())
    if mpi.rank() == 0:
        module(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    steps = trained(module, optimizer=optimizer, maxepoch=1).t
    assert [entries["step"] for entries in optimizer.state_dict()["state"].values()] == [steps + 1] * 6


@pytest.mark.parametrize(
    "wrap", [optim.DistributedOptimizer, lambda optimizer, _: optim.ShardedOptimizer.from_optimizer(optimizer)]
)
def test_an_optimizer_that_reduces_gradients_is_taken_and_left(mpi, wrap):
    plain, divided = network(), network()
    optimizer, plain_optimizer = wrap(adam(divided.parameters()), divided), adam(plain.parameters())
    for asynchronous in (False, True):  # the second run of as few epochs goes on
        options = {"sharded": False, "asynchronous": asynchronous, "maxepoch": 1}
        assert trained(divided, optimizer=optimizer, **options).optimizer is optimizer
        trained(plain, optimizer=plain_optimizer, **options)
    assert_close(divided.state_dict(), plain.state_dict())
    with pytest.raises(ValueError, match="omit compression= and sharded= from the engine"):
        trained(divided, optimizer=optimizer, compression=BF16())
    optimizer.remove()
    if wrap is optim.DistributedOptimizer:
        optimizer = wrap(optimizer.optimizer, divided, backward_passes_per_step=2)
        with pytest.raises(ValueError, match="backward_passes_per_step= and comm= from the optimizer"):
            trained(divided, optimizer=optimizer)
        optimizer.remove()


@pytest.mark.parametrize(("kind", "before"), [("Adam", True), ("Adam", False), ("Adafactor", True)])
def test_checkpoints_pass_between_sharded_and_plain(mpi, folder, kind, before):
    whole, later = network(), network()
    trained(whole, sharded=False, **OPTIMIZERS[kind])
    saved = {"checkpoint": folder, "every": 3, **OPTIMIZERS[kind]}
    assert trained(network(), sharded=before, killed_at=4, **saved) is None
    trained(later, sharded=not before, **saved)
    assert_close(later.state_dict(), whole.state_dict())


def test_an_error_in_a_hook_ends_the_sharding(mpi):
    module = network()
    before = networks.flat(module)
    assert trained(module, lr=0, maxepoch=1).optimizer is None  # no update needs no optimizer
    assert torch.equal(networks.flat(module), before)
    for options in ({"optimizer": adam(module.parameters())}, OPTIMIZERS["lr"]):
        assert trained(module, killed_at=1, **options) is None
    trained(module, maxepoch=1, **OPTIMIZERS["lr"])  # nothing is registered any more


@pytest.mark.parametrize("asynchronous", [False, True])
def test_compressed_gradients(mpi, asynchronous):
    """Parameters near those of plain training, and not the same: 16 bits have travelled."""
    plain, divided = network(), network()
    trained(plain, sharded=False, **OPTIMIZERS["lr"])
    trained(divided, asynchronous=asynchronous, compression=BF16(), **OPTIMIZERS["lr"])
    assert_close(divided.state_dict(), plain.state_dict(), 5e-3)
    assert mpi.size() == 1 or not torch.equal(networks.flat(divided), networks.flat(plain))
