"""A mistake raises the same clear error on every rank, before a byte moves; afterwards everything still works."""

import decimal
import pathlib
import pickle
import runpy

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchmpi_py.core import config
from torchmpi_py.errors import CommunicatorError, RanksDisagree, Unavailable

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]


def raises_everywhere(mpi, kind, match, call, *args, **kwargs):
    """The call raises ``kind`` on all ranks, with the same words; the next collective is not disturbed."""
    with pytest.raises(kind, match=match) as caught:
        call(*args, **kwargs)
    assert len(set(mpi.allgather_object(type(caught.value).__name__))) == 1
    assert mpi.allreduce(1) == mpi.size()
    return str(caught.value)


@pytest.mark.parametrize("form", ["", "_async"])
def test_ranks_out_of_range(mpi, form):
    x, size = torch.ones(mpi.size()), mpi.size()
    for verb in ("broadcast", "reduce", "gather", "scatter", "broadcast_object"):
        call = getattr(mpi, verb + form)
        raises_everywhere(mpi, ValueError, rf"{verb}: root={size} is not a rank.*0 to", call, x, size)
        raises_everywhere(mpi, ValueError, rf"{verb}: root=-1", call, x, -1)
        raises_everywhere(mpi, TypeError, rf"{verb}: root must be a rank", call, x, 1.0)
    raises_everywhere(mpi, TypeError, "the tensor comes first, then root", getattr(mpi, f"broadcast{form}"), 0, x)
    exchange = getattr(mpi, f"sendreceive{form}")
    raises_everywhere(mpi, ValueError, f"source={size}", exchange, x, size, 0)
    raises_everywhere(mpi, ValueError, "destination=-1", exchange, x, 0, -1)
    raises_everywhere(mpi, ValueError, f"destination={size}", getattr(mpi, f"send{form}"), x, size)
    raises_everywhere(mpi, ValueError, f"source={size}", getattr(mpi, f"recv{form}"), x, size)


def test_tensors_that_cannot_be_written(mpi):
    """Root alone would write into some; all are told."""
    words, x = "cannot write into an expanded", torch.ones(1).expand(4 * mpi.size())
    for verb in ("allreduce", "allreduce_async", "broadcast", "alltoall"):
        raises_everywhere(mpi, ValueError, f"{verb.removesuffix('_async')}: {words}", getattr(mpi, verb), x)
    raises_everywhere(mpi, ValueError, f"reduce: {words}", mpi.reduce, x, mpi.size() - 1)
    raises_everywhere(mpi, ValueError, f"reduce: {words}", mpi.reduce, x.clone(), out=x)
    raises_everywhere(mpi, ValueError, words, mpi.broadcast, torch.ones(1).expand(1 << 40))  # nobody looks at each
    overlapping, interleaved = torch.zeros(4).as_strided((3, 2), (1, 1)), torch.zeros(8).as_strided((2, 3), (3, 2))
    raises_everywhere(mpi, ValueError, words, mpi.allreduce, torch.ones(3, 2), out=overlapping)
    assert (mpi.allreduce(torch.ones(2, 3), out=interleaved) == mpi.size()).all()
    assert (mpi.allreduce(x, out=torch.empty(x.shape)) == mpi.size()).all()


@pytest.mark.parametrize("form", ["", "_async"])
def test_arguments_of_other_packages(mpi, form):
    x = torch.ones(3)
    for verb in ("allreduce", "broadcast", "broadcast_object"):
        call = getattr(mpi, verb + form)
        raises_everywhere(mpi, TypeError, f"^{verb}: .*keyword argument 'typo'; arguments: ", call, x, typo=1)
        raises_everywhere(mpi, TypeError, f"^{verb}: too many positional arguments; arguments: ", call, *[x] * 5)
        raises_everywhere(mpi, TypeError, f"^{verb}: missing .*: '(x|obj)'; arguments: ", call)
    assert x.eq(1).all()


