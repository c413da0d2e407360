"""The functions of nn.functional are linear maps, and their backward passes the adjoint ones.

The map is that of all ranks together: its matrix is found by unit vectors, and compared with what the backward pass
gives for unit vectors of the results. All is float64 and whole numbers, so that the comparison is exact.
"""

import pytest
import torch

from torchmpi_py import nn as mpinn
from torchmpi_py.nn import functional as F

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]

CASES = {
    "allreduce": lambda mpi, x: F.allreduce(x),
    "allreduce-avg": lambda mpi, x: F.allreduce(x, "avg"),
    "broadcast": lambda mpi, x: F.broadcast(x),
    "broadcast-last": lambda mpi, x: F.broadcast(x, mpi.size() - 1),
    "reduce": lambda mpi, x: F.reduce(x),
    "reduce-last-avg": lambda mpi, x: F.reduce(x, mpi.size() - 1, "avg"),
    "reduce_scatter": lambda mpi, x: F.reduce_scatter(x),
    "reduce_scatter-avg": lambda mpi, x: F.reduce_scatter(x, "avg"),
    "allgather": lambda mpi, x: F.allgather(x),
    "allgather-uneven": lambda mpi, x: F.allgather(x[: mpi.rank()]),
    "gather": lambda mpi, x: F.gather(x),
    "gather-uneven-last": lambda mpi, x: F.gather(x[mpi.rank() :], mpi.size() - 1),
    "scatter": lambda mpi, x: F.scatter(x),
    "scatter-last": lambda mpi, x: F.scatter(x, mpi.size() - 1),
    "alltoall": lambda mpi, x: F.alltoall(x),
    "sendreceive": lambda mpi, x: F.sendreceive(x, (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()),
}
every_case = pytest.mark.parametrize("case", CASES)


def unit(mpi, rank, shape, element):
    """Zeros on all ranks but one, which has a one."""
    x = torch.zeros(shape, dtype=torch.float64)
    if rank == mpi.rank():
        x.view(-1)[element] = 1.0
    return x


@every_case
def test_the_backward_pass_is_the_adjoint_map(mpi, case):
    shape, num_inputs = (mpi.size(), 2), 2 * mpi.size()
    results = [
        CASES[case](mpi, unit(mpi, rank, shape, element)).view(-1)
        for rank in range(mpi.size())
        for element in range(num_inputs)
    ]
    everywhere = mpi.allgather_object(torch.stack(results))  # rows: all inputs; columns: a rank's outputs
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = CASES[case](mpi, x)
    for rank, count in enumerate(mpi.allgather(y.numel())):
        for element in range(count):
            (dx,) = torch.autograd.grad(y, x, unit(mpi, rank, y.shape, element), retain_graph=True)
            expected = everywhere[rank][mpi.rank() * num_inputs : (mpi.rank() + 1) * num_inputs, element]
            assert torch.equal(dx.view(-1), expected), (case, rank, element)


@every_case
def test_gradients_of_gradients(mpi, case):
    """With L = sum of y^2 / 2 over all ranks, dL/dx = A'A x; of this, once more, in direction v: A'A v.

    Inputs stay as they are, also when the result is written to, and nothing is followed without need.
    """
    shape = (mpi.size(), 2)
    x = (torch.arange(2.0 * mpi.size(), dtype=torch.float64).view(shape) + mpi.rank()).requires_grad_()
    v = torch.arange(2.0 * mpi.size(), dtype=torch.float64).view(shape) * 3 - 4 * mpi.rank()
    y = CASES[case](mpi, x)
    (dx,) = torch.autograd.grad(y, x, y, create_graph=True)
    (ddx,) = torch.autograd.grad(dx, x, v)
    w = v.clone().requires_grad_()
    z = CASES[case](mpi, w)
    (expected,) = torch.autograd.grad(z, w, z.detach())
    torch.testing.assert_close(ddx, expected, rtol=1e-12, atol=1e-12)
    plain = v.clone()
    z = CASES[case](mpi, plain)
    assert not z.requires_grad
    z.zero_()
    assert torch.equal(plain, v)
    with torch.no_grad():
        assert not CASES[case](mpi, x).requires_grad


def test_a_rank_without_gradients_takes_part(mpi):
    """Only rank 0's tensor requires a gradient: the others' results are in the graph, their tensors get none."""
    x = torch.full((3,), 2.0, requires_grad=mpi.rank() == 0)
    y = F.broadcast(x)
    assert y.requires_grad
    (y * (mpi.rank() + 1)).sum().backward()
    total = mpi.size() * (mpi.size() + 1) / 2
    assert x.grad is None if mpi.rank() else torch.equal(x.grad, torch.full((3,), total))


def test_a_tensor_without_dimensions_is_a_row(mpi):
    x = torch.tensor(1.0 + mpi.rank(), requires_grad=True)
    y = F.allgather(x)
    assert y.tolist() == [1.0 + rank for rank in range(mpi.size())]
    (y * (mpi.rank() + 1)).sum().backward()
    assert x.grad.shape == ()
    assert x.grad.item() == mpi.size() * (mpi.size() + 1) / 2
    assert x.grad.untyped_storage().nbytes() == x.grad.nbytes  # memory of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_dtypes_and_strides(mpi, dtype):
    x = torch.arange(6.0).view(2, 3).to(dtype).t().requires_grad_()
    y = F.allreduce(x)
    assert y.dtype == dtype
    y.backward(torch.ones_like(y).expand_as(y))
    assert torch.equal(x.grad, torch.full_like(x, mpi.size()))


def test_beside_asynchronous_gradients(mpi):
    """Gradients of a network are averaged during the backward pass in which its activations travel."""
    torch.manual_seed(2)
    first, second = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 1).double()
    net = torch.nn.Sequential(first, second)
    handle = mpinn.register_async_backward(net)
    for step in range(3):
        net.zero_grad()
        x = torch.full((2, 4), 1.0 + mpi.rank() + step, dtype=torch.float64)
        second(F.allreduce(first(x), "avg")).sum().backward()
        handle.synchronize()
        mean = torch.full((2, 4), 1.0 + step + (mpi.size() - 1) / 2, dtype=torch.float64)
        weight = torch.autograd.grad(second(first(mean)).sum(), first.weight)[0]
        torch.testing.assert_close(first.weight.grad, weight, rtol=1e-12, atol=1e-12)


