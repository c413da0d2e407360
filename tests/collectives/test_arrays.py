"""numpy arrays, and cupy's by a stand-in for DLPack, in every verb: values, memory, kinds of results, and errors."""

import itertools
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]

DTYPES = ["float64", "float32", "float16", "int8", "int64", "uint8", "uint16", "bool", "complex64", "complex128"]
FORMS = ["blocking", "asynchronous"]


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


@pytest.fixture(params=["numpy", "cupy"])
def library(request):
    """(array of a numpy array, numpy array of an array, type) of a library."""
    if request.param == "numpy":
        return np.array, np.asarray, np.ndarray
    request.getfixturevalue("cupy")
    return (lambda x: StandIn(torch.from_numpy(np.array(x)))), (lambda x: x.tensor.numpy()), StandIn


def held(rank, num_rows, dtype="float64"):
    """What a rank holds: a value for each rank and place."""
    j = np.arange(num_rows * 3).reshape(num_rows, 3)
    return ((j * 7 + j // 11 + rank * 3) % 5).astype(dtype)


def total(size, num_rows, dtype="float64"):
    stack = [held(rank, num_rows, dtype) for rank in range(size)]
    return np.logical_or.reduce(stack) if dtype == "bool" else sum(stack[1:], stack[0].copy())


def finished(mpi, verb, form, *args, **kwargs):
    if form == "blocking":
        return getattr(mpi, verb)(*args, **kwargs)
    return getattr(mpi, f"{verb}_async")(*args, **kwargs).wait()


def case(mpi, verb, num_rows, dtype):
    """(x, arguments, result, whether the result replaces x) of a verb, as numpy arrays."""
    rank, size = mpi.rank(), mpi.size()
    last, mine = size - 1, slice(rank * num_rows, (rank + 1) * num_rows)

    def everywhere(num_rows):
        return [held(r, num_rows, dtype) for r in range(size)]

    own = held(rank, num_rows * size if verb in ("reduce_scatter", "scatter", "alltoall") else num_rows, dtype)
    args, result, is_in_place = {
        "broadcast": lambda: ((last,), held(last, num_rows, dtype), True),
        "allreduce": lambda: ((), total(size, num_rows, dtype), True),
        "reduce": lambda: ((last,), total(size, num_rows, dtype) if rank == last else own, True),
        "allgather": lambda: ((), np.concatenate(everywhere(num_rows)), False),
        "gather": lambda: ((last,), np.concatenate(everywhere(num_rows)) if rank == last else None, False),
        "reduce_scatter": lambda: ((), total(size, num_rows * size, dtype)[mine], False),
        "scatter": lambda: ((last,), held(last, num_rows * size, dtype)[mine], False),
        "alltoall": lambda: ((), np.concatenate([x[mine] for x in everywhere(num_rows * size)]), True),
        "sendreceive": lambda: (((rank - 1) % size, (rank + 1) % size), held((rank - 1) % size, num_rows, dtype), True),
    }[verb]()
    return own, args, result, is_in_place


VERBS = ["broadcast", "allreduce", "reduce", "allgather", "gather", "reduce_scatter", "scatter", "alltoall"]
WITH_OUT = [verb for verb in VERBS if verb != "broadcast"]


@pytest.mark.parametrize("verb", [*VERBS, "sendreceive"])
def test_every_verb(mpi, verb, library):
    """Rows of a rank: none, one, and a flavour's for small and for larger tensors; each dtype in each form."""
    to_array, to_numpy, kind = library
    sizes = itertools.cycle((0, 1, 1000))
    calls = [(form, next(sizes), dtype) for dtype in DTYPES for form in FORMS]
    for form, num_rows, dtype in [*calls, *((form, 100_003, "float32") for form in FORMS)]:
        own, args, expected, is_in_place = case(mpi, verb, num_rows, dtype)
        x = to_array(own)
        result = finished(mpi, verb, form, x, *args)
        where = f"{verb}, {num_rows} rows, {dtype}, {form}, rank {mpi.rank()}"
        if expected is None:
            assert result is None, where
            continue
        assert type(result) is kind, where
        assert (result is x) == is_in_place, where
        assert to_numpy(result).dtype == dtype, where
        np.testing.assert_array_equal(to_numpy(result), expected, where)
        if not is_in_place:
            np.testing.assert_array_equal(to_numpy(x), own, where)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("verb", WITH_OUT)
def test_out(mpi, verb, library):
    """Numpy arrays that are read-only are sent, but not written."""
    to_array, to_numpy, kind = library
    own, args, expected, _ = case(mpi, verb, 1000, "float32")
    shape = own.shape if expected is None else expected.shape
    for form in FORMS:
        out = to_array(np.full(shape, 77, "float32"))
        x = read_only(own) if kind is np.ndarray else to_array(own)
        result = finished(mpi, verb, form, x, *args, out=out)
        np.testing.assert_array_equal(to_numpy(x), own)
        is_written = verb not in ("reduce", "gather") or mpi.rank() == mpi.size() - 1
        np.testing.assert_array_equal(to_numpy(out), expected if is_written else 77)
        assert result is (None if expected is None else out)
        if kind is np.ndarray:
            with pytest.raises(ValueError, match="out is a read-only numpy array"):
                finished(mpi, verb, form, own, *args, out=read_only(out))


def test_a_read_only_array_is_not_written(mpi):
    for verb in ("broadcast", "allreduce", "reduce", "alltoall", "sendreceive"):
        own, args, _, _ = case(mpi, verb, 10, "float64")
        with pytest.raises(ValueError, match=rf"{verb}: x is a read-only numpy array.*x\.copy\(\)"):
            getattr(mpi, verb)(read_only(own), *args)


def test_send_and_recv(mpi, library):
    to_array, to_numpy, _ = library
    rank, size = mpi.rank(), mpi.size()
    x, y = to_array(held(rank, 40)), to_array(np.zeros((40, 3)))
    sent = mpi.send_async(x, (rank + 1) % size)
    assert mpi.recv(y, (rank - 1) % size) is y
    assert sent.wait() is x
    np.testing.assert_array_equal(to_numpy(y), held((rank - 1) % size, 40))


def test_arrays_of_any_layout(mpi):
    layouts = [lambda x: x.T, lambda x: x[::2], lambda x: x[:, 1], lambda x: np.asfortranarray(x), lambda x: x[3:4]]
    for layout in layouts:
        whole = held(mpi.rank(), 1000)
        before, x = whole.copy(), layout(whole)
        assert mpi.allreduce(x) is x
        np.testing.assert_array_equal(x, layout(total(mpi.size(), 1000)))
        if x.base is whole:  # nothing beside the view is touched
            layout(whole)[...] = layout(before)
            np.testing.assert_array_equal(whole, before)


def test_kinds_of_arrays(mpi, tmp_path):
    """Without dimensions, of a file, in symmetric memory, a tensor's partner; numbers of numpy are numbers."""
    x = np.array(2.5)
    assert mpi.allreduce(x) is x
    assert x == 2.5 * mpi.size()
    assert isinstance(mpi.allreduce(np.float64(2.5)), float)
    of_file = np.memmap(tmp_path / "x", dtype="float32", mode="w+", shape=(3000,))
    for x in (of_file, mpi.symmetric_empty(3000).numpy()):
        x[:] = held(mpi.rank(), 1000, "float32").ravel()
        assert mpi.allreduce(x) is x
        np.testing.assert_array_equal(x, total(mpi.size(), 1000, "float32").ravel())
    x, out = held(mpi.rank(), 10), np.empty((10, 3))
    assert mpi.allreduce(x=x, out=out) is out
    assert mpi.allreduce(x, out=x) is x  # the same array twice
    for got in (x, out):
        np.testing.assert_array_equal(got, total(mpi.size(), 10))
    x = np.ones(10) if mpi.rank() % 2 else torch.ones(10, dtype=torch.float64)
    result = mpi.allreduce(x)
    assert result is x
    assert (np.asarray(result) == mpi.size()).all()


def test_large_arrays_are_not_copied(mpi):
    """At a size of each flavour; the result is where the array was."""
    for num_rows in (100, 20_000, 400_000):
        x = held(mpi.rank(), num_rows, "float32")
        address = x.__array_interface__["data"][0]
        assert mpi.allreduce(x).__array_interface__["data"][0] == address
        np.testing.assert_array_equal(x, total(mpi.size(), num_rows, "float32"))


def test_a_handle_of_arrays(mpi):
    x = held(mpi.rank(), 100)
    handle = mpi.allgather_async(x)
    result = handle.wait()
    assert handle.wait() is result
    assert handle.done()
    assert "allgather" in repr(handle)
    handle.synchronize()
    with pytest.raises(TypeError, match=r"handle.done\(\)"):
        bool(handle)
    mpi.wait_all([mpi.allreduce_async(x), mpi.allreduce_async(held(0, 4))])


def test_cupy_waits_for_each_result(mpi, cupy):
    x = StandIn(torch.ones(4))
    handle = mpi.allreduce_async(x)
    assert x.num_exports == 1
    assert handle.wait() is x
    assert len(cupy.ordered) == 1  # in the thread that waits
    assert x.tensor.tolist() == [mpi.size()] * 4


def test_objects_stay_objects(mpi):
    arrays = mpi.allgather_object(held(mpi.rank(), 2))
    for rank, each in enumerate(arrays):
        np.testing.assert_array_equal(each, held(rank, 2))
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
        (np.ones(3), torch.ones(3), "out must be one too, not Tensor"),
        (np.ones(3), StandIn(torch.ones(3)), "not StandIn"),
        (torch.ones(3), np.ones(3), "must be a torch.Tensor, not ndarray"),
        ([1.0, 2.0], None, "x must be a torch.Tensor, not list"),
    ):
        with pytest.raises(TypeError, match=words):
            mpi.allreduce(x, out=out)
    with pytest.raises(ValueError, match="out has shape"):
        mpi.allreduce(np.ones(3, "float32"), out=np.ones(4, "float32"))
