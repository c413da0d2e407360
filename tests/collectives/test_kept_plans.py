"""Calls with the same arguments share a plan: right values, a first call's errors, nothing kept alive or stale."""

import os
import signal
import sys
import weakref

import pytest
import torch
from support.values import total, values
from torch import distributed

from torchmpi_py.collectives import kept_plans
from torchmpi_py.errors import CommunicatorError, NotStarted

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
TURNS, X, Y = 3, torch.ones(1), torch.ones(1)


@pytest.fixture
def torch_group(mpi):
    """The group of torch.distributed."""
    distributed.init_process_group("torchmpi")
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("count", [0, 1, 1000, 50_000, 1_000_000])
def test_sums_of_other_tensors(mpi, count):
    """The sizes lie on both sides of where another flavour is chosen."""
    rank, size = mpi.rank(), mpi.size()
    dtypes = (torch.float32, torch.int64) if count < 1_000_000 else (torch.float32,)
    expected = {(dtype, turn): total(size, count, dtype, turn) for dtype in dtypes for turn in range(TURNS)}
    for (dtype, turn), right in expected.items():
        x = values(rank, count, dtype, turn)
        assert mpi.allreduce(x) is x
        assert x.equal(right)
        y = values(rank, count, dtype, turn).view(-1, 1)
        assert mpi.allreduce(y, op="sum").view(-1).equal(right)
    given = [values(rank, count, dtype, turn) for dtype, turn in expected]
    handles = [mpi.allreduce_async(x) for x in given]
    for x, handle, right in zip(given, handles, expected.values(), strict=True):
        assert handle.wait() is x
        assert x.equal(right)


@pytest.mark.parametrize(("given", "out", "most"), [(X, None, 9), (X, Y, 9), (X.numpy(), None, 14), (1, None, 16)])
def test_an_allreduce_passes_few_frames(mpi, given, out, most):
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("torchmpi_py."):
            calls[-1].append(frame.f_code)

    for _ in range(4):  # the first calls look things up; once in hundreds, records of operations under way are kept
        calls.append([])
        sys.setprofile(note)
        mpi.allreduce(given, out=out)
        sys.setprofile(None)
    assert len(min(calls, key=len)) <= most


def test_results_in_other_memory(mpi):
    """Calls with out= share a plan only where shapes and memory allow it; a tensor may have other memory by then."""
    x, out, right = values(mpi.rank(), 6), torch.empty(6), total(mpi.size(), 6)
    for _ in range(TURNS):
        assert mpi.allreduce(x, out=out) is out
        assert (out - x).equal(right - values(mpi.rank(), 6))
        out.set_(torch.empty(6))
        assert mpi.allreduce((whole := x.repeat(2))[:6], out=whole[3:9]).equal(right)
        with pytest.raises(ValueError, match="shape"):
            mpi.allreduce(x, out=out.view(2, 3))
        assert mpi.allreduce(whole.set_(x.clone())).equal(right)
        assert mpi.allreduce(whole.resize_(3).fill_(1)).eq(mpi.size()).all()


def test_ops_dtypes_and_communicators_are_apart(mpi):
    with mpi.split(mpi.rank() % 2) as half:
        for turn in range(TURNS):
            x = torch.full((5,), mpi.rank() + 1 + turn)
            assert mpi.allreduce(x.clone(), op="max").eq(mpi.size() + turn).all()
            assert mpi.allreduce(x.clone(), op="min").eq(1 + turn).all()
            assert mpi.allreduce(x.double(), op="min").eq(1 + turn).all()
            assert mpi.allreduce(torch.ones(5), comm=half).eq(half.size).all()
            assert mpi.allreduce(torch.ones(5), op="avg").eq(1).all()
            assert mpi.broadcast(x.clone()).eq(1 + turn).all()


def test_parts_of_the_memory_that_are_no_flat_tensor(mpi):
    """Strided, negated, conjugate and differentiable tensors of a size that is kept."""
    mpi.allreduce(torch.ones(4))
    strided = torch.ones(8)
    mpi.allreduce(strided[::2])
    assert strided.tolist() == [mpi.size(), 1] * 4
    for _ in range(TURNS):
        z = torch.full((1,), 1 + 2j)
        mpi.allreduce(z.conj())
        assert z.item() == mpi.size() * (1 + 2j)
    imaginary = torch.full((1,), 1 + 2j).conj().imag
    assert imaginary.is_neg()
    mpi.allreduce(torch.ones(1))
    assert mpi.allreduce(imaginary).item() == -2 * mpi.size()
    weight = torch.nn.Parameter(torch.ones(4))
    mpi.allreduce(weight)
    assert weight.detach().eq(mpi.size()).all()


