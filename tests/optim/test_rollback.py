"""An object that goes back to an earlier state, in the middle of what it does, goes on as a new one does from there."""

import copy
import io

import pytest
import torch

from torchmpi_py import errors, nn as mpinn, optim
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

NOT_HERE = {"LBFGS", "SparseAdam", "Optimizer"}  # the first two have a test of their own
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in NOT_HERE
}
COMPRESSIONS = {
    "BF16": compression.BF16,
    "FP16": compression.FP16,
    "TopK": lambda: compression.TopK(0.2),
    "PowerSGD": lambda: compression.PowerSGD(1),
}


class Registered:
    """A registration and an optimizer, as a loop has them that rolls both back."""

    def __init__(self, module, made):
        self.optimizer = momentum(module)
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
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(12, 9, bias=False), torch.nn.Tanh(), torch.nn.Linear(9, 7, bias=False))


def momentum(module):
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def distributed(module, made=None, kind=None):
    inner = momentum(module) if kind is None else kind(module.parameters())
    return optim.DistributedOptimizer(inner, module, compression=made, backward_passes_per_step=2)


def sharded(module, made=None, kind=torch.optim.Adam, placement="size"):
    return optim.ShardedOptimizer(
        module.parameters(), kind, placement=placement, compression=made, backward_passes_per_step=2
    )


def of_level(mpi, module, **options):
    return optim.LocalSGD(momentum(module), 3, **options)


KINDS = {
    **{
        f"gossip, {partners}, {asynchronous}": lambda mpi, module, partners=partners, asynchronous=asynchronous: (
            optim.Gossip(momentum(module), partners, asynchronous=asynchronous, seed=5)
        )
        for partners in ("ring", "random")
        for asynchronous in (False, True)
    },
    "local": of_level,
    "local, slow": lambda mpi, module: of_level(mpi, module, slow_momentum=0.5, start=2),
    **{
        f"register, {name}": lambda mpi, module, make=make: Registered(module, make())
        for name, make in COMPRESSIONS.items()
    },
    **{
        f"distributed, {name}": lambda mpi, module, make=make: distributed(module, make())
        for name, make in COMPRESSIONS.items()
    },
    **{
        f"slices, {name}": lambda mpi, module, make=make: sharded(module, make()) for name, make in COMPRESSIONS.items()
    },
    **{
        f"distributed, {name}": lambda mpi, module, kind=kind: distributed(module, kind=kind)
        for name, kind in CLASSES.items()
    },
    **{f"slices, {name}": lambda mpi, module, kind=kind: sharded(module, kind=kind) for name, kind in CLASSES.items()},
    **{
        f"owners, {name}": lambda mpi, module, kind=kind: sharded(module, kind=kind, placement="round_robin")
        for name, kind in CLASSES.items()
    },
}


def one_pass(mpi, module, number):
    generator = torch.Generator().manual_seed(100 * number + mpi.rank())
    x = torch.randn(8, 12, generator=generator)
    (module(x) - x[:, :7].sin()).pow(2).mean().backward()


def train(mpi, module, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        one_pass(mpi, module, 2 * step)
        one_pass(mpi, module, 2 * step + 1)
        optimizer.step()


def saved(module, optimizer):
    """As from a file; of an exchange under way first the end, which changes parameters."""
    of_optimizer, file = optimizer.state_dict(), io.BytesIO()
    torch.save({"module": module.state_dict(), "optimizer": of_optimizer}, file)
    return file


def load(module, optimizer, file, *, module_first):
    file.seek(0)
    state = torch.load(file)
    if module_first:
        module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    module.load_state_dict(state["module"])


def ended(optimizer):
    for end in ("finish", "remove"):
        if hasattr(optimizer, end):
            getattr(optimizer, end)()


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_is_starting_there(mpi, kind):
    """Bit for bit, with a pass or an exchange under way where there can be one."""
    module = network()
    optimizer = KINDS[kind](mpi, module)
    train(mpi, module, optimizer, range(3))
    file = saved(module, optimizer)
    train(mpi, module, optimizer, range(3, 5))
    if "gossip" not in kind and "local" not in kind:
        optimizer.zero_grad()
        one_pass(mpi, module, 1000)
    for module_first in (True, False):
        load(module, optimizer, file, module_first=module_first)
        train(mpi, module, optimizer, range(3, 7))
        other = network()
        if module_first:
            ended_at = copy.deepcopy([p.detach().clone() for p in module.parameters()])
    ended(optimizer)
    again = KINDS[kind](mpi, other)
    load(other, again, file, module_first=True)
    train(mpi, other, again, range(3, 7))
    between = [p.detach().clone() for p in other.parameters()]
    ended(again)
    for p, q, first, fresh in zip(module.parameters(), other.parameters(), ended_at, between, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(first, fresh)


def closures(mpi, module, optimizer, steps):
    """As ``train``, for an optimizer that evaluates the loss itself."""
    for step in steps:

        def closure(step=step):
            optimizer.zero_grad()
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + mpi.rank()))
            loss = (module(x) - x[:, :7].sin()).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def rows(mpi, module, optimizer, steps):
    """As ``train``, with sparse gradients, of other rows on other ranks."""
    for step in steps:
        optimizer.zero_grad()
        indices = torch.tensor([(mpi.rank() + step) % 7, step % 3, mpi.rank() % 5])
        (module(indices) * torch.arange(1.0, 4)).pow(2).sum().backward()
        optimizer.step()


