"""Hogwild: the ranks of a node train one copy of the parameters, without locks.

The memory of the copy is the root's part of a segment of symmetric memory (``symmetric.py``); the parameters of every
rank become views of it. So each rank's optimizer steps in place, and the others see the step at once. When two ranks
write the same number at the same moment, one of the two changes may be lost; where gradients are sparse, or steps
small, the loss does not matter. Gradients, buffers and the states of optimizers stay each rank's own.

Whole storages move, not single tensors: parameters that shared memory before (tied or overlapping ones) still do, and
strides stay. The views keep the mapping alive, so they are valid as long as a view exists, also after ``mpi.stop()``.
Parameters that leave the memory (``network.to(dtype)``) would be trained by their rank alone: before every step of an
optimizer a hook looks where its parameters are.

Source: Niu, Recht, Re, Wright: Hogwild: a lock-free approach to parallelizing stochastic gradient descent (2011).
"""

from __future__ import annotations

import functools
import itertools
import weakref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchmpi_py.core import agree, communicators, journal
from torchmpi_py.core.channels import Channel
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.errors import ParameterServerError, RanksDisagree, Unavailable
from torchmpi_py.memory import symmetric
from torchmpi_py.nn import BlockSequential
from torchmpi_py.paramserver.update import gathered, wait_for_all, wait_for_all_after_training

_ALIGNMENT = 512  # bytes: no two storages share a cache line


class Hogwild:
    """Makes one copy of the parameters of all ranks of ``comm`` (default: the current level). Collective.

    The copy holds rank 0's values on return. Then every rank trains as if it were alone: no call per step is needed.
    With n ranks there are n times as many steps, so a smaller learning rate is in place, and less momentum.
    ``network.load_state_dict`` copies into the parameters, so one rank's call acts for all. A parameter that is
    replaced, added, or given other memory (``network.to(dtype)``, ``p.data = ...``) is not shared: the next step of an
    optimizer that trains it raises ParameterServerError on that rank, and ``free`` does on all. A compiled step does
    not look.

    Raises Unavailable if the ranks are on several nodes, ValueError for parameters that are not on the CPU,
    RanksDisagree if the ranks have different parameters; each on every rank.
    """

    def __init__(self, network: torch.nn.Module, *, comm: Communicator | None = None) -> None:
        self.network = network
        self._comm = resolve(comm)
        allgather = functools.partial(gathered, self._comm, "Hogwild")
        agree.run_on_all_ranks(allgather, lambda: _flatten(network), (ValueError,), str, agree.first_as(ValueError))
        parameters = list(network.parameters())
        _check(parameters, self._comm)
        storages = _storages(parameters)
        places = journal.run_together("Hogwild", self._comm, lambda: _places(self._comm.direct, storages))
        if self._comm.rank == 0:
            for storage, place in zip(storages, places, strict=True):
                place.copy_(_bytes(storage))
        wait_for_all(self._comm, "Hogwild")  # the values are there before any rank trains
        _move(parameters, storages, places)
        self._watch = _Watch(network, places)
        self.is_free = False

    def free(self) -> None:
        """Give every rank a copy of its own, with the same values on all. Collective; idempotent.

        ParameterServerError, on every rank, if a parameter had left the shared memory on any; all are free then, too.
        """
        if self.is_free:
            return
        self.is_free = True
        left = next((name for name, p in self.network.named_parameters() if not _is_shared(p)), None)
        by_rank = [left]
        if communicators.is_started() and not self._comm.is_free:
            wait_for_all_after_training(self._comm, "Hogwild.free")  # all have done their last step
            by_rank = gathered(self._comm, "Hogwild.free", left)
        parameters = [p for p in self.network.parameters() if self._watch.holds(_address(p))]
        storages = _storages(parameters)
        _move(parameters, storages, [_bytes(storage).clone() for storage in storages])
        self._watch.end()
        for rank, name in enumerate(by_rank):
            if name is not None:
                raise ParameterServerError(f"Hogwild.free: rank {rank}: {_why(name)}")


class _Watch:
    """The memory of a Hogwild, and a hook before the steps of optimizers.

    The memory stays mapped, so that no other memory has its addresses. The watch lasts until the Hogwild is freed, or
    the network is gone.
    """

    def __init__(self, network: torch.nn.Module, places: list[Tensor]) -> None:
        self._places = places  # one after another in one segment
        self._begin = places[0].data_ptr() if places else 0
        self._end = places[-1].data_ptr() + places[-1].nbytes if places else 0
        self._network = weakref.ref(network)
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        _watches.append(self)
        weakref.finalize(network, self.end)

    def holds(self, address: int) -> bool:
        """Whether an address lies in the memory."""
        return self._begin <= address < self._end

    def end(self) -> None:
        """Take the hook out. Idempotent."""
        self._hook.remove()
        if self in _watches:
            _watches.remove(self)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """ParameterServerError if the optimizer trains a parameter of the network that is not shared."""
        network = self._network()
        if network is None or torch.compiler.is_compiling():
            return
        outside = {id(p) for group in optimizer.param_groups for p in group["params"] if not _is_shared(p)}
        if outside and (name := next((name for name, p in network.named_parameters() if id(p) in outside), None)):
            raise ParameterServerError(f"{type(optimizer).__name__}.step: {_why(name)}")


_watches: list[_Watch] = []


def _is_shared(p: Tensor) -> bool:
    """Whether a parameter lies in the memory of a Hogwild, be it of another one that has taken the network over."""
    if p.layout is not torch.strided:
        return False
    address = p.data_ptr()
    return any(watch.holds(address) for watch in tuple(_watches)) or p.numel() == 0


def _why(name: str) -> str:
    return (
        f"parameter {name} does not lie in the memory that the ranks share, so this rank would train it alone; it was "
        "replaced, added, or given other memory (.to(), .data) after Hogwild was made: free() it before such changes, "
        "and make another after them"
    )


def _flatten(network: torch.nn.Module) -> None:
    """Let blocks be flat now: their first use would move their parameters out of the shared memory."""
    for module in network.modules():
        for block in module.blocks if isinstance(module, BlockSequential) else ():
            _ = block.weights


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
