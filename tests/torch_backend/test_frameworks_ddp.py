"""DistributedDataParallel and what is built around it: what is trained equals what one process trains."""

import pytest
import regression
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def the_group(group_for_frameworks):
    """All of these need it."""


def trained(mpi, *, hook=None, state=None, optimizer=regression.adam, **how):
    """The parameters after training by all ranks, which have the same bits."""
    torch.manual_seed(mpi.rank())
    model = regression.network()
    ddp = DistributedDataParallel(model, **how)
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    regression.train(ddp, optimizer(ddp.parameters()), mpi.rank(), mpi.size())
    mpi.nn.check_with_allreduce(model)
    return model.state_dict()


@pytest.mark.parametrize(
    "how", [{}, {"bucket_cap_mb": 1e-3}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_as_one_process(mpi, how):
    regression.assert_equal(trained(mpi, **how), regression.trained_alone())


@pytest.mark.parametrize("how", [{}, {"bucket_cap_mb": 1e-3}, {"gradient_as_bucket_view": True}], ids=str)
def test_the_hook_average(mpi, how):
    from torchmpi_py import torch_backend

    regression.assert_equal(trained(mpi, hook=torch_backend.average, **how), regression.trained_alone())


@pytest.mark.parametrize("how", [{}, {"bucket_cap_mb": 1e-3}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [("TopK(1.0)", 1e-9), ("FP16()", 1e-3), ("BF16()", 1e-2), ("PowerSGD(1)", None)],
)
def test_the_hook_compressed(mpi, compression, tolerance, how):
    """Where all elements are taken nothing is left out."""
    from torchmpi_py import torch_backend
    from torchmpi_py.optim import compression as compressions

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)

    name, _, options = compression.partition("(")
    made = getattr(compressions, name)(*(float(x) if "." in x else int(x) for x in [options[:-1]] if x))
    found, exact = trained(mpi, hook=torch_backend.compressed(made), optimizer=sgd, **how), None
    exact = regression.trained_alone(optimizer=sgd)
    for key, value in found.items():
        if tolerance is not None:
            torch.testing.assert_close(value, exact[key], rtol=tolerance, atol=tolerance)
    is_equal = all(torch.allclose(value, exact[key], rtol=1e-9, atol=1e-9) for key, value in found.items())
    assert is_equal == (tolerance == 1e-9 or mpi.size() == 1)


def test_what_the_hook_compressed_takes(mpi):
    from torchmpi_py import torch_backend
    from torchmpi_py.optim import compression

    with pytest.raises(TypeError, match="'bf16' is no compression"):
        torch_backend.compressed("bf16")
    with pytest.raises(TypeError, match="is not a process group of backend torchmpi"):
        torch_backend.compressed(compression.BF16(), group="gloo")


def test_a_hook_that_does_not_suit(mpi):
    """A state that is another group, a second module, sparse gradients: an error that names the remedy."""
    from torchmpi_py import torch_backend
    from torchmpi_py.optim import compression

    def backward(network, hook, state=None, group=None):
        ddp = DistributedDataParallel(network, process_group=group)
        ddp.register_comm_hook(state, hook)
        ddp(torch.tensor([[1, 2]])).sum().backward()

    def network(sparse=False):
        return torch.nn.Embedding(4, 2, sparse=sparse)

    mine, _ = dist.new_subgroups(1)
    with pytest.raises(ValueError, match=r"make it with compressed.*group="):
        backward(network(), torch_backend.compressed(compression.BF16()), mine, mine)
    backward(network(), torch_backend.compressed(compression.BF16(), mine), mine, mine)
    hook = torch_backend.compressed(compression.TopK(0.5))
    backward(network(), hook)
    with pytest.raises(RuntimeError, match="serves one module"):
        backward(network(), hook)
    for hook in (torch_backend.average, torch_backend.compressed(compression.BF16())):
        with pytest.raises(TypeError, match=r"sparse gradients.*sparse=False"):
            backward(network(sparse=True), hook)


def test_rank_0_has_the_parameters_and_buffers(mpi):
    torch.manual_seed(mpi.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model[1].running_mean += mpi.rank()
    DistributedDataParallel(model)
    torch.manual_seed(0)
    regression.assert_equal(
        model.state_dict(), torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    )


def test_synchronized_batch_statistics(mpi):
    """Torch's layer refuses tensors on the CPU."""

    def model():
        torch.manual_seed(7)
        layers = [torch.nn.Linear(6, 11, bias=False), torch.nn.BatchNorm1d(11), torch.nn.Tanh(), torch.nn.Linear(11, 3)]
        return torch.nn.Sequential(*layers).double()

    one = model()
    regression.train(one, regression.adam(one.parameters()))
    synchronized = mpi.nn.SyncBatchNorm.convert_sync_batchnorm(model())
    ddp = DistributedDataParallel(synchronized, bucket_cap_mb=1e-3)  # several buckets travel while the layer computes
    regression.train(ddp, regression.adam(ddp.parameters()), mpi.rank(), mpi.size())
    mpi.nn.check_with_allreduce(synchronized)
    regression.assert_equal(synchronized.state_dict(), one.state_dict())


def test_hooks_of_torch(mpi):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1)

    exact = regression.trained_alone(optimizer=sgd)
    regression.assert_equal(trained(mpi, hook=default_hooks.allreduce_hook, optimizer=sgd), exact)
    for name, value in trained(mpi, hook=default_hooks.fp16_compress_hook, optimizer=sgd).items():
        assert 0 < (value - exact[name]).abs().max() < 1e-3, name


@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-4])
def test_power_sgd(mpi, bucket_cap_mb):
    """Its steps are linear in the gradients, so that many ranks come where one comes with all samples."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def state(group):
        return PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1, random_seed=3
        )

    together = trained(mpi, hook=powerSGD_hook, state=state(None), bucket_cap_mb=bucket_cap_mb)
    mine, _ = dist.new_subgroups(1)  # each rank has one of its own
    alone = DistributedDataParallel(regression.network(), process_group=mine, bucket_cap_mb=bucket_cap_mb)
    alone.register_comm_hook(state(mine), powerSGD_hook)
    regression.train(alone, regression.adam(alone.parameters()))
    regression.assert_equal(together, alone.module.state_dict())
    assert not torch.equal(together["0.weight"], regression.trained_alone()["0.weight"]), "it is an approximation"


class Branches(torch.nn.Module):
    """Each rank uses one of three layers, so that some are used by no rank, or by a few."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 3).double() for _ in range(3))

    def forward(self, inputs, rank):
        return self.layers[rank % 2](inputs)