def table():
    torch.manual_seed(3)
    return torch.nn.Embedding(11, 3, sparse=True)


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_going_back_with_closures_and_with_sparse_gradients(mpi, kind):
    make, steps = (network, closures) if kind == "LBFGS" else (table, rows)
    options = {"line_search_fn": "strong_wolfe", "max_iter": 4} if kind == "LBFGS" else {"lr": 0.1}

    def wrapped(module):
        return optim.DistributedOptimizer(getattr(torch.optim, kind)(module.parameters(), **options), module)

    module, other = make(), make()
    optimizer = wrapped(module)
    steps(mpi, module, optimizer, range(2))
    file = saved(module, optimizer)
    steps(mpi, module, optimizer, range(2, 4))
    load(module, optimizer, file, module_first=True)
    steps(mpi, module, optimizer, range(2, 5))
    optimizer.remove()
    again = wrapped(other)
    load(other, again, file, module_first=True)
    steps(mpi, other, again, range(2, 5))
    again.remove()
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("make", [distributed, sharded])
def test_no_state_in_the_middle_of_a_step(mpi, make):
    module = network()
    optimizer = make(module)
    one_pass(mpi, module, 0)
    with pytest.raises(RuntimeError, match=r"state_dict\(\) after 1 of 2 backward passes.*after step"):
        optimizer.state_dict()
    optimizer.step()
    optimizer.state_dict()
    optimizer.remove()


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_a_state_that_some_ranks_alone_load(mpi, name):
    """Scales and matrices of a compression are equal on all ranks; an error says that they are not any more."""
    if mpi.size() == 1:
        pytest.skip("one rank agrees with itself")
    module = network()
    optimizer = distributed(module, COMPRESSIONS[name]())
    train(mpi, module, optimizer, range(2))
    if mpi.rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(errors.RanksDisagree, match=r"load_state_dict .* on every rank"):
        train(mpi, module, optimizer, range(2, 3))
    optimizer.remove()


ELEMENTWISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_that_lacks_a_parameter_starts_as_torch_starts_it(mpi, name):
    """Entries of the parameter's shape: those of a plain optimizer after a first gradient of zero."""
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    alone, module, fresh = network(), network(), network()
    plain = CLASSES[name](alone.parameters(), lr=0.25, **options)
    alone[2].weight.requires_grad_(False)
    one_pass(mpi, alone, 0)
    plain.step()
    state = plain.state_dict()
    state["state"].pop(1, None)  # Adagrad has it from the start
    ours = optim.ShardedOptimizer(module.parameters(), CLASSES[name], lr=0.25, **options)
    ours.load_state_dict(state)
    starts = CLASSES[name](fresh.parameters(), lr=0.25, **options)
    for p in fresh.parameters():
        p.grad = torch.zeros_like(p)
    starts.step()
    found = ours.state_dict()["state"][1]
    for key, expected in starts.state_dict()["state"][1].items():
        if isinstance(expected, torch.Tensor) and expected.shape == fresh[2].weight.shape:
            torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    ours.remove()