def test_errors_name_the_value_and_the_remedy(mpi):
    x = torch.ones(mpi.size())
    with pytest.raises(ValueError, match=r"op 'max' has no gradient here; .*mpi\.allreduce"):
        F.allreduce(x, "max")
    with pytest.raises(ValueError, match=f"root={mpi.size()} is not a rank"):
        F.broadcast(x, mpi.size())
    with pytest.raises(TypeError, match="not int"):
        F.allreduce(3)
    if mpi.size() > 1:
        with pytest.raises(ValueError, match="cannot be split into"):
            F.alltoall(torch.ones(mpi.size() + 1))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")  # the compiler looks at it
def test_compiled(mpi):
    """A compiled function breaks its graph at the call, forward and backward; so it does at a verb."""

    @torch.compile(backend="aot_eager")
    def loss(x):
        return (F.allreduce(x * 2) ** 2).sum()

    @torch.compile(backend="eager")
    def doubled_total(x):
        return mpi.allreduce(x * 2) * 2

    x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        x.grad = None
        loss(x).backward()
        assert x.grad.tolist() == [8.0 * mpi.size() ** 2] * 3
    assert doubled_total(torch.ones(3)).tolist() == [4.0 * mpi.size()] * 3


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_transforms_are_refused_with_the_remedy(mpi, transform):
    other = torch.ones(2, requires_grad=True)
    for function in (lambda x: F.allreduce(x).sum(), lambda x: (F.allreduce(other) * x).sum()):
        with pytest.raises(TypeError, match=r"call torch\.autograd\.grad"):
            transform(function)(torch.ones(2))


def test_forward_mode_is_refused(mpi):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        out = torch.empty(2)
        for call in (F.allreduce, mpi.allreduce, lambda x: mpi.allreduce(x, out=out), mpi.allgather_async):
            with pytest.raises(TypeError, match="forward-mode derivatives are not supported"):
                call(dual)
        assert mpi.allreduce(torch.ones(2))[0] == mpi.size()


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_higher_derivatives_want_gradients_on_all_ranks(mpi):
    x = torch.ones(3, requires_grad=mpi.rank() == 0)
    y = F.broadcast(x)
    with pytest.raises(mpi.RanksDisagree, match=rf"x requires a gradient on 1 of {mpi.size()} ranks"):
        y.sum().backward(create_graph=True)