def test_unknown_and_undefined_ops(mpi):
    for verb in ("allreduce", "reduce", "reduce_scatter"):
        call, x = getattr(mpi, verb), torch.ones(mpi.size())
        message = raises_everywhere(mpi, ValueError, "op 'mean' is unknown", call, x, op="mean")
        assert "sum, avg, prod, min, max, band, bor, bxor, land, lor" in message
        words = "'min' is not defined for torch.complex64.*sum, avg, prod"
        raises_everywhere(mpi, ValueError, words, call, x.to(torch.complex64), op="min")
        raises_everywhere(mpi, ValueError, "'avg' is not defined for torch.int64", call, x.long(), op="avg")
        raises_everywhere(mpi, ValueError, "'band' is not defined for torch.float32", call, x, op="band")
    raises_everywhere(mpi, ValueError, "op 'mean' is unknown", mpi.allreduce, 1.0, op="mean")
    raises_everywhere(mpi, ValueError, "'max' is not defined for torch.complex128", mpi.allreduce, 1j, op="max")
    raises_everywhere(mpi, ValueError, "'bor' is not defined for torch.float64", mpi.allreduce, 1.5, op="bor")


def test_an_out_that_does_not_fit(mpi):
    x, size = torch.ones(mpi.size(), 2), mpi.size()
    raises_everywhere(mpi, ValueError, rf"out has shape \(3,\).*\({size}, 2\)", mpi.allreduce, x, out=torch.ones(3))
    raises_everywhere(mpi, ValueError, "but it is torch.float64", mpi.allreduce, x, out=x.double())
    raises_everywhere(mpi, TypeError, "out must be a torch.Tensor, not list", mpi.reduce, x, out=[1.0])
    raises_everywhere(mpi, ValueError, r"the result has shape \(1, 2\)", mpi.reduce_scatter, x, out=x.new_empty(4))
    raises_everywhere(mpi, ValueError, r"the result has shape \(1, 2\)", mpi.scatter, x, out=x.new_empty(2, 2))
    raises_everywhere(mpi, ValueError, "the result has shape", mpi.alltoall, x, out=x.new_empty(4))
    raises_everywhere(mpi, ValueError, "out has a different shape", mpi.allgather, x, out=torch.ones(7, 2))
    raises_everywhere(mpi, TypeError, "out= cannot be used when x is a number", mpi.allreduce, 1.0, out=torch.ones(1))


@pytest.mark.mpi(min_size=2)
def test_what_is_wrong_on_one_rank_only(mpi):
    """What the other ranks cannot see is told to them: nobody is left waiting."""
    x, wrong = torch.ones(1, 2), torch.empty(mpi.size() + (mpi.rank() == 1), 2)
    raises_everywhere(mpi, ValueError, "a different shape.* on rank 1", mpi.allgather, x, out=wrong)
    raises_everywhere(mpi, ValueError, "a different shape.* on rank 1", mpi.gather, x, 1, out=wrong)
    raises_everywhere(mpi, ValueError, "into 64 bits", mpi.allreduce, 2**63 if mpi.rank() == 0 else 1)
    x = torch.ones(2, 3 if mpi.rank() else 4)
    message = raises_everywhere(mpi, RanksDisagree, "only dim 0 may differ", mpi.allgather, x)
    assert "rank 0 passes torch.float32 (2, 4), rank 1 passes torch.float32 (2, 3)" in message
    y = torch.ones(2, dtype=torch.float64 if mpi.rank() else torch.int64)
    raises_everywhere(mpi, RanksDisagree, "rank 0 passes torch.int64", mpi.gather, y)
    handle = mpi.allgather_async(x)
    for _ in range(2):
        raises_everywhere(mpi, RanksDisagree, "only dim 0 may differ", handle.wait)


