"""numpy arrays, and cupy's by a stand-in for DLPack, in every verb: values, memory, kinds of results, and errors."""

import sys
import types

import numpy as np
import pytest
import torch
from support.values import total, values
from test_verbs import MOVES, REDUCTIONS, Way
from torch.utils.dlpack import from_dlpack, to_dlpack

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

DTYPES = [torch.float64, torch.float32, torch.float16, torch.int8, torch.int64, torch.uint8, torch.uint16, torch.bool]
DTYPES += [torch.complex64, torch.complex128]


class StandIn:
    """An array with cupy's protocol, on the host: DLPack, and no other way to its memory."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.num_exports = 0

    def __dlpack__(self, **options):
        self.num_exports += 1
        return to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.fixture
def cupy(monkeypatch):
    """A module of cupy's name, with the two names that are used."""
    module = types.ModuleType("cupy")
    module.ndarray = StandIn
    module.ordered = []  # tensors that cupy's stream has waited for

    def imported(tensor):
        module.ordered.append(tensor)
        return StandIn(from_dlpack(to_dlpack(tensor)))

    module.from_dlpack = imported
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class ArrayWay(Way):
    """A verb gets arrays that have the memory of tensors: in any layout, read-only where nothing is to be written."""

    def __init__(self, mpi, text):
        super().__init__(mpi, text)
        self.is_numpy = "numpy" in text

    def array(self, x):
        return x.numpy() if self.is_numpy else StandIn(x)

    def __call__(self, verb, x, *args, **kwargs):
        given, out = self.array(x), kwargs.get("out")
        if out is not None:
            kwargs["out"] = self.array(out)
        if out is not None and self.is_numpy:
            given.flags.writeable = False
            with pytest.raises(ValueError, match="out is a read-only numpy array"):
                super().__call__(verb, given, *args, **kwargs | {"out": read_only(kwargs["out"])})
        result = super().__call__(verb, given, *args, **kwargs)
        if result is None or result is given:
            return None if result is None else x
        if result is kwargs.get("out"):
            return out
        assert type(result) is (np.ndarray if self.is_numpy else StandIn)
        return torch.from_numpy(result) if self.is_numpy else result.tensor


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("text", ["numpy", "numpy asynchronous", "cupy", "cupy asynchronous"])
def test_every_verb(mpi, cupy, text):
    way = ArrayWay(mpi, text)
    with way.naming_the_case():
        for turn, dtype in enumerate(DTYPES):
            for do in (*REDUCTIONS, *MOVES):
                do(way, dtype, *["sum"] * (do in REDUCTIONS), turn)


def test_a_read_only_array_is_not_written(mpi):
    x, rank = np.ones((mpi.size(), 3)), mpi.rank()
    calls = (("broadcast", 0), ("allreduce",), ("reduce", mpi.size() - 1), ("alltoall",), ("sendreceive", rank, rank))
    for verb, *args in calls:
        with pytest.raises(ValueError, match=rf"{verb}: x is a read-only numpy array.*x\.copy\(\)"):
            getattr(mpi, verb)(read_only(x), *args)


@pytest.mark.parametrize("text", ["numpy", "cupy"])
def test_send_and_recv(mpi, cupy, text):
    array, rank, size = ArrayWay(mpi, text).array, mpi.rank(), mpi.size()
    x, y = array(values(rank, 40)), array(got := torch.zeros(40))
    sent = mpi.send_async(x, (rank + 1) % size)
    assert mpi.recv(y, (rank - 1) % size) is y
    assert sent.wait() is x
    assert torch.equal(got, values((rank - 1) % size, 40))


def test_arrays_of_any_layout(mpi):
    """Nothing is touched beside what a view shows."""
    for layout in (lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1], lambda x: x[3:4]):
        whole, summed = (x.view(1000, 3).numpy() for x in (values(mpi.rank(), 3000), total(mpi.size(), 3000)))
        expected, x = whole.copy(), layout(whole)
        assert mpi.allreduce(x) is x
        layout(expected)[...] = layout(summed)
        np.testing.assert_array_equal(whole, expected)


def test_kinds_of_arrays(mpi, tmp_path):
    """Without dimensions, of a file, in symmetric memory, a tensor's partner; numbers of numpy are numbers."""
    x = np.array(2.5)
    assert mpi.allreduce(x) is x
    assert x == 2.5 * mpi.size()
    assert isinstance(mpi.allreduce(np.float64(2.5)), float)
    of_file = np.memmap(tmp_path / "x", dtype="float32", mode="w+", shape=(3000,))
    for x in (of_file, mpi.symmetric_empty(3000).numpy()):
        x[:] = values(mpi.rank(), 3000)
        assert mpi.allreduce(x) is x
        np.testing.assert_array_equal(x, total(mpi.size(), 3000))
    x, out = values(mpi.rank(), 30).numpy(), np.empty(30, "float32")
    assert mpi.allreduce(x=x, out=out) is out
    assert mpi.allreduce(x, out=x) is x  # the same array twice
    for got in (x, out):
        np.testing.assert_array_equal(got, total(mpi.size(), 30))
    x = np.ones(10) if mpi.rank() % 2 else torch.ones(10, dtype=torch.float64)
    result = mpi.allreduce(x)
    assert result is x
    assert (np.asarray(result) == mpi.size()).all()


def test_cupy_waits_for_each_result(mpi, cupy):
    x = StandIn(torch.ones(4))
    handle = mpi.allreduce_async(x)
    assert x.num_exports == 1
    assert handle.wait() is x
    assert len(cupy.ordered) == 1  # in the thread that waits
    assert x.tensor.tolist() == [mpi.size()] * 4


def test_objects_stay_objects(mpi):
    for rank, each in enumerate(mpi.allgather_object(np.array([mpi.rank()]))):
        np.testing.assert_array_equal(each, [rank])
    assert mpi.broadcast_object(np.float32(3)) == 3


def test_arrays_that_no_tensor_stands_in_for(mpi):
    for x, remedy in (
        (np.array(["a", "b"]), "astype"),
        (np.array([object(), None]), "astype"),
        (np.zeros(4, dtype=[("a", "f4"), ("b", "i4")]), "astype"),
        (np.zeros(4, dtype="longdouble"), "astype"),
        (np.zeros(4, dtype=">f8"), "newbyteorder"),
        (np.arange(4.0)[::-1], "ascontiguousarray"),
        (np.ma.masked_array(np.zeros(3), [0, 1, 0]), r"x\.mask"),
    ):
        with pytest.raises(TypeError, match=f"allreduce: x .*{remedy}"):
            mpi.allreduce(x)


def test_x_and_out_of_two_kinds(mpi, cupy):
    for x, out, words in (
        (np.ones(3), torch.ones(3), "out must be a numpy.ndarray, not Tensor"),
        (np.ones(3), StandIn(torch.ones(3)), "not StandIn"),
        (torch.ones(3), np.ones(3), "must be a torch.Tensor, not ndarray"),
        ([1.0, 2.0], None, "x must be a torch.Tensor, not list"),
    ):
        with pytest.raises(TypeError, match=words):
            mpi.allreduce(x, out=out)
    with pytest.raises(ValueError, match="out has shape"):
        mpi.allreduce(np.ones(3, "float32"), out=np.ones(4, "float32"))
