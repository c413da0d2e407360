"""DistributedDataParallel and what is built around it: what is trained equals what one process trains."""

import pytest
import regression
import torch
import torch.distributed as dist
from support import networks
from torch.nn.parallel import DistributedDataParallel

from torchmpi_py import torch_backend
from torchmpi_py.optim import compression

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group_for_frameworks")]
SMALL, VIEW, STATIC = {"bucket_cap_mb": 1e-3}, {"gradient_as_bucket_view": True}, {"static_graph": True}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def trained(mpi, *, hook=None, state=None, optimizer=regression.adam, **how):
    """The parameters after training by all ranks, which begin with those of rank 0, and end with the same bits."""
    model = regression.network()
    networks.fill(model, networks.flat(model) * (1 + mpi.rank()))
    ddp = DistributedDataParallel(model, **how)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    regression.train(ddp, optimizer(ddp.parameters()), mpi.rank(), mpi.size())
    mpi.nn.check_with_allreduce(model)
    return model.state_dict()


@pytest.mark.parametrize(
    ("hook", "how"), [(None, {}), (None, SMALL), (None, STATIC), ("average", SMALL | VIEW)], ids=str
)
def test_as_one_process(mpi, hook, how):
    regression.assert_equal(trained(mpi, hook=hook and torch_backend.average, **how), regression.trained_alone())


@pytest.mark.parametrize(
    ("make", "tolerance", "how"),
    [
        (lambda: compression.TopK(1.0), 1e-9, SMALL),  # where all elements are taken nothing is left out
        (lambda: compression.FP16(), 1e-3, VIEW),
        (lambda: compression.BF16(), 1e-2, SMALL),
        (lambda: compression.PowerSGD(1), None, VIEW),
    ],
    ids=["TopK", "FP16", "BF16", "PowerSGD"],
)
def test_the_hook_compressed(mpi, make, tolerance, how):
    found = trained(mpi, hook=torch_backend.compressed(make()), optimizer=sgd, **how)
    exact = regression.trained_alone(optimizer=sgd)
    worst = max(float((value - exact[name]).abs().max()) for name, value in found.items())
    assert tolerance is None or worst < tolerance
    assert (worst < 1e-9) == (tolerance == 1e-9 or mpi.size() == 1)


def test_a_hook_that_does_not_suit(mpi):
    """A state that is another group, a second module, sparse gradients: an error that names the remedy."""

    def backward(hook, state=None, group=None, sparse=False):
        ddp = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=sparse), process_group=group)
        ddp.register_comm_hook(state, hook)
        ddp(torch.tensor([[1, 2]])).sum().backward()

    with pytest.raises(TypeError, match="found 'bf16'"):
        torch_backend.compressed("bf16")
    with pytest.raises(TypeError, match="is not a process group of backend torchmpi"):
        torch_backend.compressed(compression.BF16(), group="gloo")
    mine, _ = dist.new_subgroups(1)
    with pytest.raises(ValueError, match=r"pass the module's group to compressed.*group="):
        backward(torch_backend.compressed(compression.BF16()), mine, mine)
    backward(torch_backend.compressed(compression.BF16(), mine), mine, mine)
    hook = torch_backend.compressed(compression.TopK(0.5))
    backward(hook)
    with pytest.raises(RuntimeError, match="two modules share this hook"):
        backward(hook)
    for hook in (torch_backend.average, torch_backend.compressed(compression.BF16())):
        with pytest.raises(TypeError, match=r"sparse=False"):
            backward(hook, sparse=True)


def test_hooks_of_torch(mpi):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    exact = regression.trained_alone(optimizer=sgd)
    regression.assert_equal(trained(mpi, hook=default_hooks.allreduce_hook, optimizer=sgd), exact)
    for name, value in trained(mpi, hook=default_hooks.fp16_compress_hook, optimizer=sgd).items():
        assert 0 < (value - exact[name]).abs().max() < 1e-3, name