def test_parameters_that_are_not_used(mpi):
    model, alone = Branches(), Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        alone.zero_grad()
        for rank in range(mpi.size()):
            inputs, targets = (part[rank :: mpi.size()] for part in regression.batch(step))
            loss = torch.nn.functional.mse_loss(alone(inputs, rank), targets) / mpi.size()
            loss.backward()
            if rank == mpi.rank():
                torch.nn.functional.mse_loss(ddp(inputs, rank), targets).backward()
        for name, parameter in alone.named_parameters():
            gradient = dict(model.named_parameters())[name].grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, parameter.grad)


def test_join(mpi):
    """Rank r has r + 2 steps to do. A gradient is divided by the number of all ranks, whoever has left."""
    model, alone = regression.network(), regression.network()
    ddp = DistributedDataParallel(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (ddp, alone))
    with ddp.join():
        regression.train(ddp, optimizer, mpi.rank(), mpi.size(), steps=range(mpi.rank() + 2))
    for step in range(mpi.size() + 1):
        other.zero_grad()
        for rank in range(max(0, step - 1), mpi.size()):
            (regression.loss(alone, step, rank, mpi.size()) / mpi.size()).backward()
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


def test_means_of_whole_numbers_are_rounded_towards_zero(mpi):
    """As NCCL does it; Lightning counts samples so."""
    ranks, size = range(mpi.size()), mpi.size()
    means = [int(sum(factor * (rank + 1) for rank in ranks) / size) for factor in (3, -3, 1, 10)]
    mine = torch.tensor([3, -3, 1, 10]) * (mpi.rank() + 1)
    for work in (False, True):
        x = mine.clone()
        done = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=work)
        assert done is None or done.wait()
        assert x.tolist() == means
    y = mine.clone()
    dist.reduce(y, size - 1, dist.ReduceOp.AVG)
    assert y.tolist() == (means if mpi.rank() == size - 1 else mine.tolist())
    z = torch.empty(4, dtype=torch.int64)
    dist.reduce_scatter_single(z, mine.repeat(size), dist.ReduceOp.AVG)
    assert z.tolist() == means
