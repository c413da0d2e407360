"""Hogwild: the ranks of a node train one copy of the parameters, without locks.

The memory of the copy is the root's part of a segment of symmetric memory (``symmetric.py``); the parameters of every
rank become views of it. So each rank's own optimizer steps in place, and the others see it at once. Two that write the
same number at the same moment may lose one of the two changes; where gradients are sparse, or steps small, that does
not hurt. Gradients, buffers and what optimizers keep stay each rank's own.

Whole storages move, not single tensors: what shared memory before (tied or overlapping parameters) still does, and
strides stay. The views keep the mapping alive, so they are valid as long as anybody has one, also after ``mpi.stop()``.

Source: Niu, Recht, Re, Wright: Hogwild: a lock-free approach to parallelizing stochastic gradient descent (2011).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchmpi_py.core import communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.paramserver import agreement

_ALIGNMENT = 512  # bytes: no two storages share a cache line


class Hogwild:
    """Makes one copy of the parameters of all ranks of ``comm`` (default: the current level). Collective.

    It holds rank 0's values when this returns. Then every rank trains as if it were alone: no call per step is needed.
    With n ranks there are n times as many steps, so a smaller learning rate is in place, and less momentum.
    ``load_state_dict`` copies into the parameters, and so acts on one rank for all; ``network.to(dtype)`` gives them
    other memory, and so ends the sharing for that rank.

    Raises Unavailable if the ranks are on several nodes, ValueError for parameters that are not on the CPU,
    RanksDisagree if the ranks have different parameters; each on every rank.
    """

    def __init__(self, network: torch.nn.Module, *, comm: Communicator | None = None) -> None:
        self.network = network
        self._comm = resolve(comm)
        parameters = list(network.parameters())
        _check(parameters, self._comm)
        storages = _storages(parameters)
        places = journal.run_together("Hogwild", self._comm, lambda: _places(self._comm.direct, storages))
        if self._comm.rank == 0:
            for storage, place in zip(storages, places, strict=True):
                place.copy_(_bytes(storage))
        agreement.wait_for_all(self._comm, "Hogwild")  # the values are there before anybody trains
        _move(parameters, storages, places)
        self._shared = {place.data_ptr() for place in places}
        self.is_free = False

    def free(self) -> None:
        """Give every rank a copy of its own, of the same values on all. Collective; idempotent."""
        if self.is_free:
            return
        self.is_free = True
        if communicators.is_started() and not self._comm.is_free:
            agreement.wait_for_all_after_training(self._comm, "Hogwild.free")  # all have done their last step
        parameters = [p for p in self.network.parameters() if _address(p) in self._shared]
        storages = _storages(parameters)
        _move(parameters, storages, [_bytes(storage).clone() for storage in storages])


def _check(parameters: list[torch.nn.Parameter], comm: Communicator) -> None:
    """Raise, on every rank, unless all can share one copy."""
    if comm.num_nodes > 1:
        raise Unavailable(
            f"Hogwild: {comm!r}: ranks on several nodes have no memory in common; share within each node, with "
            "comm=mpi.communicator(1), and exchange between nodes with paramserver.DifferenceUpdate"
        )
    storages = {s.data_ptr(): (index, s.nbytes()) for index, s in enumerate(_storages(parameters))}
    mine = [
        (p.device.type, tuple(p.shape), p.stride(), str(p.dtype), p.storage_offset(), storages.get(_address(p)))
        for p in parameters
    ]
    everyone = agreement.gathered(comm, "Hogwild", mine)
    for rank, told in enumerate(everyone):
        if others := {device for device, *_ in told if device != "cpu"}:
            raise ValueError(
                f"Hogwild: rank {rank} has parameters on {', '.join(sorted(others))}; only memory of the host is "
                "shared: train on the CPU (network.cpu()), or take paramserver.DownpourUpdate for GPUs"
            )
    for rank, told in enumerate(everyone):
        if told != everyone[0]:
            raise RanksDisagree(
                f"Hogwild: the parameters of rank {rank} differ from rank 0's in number, shape, stride, dtype or "
                "in what shares memory; make the same network on all ranks"
            )


def _storages(parameters: list[torch.nn.Parameter]) -> list[torch.UntypedStorage]:
    """The memory of the parameters, each piece once; those without elements have none."""
    storages = {_address(p): p.untyped_storage() for p in parameters}
    return [storage for storage in storages.values() if storage.nbytes() > 0]


def _address(p: Tensor) -> int:
    return p.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _places(channel: Channel, storages: list[torch.UntypedStorage]) -> list[Tensor]:
    """Room for each piece in the root's part of a new segment. Collective."""
    offsets = [0, *itertools.accumulate(-(-s.nbytes() // _ALIGNMENT) * _ALIGNMENT for s in storages)]
    own = symmetric.memory(channel, offsets[-1], torch.device("cpu"))
    found = symmetric.find(own)
    assert found is not None, "it was just made"
    assert isinstance(found[0], symmetric.Segment), "on the host"
    common = found[0].view(channel.places[0].local, torch.uint8, own.nbytes, owner=own)
    memory = common.numpy()
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
        for storage, offset in zip(storages, offsets[:-1], strict=True)
    ]


def _move(parameters: list[torch.nn.Parameter], storages: list[torch.UntypedStorage], places: list[Tensor]) -> None:
    """Let the parameters lie in other memory, as they do in theirs."""
    place_of = {storage.data_ptr(): place for storage, place in zip(storages, places, strict=True)}
    for p in parameters:
        if (place := place_of.get(_address(p))) is not None:
            line = torch.empty(0, dtype=p.dtype, device="cpu")
            p.data = line.set_(place.untyped_storage(), p.storage_offset(), p.shape, p.stride())
