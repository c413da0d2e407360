"""Hogwild: the ranks of a node train one copy of the parameters, without locks.

The memory of the copy is the root's part of a segment of symmetric memory (``symmetric.py``); the parameters of every
rank become views of it. So each rank's optimizer steps in place, and the others see the step at once. When two ranks
write the same number at the same moment, one of the two changes may be lost; where gradients are sparse, or steps
small, the loss does not matter. Gradients, buffers and the states of optimizers stay each rank's own.

Whole storages move, not single tensors: parameters that shared memory before (tied or overlapping ones) still do, and
strides stay. The views keep the mapping alive, so they are valid as long as a view exists, also after ``mpi.stop()``.

Source: Niu, Recht, Re, Wright: Hogwild: a lock-free approach to parallelizing stochastic gradient descent (2011).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torchmpi_py.core import agree, communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.errors import RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.paramserver.update import gathered, wait_for_all, wait_for_all_after_training

_ALIGNMENT = 512  # bytes: no two storages share a cache line


class Hogwild:
    """Makes one copy of the parameters of all ranks of ``comm`` (default: the current level). Collective.

    The copy holds rank 0's values on return. Then every rank trains as if it were alone: no call per step is needed.
    With n ranks there are n times as many steps, so a smaller learning rate is in place, and less momentum.
    ``network.load_state_dict`` copies into the parameters, so one rank's call acts for all; ``network.to(dtype)`` gives
    them other memory, so it ends the sharing for that rank.

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
        wait_for_all(self._comm, "Hogwild")  # the values are there before any rank trains
        _move(parameters, storages, places)
        self._shared = {place.data_ptr() for place in places}
        self.is_free = False

    def free(self) -> None:
        """Give every rank a copy of its own, with the same values on all. Collective; idempotent."""
        if self.is_free:
            return
        self.is_free = True
        if communicators.is_started() and not self._comm.is_free:
            wait_for_all_after_training(self._comm, "Hogwild.free")  # all have done their last step
        parameters = [p for p in self.network.parameters() if _address(p) in self._shared]
        storages = _storages(parameters)
        _move(parameters, storages, [_bytes(storage).clone() for storage in storages])


def _check(parameters: list[torch.nn.Parameter], comm: Communicator) -> None:
    """Unavailable, ValueError or RanksDisagree, on every rank, unless all can share one copy."""
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
    everyone = gathered(comm, "Hogwild", mine)
    for rank, theirs in enumerate(everyone):
        if others := {device for device, *_ in theirs if device != "cpu"}:
            raise ValueError(
                f"Hogwild: rank {rank} has parameters on {', '.join(sorted(others))}; only memory of the host is "
                "shared: train on the CPU (network.cpu()), or take paramserver.DownpourUpdate for GPUs"
            )
    if (rank_that_differs := agree.first_different(everyone)) is not None:
        raise RanksDisagree(
            f"Hogwild: the parameters of rank {rank_that_differs} differ from rank 0's in number, shape, stride, dtype "
            "or in what shares memory; make the same network on all ranks"
        )


def _storages(parameters: list[torch.nn.Parameter]) -> list[torch.UntypedStorage]:
    """The storages of the parameters, each once; parameters without elements have none."""
    storages = {_address(p): p.untyped_storage() for p in parameters}
    return [storage for storage in storages.values() if storage.nbytes() > 0]


def _address(p: Tensor) -> int:
    return p.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _places(channel: Channel, storages: list[torch.UntypedStorage]) -> list[Tensor]:
    """Memory for each storage in the root's part of a new segment. Collective."""
    offsets = [0, *itertools.accumulate(-(-s.nbytes() // _ALIGNMENT) * _ALIGNMENT for s in storages)]
    memory = symmetric.shared_bytes(channel, offsets[-1])[0].numpy()
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
        for storage, offset in zip(storages, offsets[:-1], strict=True)
    ]


def _move(parameters: list[torch.nn.Parameter], storages: list[torch.UntypedStorage], places: list[Tensor]) -> None:
    """Move the parameters to other memory, with the same offsets, shapes and strides."""
    place_of = {storage.data_ptr(): place for storage, place in zip(storages, places, strict=True)}
    for p in parameters:
        if (place := place_of.get(_address(p))) is not None:
            line = torch.empty(0, dtype=p.dtype, device="cpu")
            p.data = line.set_(place.untyped_storage(), p.storage_offset(), p.shape, p.stride())