@pytest.mark.mpi(min_size=2)
def test_attributes_of_errors(mpi):
    """Verb, communicator and rank of the call, in both forms; not known: None."""
    comm, x = mpi.communicator(), torch.ones(2, 3 if mpi.rank() else 4)
    calls = [
        (lambda: mpi.allgather(x), RanksDisagree, "allgather"),
        (lambda: mpi.allgather_async(x).wait(), RanksDisagree, "allgather"),
        (lambda: mpi.allreduce(torch.ones(1, device="meta")), Unavailable, "allreduce"),
        (lambda: mpi.check_with_allreduce(mpi.rank()), RanksDisagree, "check_with_allreduce"),
    ]
    for call, kind, verb in calls:
        with pytest.raises(kind) as caught:
            call()
        assert (caught.value.verb, caught.value.comm, caught.value.rank) == (verb, comm, mpi.rank())
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.verb, again.comm, again.rank) == (str(caught.value), verb, None, mpi.rank())
    error = CommunicatorError("no call")
    assert (error.verb, error.comm, error.rank) == (None, None, None)
    before, after = (mpi.rank() - 1) % mpi.size(), (mpi.rank() + 1) % mpi.size()
    handle = mpi.recv_async(torch.empty(1), before)
    with pytest.raises(mpi.CollectiveTimeout) as caught:
        handle.wait(0.01)
    assert (caught.value.verb, caught.value.comm, caught.value.rank) == ("recv", comm, mpi.rank())
    mpi.barrier()
    mpi.send(torch.ones(1), after)
    assert handle.wait() == 1


def test_things_that_are_no_tensors(mpi):
    for verb in ("broadcast", "allreduce", "allgather", "reduce_scatter", "alltoall"):
        raises_everywhere(mpi, TypeError, f"{verb}: x must be a torch.Tensor, not list", getattr(mpi, verb), [1.0])
    raises_everywhere(mpi, TypeError, "not NoneType", mpi.allreduce, None)
    raises_everywhere(mpi, TypeError, "sparse_coo tensor; pass a dense tensor", mpi.allreduce, torch.eye(3).to_sparse())
    raises_everywhere(mpi, TypeError, "not Decimal", mpi.allreduce, decimal.Decimal("1.5"))
    raises_everywhere(mpi, ValueError, "into 64 bits; pass it as a float", mpi.allreduce, 2**70)
    assert torch.equal(mpi.broadcast(torch.ones(2), np.int64(mpi.size() - 1)), torch.ones(2))
    with torch.device("meta"):
        assert mpi.allreduce(2) == 2 * mpi.size()


def test_examples_in_docstrings(mpi):
    script = pathlib.Path(__file__).parents[2] / "scripts/dev/docstrings.py"
    assert runpy.run_path(str(script))["run_examples"]({"mpi": mpi, "torch": torch}) == []


@pytest.mark.mpi(min_size=2)
def test_shapes_that_do_not_split(mpi):
    for verb in ("reduce_scatter", "scatter", "alltoall"):
        for x in (torch.ones(mpi.size() + 1), torch.ones(())):
            raises_everywhere(mpi, ValueError, "cannot be split into", getattr(mpi, verb), x)


def test_communicators_that_cannot_be_used(mpi):
    raises_everywhere(mpi, TypeError, "comm=3 is not a torchmpi_py communicator", mpi.allreduce, torch.ones(1), comm=3)
    comm = mpi.split(0)
    comm.free()
    comm.free()
    raises_everywhere(mpi, CommunicatorError, "was freed.*create a new one", mpi.allreduce, torch.ones(1), comm=comm)


UNEQUAL_MESSAGES = [  # what rank 0 sends, what rank 1 expects
    (torch.arange(1, 9), torch.zeros(4, dtype=torch.int64)),
    (torch.arange(1, 4), torch.zeros(6, dtype=torch.int64)),
    (torch.arange(1, 7, dtype=torch.int32), torch.zeros(6)),
    (torch.arange(300_000.0), torch.zeros(6, dtype=torch.bfloat16)),
    (torch.arange(6, dtype=torch.uint8), torch.zeros(6, dtype=torch.bool)),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["recv", "recv_async", "sendreceive"])
