"""An object that goes back to an earlier state, in the middle of what it does, goes on as a new one does from there."""

import functools
import io

import pytest
import torch
from loops import COMPRESSIONS
from support import networks

from torchmpi_py import errors, nn as mpinn, optim

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("LBFGS", "SparseAdam", "Optimizer")  # the first two have a test of their own
}


class Registered:
    """A registration and an optimizer, as a loop has them that rolls both back."""

    def __init__(self, module, what):
        self.optimizer = momentum(module)
        made = COMPRESSIONS[what]()
        self.reduction = mpinn.register_async_backward(module, frequency=2, compression=made)
        self.state_dict, self.zero_grad = self.optimizer.state_dict, self.optimizer.zero_grad
        self.remove = self.reduction.remove

    def step(self):
        self.reduction.synchronize()
        self.optimizer.step()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)
        self.reduction.restart()


def network():
    layers = networks.perceptron(12, 9, 7)
    layers[0].bias = layers[2].bias = None  # Muon takes matrices alone
    return layers


def momentum(module):
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def options_of(what):
    """Those of an optimizer whose class or compression this is."""
    return {"compression": COMPRESSIONS[what]() if what in COMPRESSIONS else None, "backward_passes_per_step": 2}


def distributed(module, what=None):
    inner = CLASSES[what](module.parameters()) if what in CLASSES else momentum(module)
    return optim.DistributedOptimizer(inner, module, **options_of(what))


def sharded(module, what=None, placement="size"):
    kind = CLASSES.get(what, torch.optim.Adam)
    return optim.ShardedOptimizer(module.parameters(), kind, placement=placement, **options_of(what))


KINDS = {
    "gossip, ring": lambda module: optim.Gossip(momentum(module), "ring"),
    "gossip, ring, asynchronous": lambda module: optim.Gossip(momentum(module), "ring", asynchronous=True),
    "gossip, random": lambda module: optim.Gossip(momentum(module), "random", asynchronous=True, seed=5),
    "local": lambda module: optim.LocalSGD(momentum(module), 3),
    "local, slow": lambda module: optim.LocalSGD(momentum(module), 3, slow_momentum=0.5, start=2),
}
for name, wrap, whats in (
    ("slices", sharded, [*COMPRESSIONS, *CLASSES]),
    ("owners", functools.partial(sharded, placement="round_robin"), ["Adam", "Adafactor", "Rprop"]),
    ("register", Registered, ["FP16", "TopK"]),
    ("distributed", distributed, ["BF16", "TopK", "PowerSGD", "Adam", "ASGD"]),
):
    KINDS |= {f"{name}, {what}": functools.partial(wrap, what=what) for what in whats}


def one_pass(mpi, module, number):
    x = networks.batch(8, 12, rank=mpi.rank(), step=number)
    loss = (module(x) - x[:, :7].sin()).pow(2).mean()
    loss.backward()
    return loss


def two_passes(mpi, module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        one_pass(mpi, module, 2 * step)
        one_pass(mpi, module, 2 * step + 1)
        optimizer.step()


def closures(mpi, module, optimizer, steps):
    """For an optimizer that evaluates the loss itself."""
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            return one_pass(mpi, module, step)

        optimizer.step(closure)


def rows(mpi, module, optimizer, steps):
    """With sparse gradients, of other rows on other ranks."""
    for step in steps:
        optimizer.zero_grad()
        indices = torch.tensor([(mpi.rank() + step) % 7, step % 3, mpi.rank() % 5])
        (module(indices) * torch.arange(1.0, 4)).pow(2).sum().backward()
        optimizer.step()


def load(module, optimizer, file, *, module_first=True):
    file.seek(0)
    state = torch.load(file)
    if module_first:
        module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    module.load_state_dict(state["module"])


def assert_going_back_is_starting_there(mpi, make, wrap, train, under_way=lambda module, optimizer: None):
    """Bit for bit."""
    module = make()
    optimizer, file = wrap(module), io.BytesIO()
    train(mpi, module, optimizer, range(2))
    of_optimizer = optimizer.state_dict()  # first: it ends an exchange under way, which changes parameters
    torch.save({"optimizer": of_optimizer, "module": module.state_dict()}, file)
    train(mpi, module, optimizer, range(2, 4))
    under_way(module, optimizer)
    ends = []
    for module_first in (True, False):
        load(module, optimizer, file, module_first=module_first)
        train(mpi, module, optimizer, range(2, 5))
        ends.append(networks.flat(module))
    other = make()
    again = wrap(other)
    load(other, again, file)
    train(mpi, other, again, range(2, 5))
    ends.append(networks.flat(other))
    for each in (optimizer, again):
        (each.finish if hasattr(each, "finish") else getattr(each, "remove", list))()
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[2])
    assert torch.equal(networks.flat(module), networks.flat(other))


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_is_starting_there(mpi, kind):
    """Also with a pass or an exchange under way where there can be one."""

    def under_way(module, optimizer):
        if "gossip" not in kind and "local" not in kind:
            optimizer.zero_grad()
            one_pass(mpi, module, 1000)

    assert_going_back_is_starting_there(mpi, network, KINDS[kind], two_passes, under_way)


def test_going_back_with_closures(mpi):
    def wrap(module):
        inner = torch.optim.LBFGS(module.parameters(), line_search_fn="strong_wolfe", max_iter=4)
        return optim.DistributedOptimizer(inner, module)

    assert_going_back_is_starting_there(mpi, network, wrap, closures)


def test_going_back_with_sparse_gradients(mpi):
    def table():
        torch.manual_seed(3)
        return torch.nn.Embedding(11, 3, sparse=True)

    def wrap(module):
        return optim.DistributedOptimizer(torch.optim.SparseAdam(module.parameters(), 0.1), module)

    assert_going_back_is_starting_there(mpi, table, wrap, rows)


@pytest.mark.parametrize("make", [distributed, sharded])
def test_no_state_in_the_middle_of_a_step(mpi, make):
    module = network()
    optimizer = make(module)
    one_pass(mpi, module, 0)
    with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["FP16", "PowerSGD"])
def test_a_state_that_some_ranks_alone_load(mpi, name):
    """Scales and matrices of a compression are equal on all ranks; an error says that they are not any more."""
    module = network()
    optimizer = distributed(module, name)
    two_passes(mpi, module, optimizer, range(2))
    if mpi.rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(errors.RanksDisagree, match=r"load_state_dict .* on every rank"):
        two_passes(mpi, module, optimizer, range(2, 3))