def test_autograd_sees_that_a_tensor_was_overwritten(mpi):
    weight = torch.ones(3, requires_grad=True)
    for _ in range(TURNS):
        x = torch.ones(3)
        loss = (weight * x).sum()
        before = x._version
        mpi.allreduce(x)
        assert x._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_errors_are_those_of_a_first_call(mpi):
    comm = mpi.split(0)
    for _ in range(TURNS):
        mpi.allreduce(torch.ones(4))
        mpi.allreduce(torch.ones(4), op="sum")
        mpi.allreduce(torch.ones(4), comm=comm)
    comm.free()
    for error, words, x, options in (
        (ValueError, "op 'mean' is unknown", torch.ones(4), {"op": "mean"}),
        (ValueError, "op 'band' is not defined for torch.float32", torch.ones(4), {"op": "band"}),
        (ValueError, "flavour 'fast' is unknown", torch.ones(4), {"flavour": "fast"}),
        (TypeError, "sparse_coo tensor; pass a dense tensor", torch.ones(4).to_sparse(), {}),
        (TypeError, "group.*comm=", torch.ones(4), {"group": None}),
        (CommunicatorError, "was freed", torch.ones(4), {"comm": comm}),
    ):
        with pytest.raises(error, match=words):
            mpi.allreduce(x, **options)
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.func.vmap(mpi.allreduce)(torch.ones(1, 4))
    assert mpi.allreduce(torch.ones(4)).eq(mpi.size()).all()


def test_nothing_is_kept_alive_and_what_is_kept_does_not_grow(mpi):
    for _ in range(TURNS):
        x = mpi.allreduce(torch.ones(4))
        y = mpi.allreduce_async(torch.ones(4)).wait()
        ends = [weakref.ref(x), weakref.ref(y)]
        del x, y
        assert [end() for end in ends] == [None, None]
    with mpi.split(0) as comm:
        for count in range(kept_plans._MOST_KEPT + 20):
            mpi.allreduce(torch.ones(count), comm=comm)
        assert 0 < len(comm.plans) <= kept_plans._MOST_KEPT


def test_a_call_from_a_signal_handler_is_refused(mpi):
    """The handler runs within a call of the plan that its own call would use."""
    errors, comm = [], mpi.split(0)

    def handler(*_):
        try:
            mpi.allreduce(torch.ones(2), comm=comm)
        except CommunicatorError as error:
            errors.append(str(error))

    former = signal.signal(signal.SIGUSR1, handler)
    try:
        mpi.allreduce(torch.ones(2), comm=comm)
        kept = next(iter(comm.plans.values()))
        work = kept.work

        def interrupted(*tensors):
            signal.raise_signal(signal.SIGUSR1)
            return work(*tensors)

        kept.work = interrupted
        x = torch.ones(2)
        assert mpi.allreduce(x, comm=comm) is x
        assert x.eq(mpi.size()).all()
        assert len(errors) == 1
        assert "already" in errors[0]
    finally:
        signal.signal(signal.SIGUSR1, former)
        comm.free()


def test_in_a_forked_child(mpi, torch_group):
    """An operation that was kept by the parent does not let the child call MPI."""
    for call in (mpi.allreduce, mpi.allreduce_async, mpi.broadcast, distributed.all_reduce):
        for _ in range(TURNS):
            call(torch.ones(2))
        if (child := os.fork()) == 0:
            try:
                call(torch.ones(2))
            except NotStarted:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, call


def test_after_stop(mpi):
    """An operation that was kept before does not hide that the package is stopped."""
    mpi.allreduce(torch.ones(2))
    mpi.stop()
    try:
        with pytest.raises(NotStarted):
            mpi.allreduce(torch.ones(2))
    finally:
        mpi.start()
    assert mpi.allreduce(torch.ones(2)).eq(mpi.size()).all()