def test_a_message_that_does_not_fit_is_an_error_where_it_arrives(mpi, way):
    """MPI takes the bits of another dtype, and fewer of them, without a word. The next message is right."""
    rank = mpi.rank()
    pair = mpi.split(int(rank > 1))
    for given, expected in UNEQUAL_MESSAGES if rank < 2 else ():
        x, other = (given.clone(), expected) if rank == 0 else (expected.clone(), given)
        words = rf"rank {1 - rank} sent .*bytes of {other.dtype} where {x.nbytes} bytes of {x.dtype} were expected"
        if way == "sendreceive":
            with pytest.raises(RanksDisagree, match=words):
                mpi.sendreceive(x, 1 - rank, 1 - rank)
            mpi.barrier(comm=pair)
            assert mpi.sendreceive(given + rank, 1 - rank, 1 - rank)[-1] == given[-1] + 1 - rank
        elif rank == 0:
            handles = [mpi.send_async(x, 1), mpi.send_async(given + 1, 1)]
            mpi.wait_all(handles)
        else:
            with pytest.raises(RanksDisagree, match=words):
                mpi.recv(x, 0) if way == "recv" else mpi.recv_async(x, 0).wait()
            assert torch.equal(mpi.recv(torch.empty_like(given), 0), given + 1)
        mpi.barrier(comm=pair)
    assert mpi.allreduce(1) == mpi.size()


@pytest.mark.mpi(min_size=2)
def test_a_message_of_another_dtype_behind_a_large_one_is_no_mismatch(mpi):
    """It arrives while the large one, which the receive has matched, is still on its way."""
    for step in range(8):
        if mpi.rank() == 0:
            handles = [mpi.send_async(torch.full((2_000_000,), float(step)), 1), mpi.send_async(torch.tensor(step), 1)]
            mpi.wait_all(handles)
        elif mpi.rank() == 1:
            assert mpi.recv(torch.zeros(2_000_000), 0)[-1] == step
            assert mpi.recv(torch.tensor(-1), 0) == step


@pytest.mark.mpi(min_size=2)
def test_a_receive_under_way_catches_no_piece_of_another_verb(mpi, monkeypatch):
    monkeypatch.setattr(config, "current", config.Tuning(native_async_bytes=8, message_bytes=100))
    rank, size = mpi.rank(), mpi.size()
    before, after, x = (rank - 1) % size, (rank + 1) % size, torch.full((size * 50,), float(rank))
    waiting = mpi.recv_async(torch.zeros(25), before)
    assert mpi.sendreceive(torch.full((25,), 10.0 + rank), before, after).tolist() == [10.0 + before] * 25
    assert torch.equal(mpi.alltoall(x), torch.arange(float(size)).repeat_interleave(50))
    mpi.gather(x, 0)
    mpi.send(torch.full((25,), 20.0 + rank), after)
    assert waiting.wait().tolist() == [20.0 + before] * 25


def test_an_out_that_shares_memory_with_x(mpi):
    """MPI forbids it; MPICH says so on some ranks only, and Open MPI says nothing."""
    rank, size = mpi.rank(), mpi.size()
    inputs = torch.stack([torch.arange(2.0 * size) + r for r in range(size)])
    out, mine = torch.zeros(2 * size), slice(2 * rank, 2 * rank + 2)
    out[:2] = inputs[rank, :2]
    assert torch.equal(mpi.allgather(out[:2], out=out), inputs[:, :2].flatten())
    x = inputs[rank].clone()
    assert torch.equal(mpi.reduce_scatter(x, out=x[:2]), inputs.sum(0)[mine])
    x = inputs[rank].clone()
    assert torch.equal(mpi.scatter(x, size - 1, out=x[:2]), inputs[-1, mine])
    x = torch.cat([inputs[rank], torch.zeros(1)])
    assert torch.equal(mpi.allreduce(x[:-1], out=x[1:]), inputs.sum(0))
    if size > 1:
        z = torch.ones(size)
        for call in (mpi.scatter, mpi.reduce_scatter):
            raises_everywhere(mpi, ValueError, "the result has shape", call, z, out=z)