def test_power_sgd(mpi):
    """Its steps are linear in the gradients, so that many ranks come where one comes with all samples.

    The hook chains two more collectives to the first one of each bucket.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def state(group):
        return PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=1, random_seed=3)

    together = trained(mpi, hook=powerSGD_hook, state=state(None), bucket_cap_mb=1e-4)
    mine, _ = dist.new_subgroups(1)  # each rank has one of its own
    alone = DistributedDataParallel(regression.network(), process_group=mine, bucket_cap_mb=1e-4)
    alone.register_comm_hook(state(mine), powerSGD_hook)
    regression.train(alone, regression.adam(alone.parameters()))
    regression.assert_equal(together, alone.module.state_dict())
    assert not torch.equal(together["0.weight"], regression.trained_alone()["0.weight"]), "it is an approximation"


def test_two_modules_with_the_hook_in_one_backward(mpi):
    def gradients(hook):
        torch.manual_seed(1)
        modules = [DistributedDataParallel(torch.nn.Linear(100, 100)) for _ in range(2)]
        for module in modules * bool(hook):
            module.register_comm_hook(None, hook)
        for step in range(3):
            x = networks.batch(6, 100, rank=mpi.rank(), step=step)
            for module in modules:
                module.zero_grad()
            (modules[0](x + 1).pow(2).sum() + 3 * modules[1](x - 1).pow(3).sum()).backward()
        return torch.cat([networks.flat_gradients(module) for module in modules])

    torch.testing.assert_close(gradients(torch_backend.average), gradients(None), rtol=1e-4, atol=1e-4)


def test_synchronized_batch_statistics(mpi):
    """Torch's layer refuses tensors on the CPU."""

    def model():
        return networks.perceptron(6, 11, 3, norm=torch.nn.BatchNorm1d, dtype=torch.float64)

    # The layer before has a bias without effect: Adam would make steps of the rounding errors of its gradient.
    one = model()
    regression.train(one, torch.optim.SGD(one.parameters(), 0.1))
    synchronized = mpi.nn.SyncBatchNorm.convert_sync_batchnorm(model())
    ddp = DistributedDataParallel(synchronized, bucket_cap_mb=1e-3)  # several buckets travel while the layer computes
    regression.train(ddp, torch.optim.SGD(ddp.parameters(), 0.1), mpi.rank(), mpi.size())
    mpi.nn.check_with_allreduce(synchronized)
    regression.assert_equal(synchronized.state_dict(), one.state_dict())


class Branches(torch.nn.Module):
    """Ranks use one of three layers, so that some are used by no rank, or by a few."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 3).double() for _ in range(3))

    def loss(self, ddp, step, rank, size):
        inputs, targets = (part[rank::size] for part in regression.batch(step))
        return torch.nn.functional.mse_loss(ddp(inputs, rank), targets)

    def forward(self, inputs, rank):
        return self.layers[rank % 2](inputs)


def test_parameters_that_are_not_used(mpi):
    model, alone = Branches(), Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        for rank in range(mpi.size()):
            (alone.loss(alone, step, rank, mpi.size()) / mpi.size()).backward()
        model.loss(ddp, step, mpi.rank(), mpi.size()).backward()
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("by_initial_size", [True, False])
def test_join(mpi, by_initial_size):
    """Rank r has r + 2 steps to do. A gradient is divided by the number of all ranks, or of those that have a step."""
    model, alone, size = regression.network(), regression.network(), mpi.size()
    ddp = DistributedDataParallel(model)
    optimizer, other = sgd(ddp.parameters()), sgd(alone.parameters())
    with ddp.join(divide_by_initial_world_size=by_initial_size):
        regression.train(ddp, optimizer, mpi.rank(), size, steps=range(mpi.rank() + 2))
    for step in range(size + 1):
        other.zero_grad()
        there = range(max(0, step - 1), size)
        for rank in there:
            (regression.loss(alone, step, rank, size) / (size if by_initial_size else len(there))).backward()
        other.step()
    regression.assert_equal(model.state_dict(), alone.state_dict())


@pytest.mark.parametrize("how", [{}, {"parameters_as_bucket_view": True}], ids=str)
def test_zero_redundancy_optimizer(mpi, how):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizers = []

    def make(parameters):
        optimizers.append(ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01, **how))
        return optimizers[0]

    regression.assert_equal(trained(mpi, optimizer=make), regression.trained_alone())
    optimizers[0].consolidate_state_dict(to=0)
    if mpi.rank() == 0:
        assert len(optimizers[0].state_dict()["state"]) == 6
