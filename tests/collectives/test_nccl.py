"""Flavour nccl: when it refuses, and its groups. ``test_verbs.py`` has values by gloo, ``test_gpu_verbs`` NCCL's."""

import types

import pytest
import torch
from test_verbs import CASES
from torch import distributed

from torchmpi_py.collectives.flavours import torch_group
from torchmpi_py.collectives.flavours.torch_group import Gloo, Nccl, ProcessGroupOfTorch
from torchmpi_py.collectives.reductions import kernel
from torchmpi_py.core.channels import DIRECT, Channel, Place
from torchmpi_py.errors import CommunicatorError
from torchmpi_py.memory import gpus

pytestmark = pytest.mark.timeout(240)


def test_what_is_gathered():
    """Bitwise ops, those on truth values, and products of complex numbers; gloo lacks only the last."""
    for dtype, op in CASES:
        is_product = dtype.is_complex and op == "prod"
        is_bitwise = op in ("band", "bor", "bxor", "land", "lor") or dtype == torch.bool
        assert Nccl()._knows(kernel(dtype, op)) == (not is_product and not is_bitwise), (dtype, op)
        assert Gloo()._knows(kernel(dtype, op)) == (not is_product), (dtype, op)


def test_what_is_missing(monkeypatch):
    """What is asked first is missing first; then the next one is."""
    checks = [
        (distributed, "is_available", False, True, "without NCCL"),
        (distributed, "is_nccl_available", False, True, "without NCCL"),
        (torch.cuda, "is_available", False, True, "sees no CUDA device"),
        (gpus, "table", None, {}, "start(with_cuda=True)"),
    ]
    for owner, check, missing, there, words in checks:
        monkeypatch.setattr(owner, check, lambda missing=missing: missing)
        assert words in Nccl().missing("cuda")
        monkeypatch.setattr(owner, check, lambda there=there: there)
    assert Nccl().missing("cuda") == ""


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("ABCD", ""),
        ("ABAC", "ranks 0 and 2 share GPU-A; NCCL needs one GPU per rank"),
        ("ABBB", "ranks 1, 2 and 3 share GPU-B; "),
    ],
)
def test_who_shares_a_gpu(monkeypatch, names, reason):
    places = [Place(0, 0), Place(0, 1), Place(2, 0), Place(2, 1)]
    elsewhere = {Place(4, 0): "GPU-A"}  # a rank of the world that is not in this communicator
    table = {place: f"GPU-{letter}" for place, letter in zip(places, names, strict=True)} | elsewhere
    monkeypatch.setattr(gpus, "table", lambda: table)
    channel = Channel(types.SimpleNamespace(rank=1, size=len(places)), places, DIRECT)
    told = Nccl().refuses(channel)
    assert told.startswith(reason) if reason else told == ""


@pytest.mark.mpi
def test_availability(mpi, monkeypatch):
    def statuses(device):
        return {row.status for row in mpi.availability() if (row.flavour, row.device) == ("nccl", device)}

    assert statuses("cpu") == {"unimplemented", "unavailable: serves cuda tensors only"}
    if not torch.cuda.is_available():
        assert any(status.startswith("unavailable: this torch") for status in statuses("cuda"))
    monkeypatch.setattr(Nccl, "missing", lambda self, device: "")
    places = mpi.communicator().direct.places
    monkeypatch.setattr(gpus, "table", lambda: {place: f"GPU-{place}" for place in places})
    assert statuses("cuda") == {"unimplemented", "available"}


class Library:
    """What flavour nccl uses of ProcessGroupNCCL."""

    Options = types.SimpleNamespace
    log: list = []

    def __init__(self, store, rank, size, options):
        self.log.append(f"made by {rank} of {size}")
        assert options._timeout.total_seconds() == 1800

    def allreduce(self, tensors, options):
        """Newer versions return nothing when they use the current stream."""
        self.log.append("allreduce")
        assert options.reduceOp == distributed.ReduceOp.MAX
        assert not getattr(options, "asyncOp", False)

    def broadcast(self, tensors, options):
        self.log.append("broadcast")
        return types.SimpleNamespace(wait=lambda: self.log.append("wait"))

    def reduce(self, tensors, options):
        raise RuntimeError("unhandled system error")

    def shutdown(self):
        self.log.append("shutdown")


@pytest.mark.mpi
def test_a_group_from_its_making_to_its_end(mpi, monkeypatch):
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Library, raising=False)
    monkeypatch.setattr(torch_group.torch.cuda, "synchronize", lambda: Library.log.append("synchronize"))
    monkeypatch.setattr(Library, "log", [])
    with mpi.split(0) as comm:
        x = torch.ones(3)
        Nccl().allreduce(comm.direct, x, x, "max")
        Nccl().broadcast(comm.direct, x, 0)
        with pytest.raises(CommunicatorError, match="flavour nccl: reduce failed: unhandled system error"):
            Nccl().reduce(comm.direct, x, x, "sum", 0)
        assert Library.log == [f"made by {comm.rank} of {comm.size}", "allreduce", "broadcast", "wait"]
    assert Library.log[4:] == ["synchronize", "shutdown"]


@pytest.mark.mpi
def test_a_group_that_cannot_be_made(mpi, monkeypatch):
    def factory(store, rank, size, options):
        if rank == size - 1:
            raise ValueError("no GPUs found")

    factory.Options = types.SimpleNamespace
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", factory, raising=False)
    with (
        mpi.split(0) as comm,
        pytest.raises(CommunicatorError, match=r"flavour nccl: .*rank \d+: no GPUs found.*NCCL_DEBUG=INFO"),
    ):
        ProcessGroupOfTorch(comm.direct, Nccl())