class Wrapper(torch.Tensor):
    """A tensor around another one, without memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return args[0]


class Plain(torch.Tensor):
    """A tensor of another type, with memory as any other."""


def nested(**options):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **options)


WITHOUT_MEMORY = {
    "a Wrapper without its own memory .*; pass the plain tensor": lambda: torch.Tensor._make_wrapper_subclass(
        Wrapper, (4,)
    ),
    "a FakeTensor without its own memory": lambda: FakeTensorMode().from_tensor(torch.ones(4)),
    r"a MaskedTensor; pass .*\.get_data": lambda: torch.masked.masked_tensor(torch.ones(2), torch.ones(2).bool()),
    r"a nested tensor; pass the result of \.to_padded_tensor": nested,
    r"a nested tensor; .*\.to_padded_tensor": lambda: nested(layout=torch.jagged),
    r"a quantized tensor; .*\.dequantize": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "on the meta device, so it has no val": lambda: torch.nn.Parameter(torch.ones(4, device="meta")),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*deprecated", "ignore:.*converting to")
@pytest.mark.parametrize("words", WITHOUT_MEMORY)
def test_tensors_without_memory(mpi, words):
    make = WITHOUT_MEMORY[words]
    for verb in ("allreduce", "allgather_async", "broadcast"):
        raises_everywhere(mpi, TypeError, f"{verb.removesuffix('_async')}: x is {words}", getattr(mpi, verb), make())
    raises_everywhere(mpi, TypeError, f"sendreceive: x is {words}", mpi.sendreceive, make(), 0, 0)
    raises_everywhere(mpi, TypeError, f"out is {words}", mpi.allreduce, torch.ones(4), out=make())
    raises_everywhere(mpi, TypeError, f"mine is {words}", mpi.check_with_allreduce, make(), "mine")
    module = torch.nn.Module()
    module.held = make() if isinstance(make(), torch.nn.Parameter) else torch.nn.Buffer(make())
    raises_everywhere(mpi, TypeError, f"parameters: held is {words}", mpi.nn.synchronize_parameters, module)
    raises_everywhere(mpi, TypeError, f"held is {words}", mpi.nn.check_with_allreduce, module)


def test_other_types_with_memory(mpi):
    for make in (lambda x: x.as_subclass(Plain), torch.nn.Parameter, torch.nn.Buffer):
        x = make(torch.arange(3.0) + mpi.rank())
        assert mpi.allreduce(x) is x
        expected = sum(torch.arange(3.0) + rank for rank in range(mpi.size()))
        assert torch.equal(x.detach().as_subclass(torch.Tensor), expected)
        assert mpi.allreduce(make(torch.empty(0))).numel() == 0
        mpi.check_with_allreduce(x)


UNPACKED = [name for name in ("uint4", "int4", "bits8", "float4_e2m1fn_x2", "float8_e8m0fnu") if hasattr(torch, name)]


def test_dtypes_that_cannot_be_reduced_are_moved(mpi):
    for name in UNPACKED:
        x = torch.full((4,), mpi.rank(), dtype=torch.uint8).view(getattr(torch, name))
        for call in (mpi.allreduce, mpi.allreduce_async, mpi.reduce) if name != "float8_e8m0fnu" else ():
            for flavour in ("mpi", "shared"):
                raises_everywhere(mpi, ValueError, f"{x.dtype} cannot be reduced; unpack", call, x, flavour=flavour)
        root = mpi.size() - 1
        assert mpi.broadcast(x, root).view(torch.uint8).tolist() == [root] * 4
