"""Hogwild: the ranks of a node train one copy of the parameters, without locks.

The copy is in rank 0's part of a segment of symmetric memory (``symmetric.py``), and the parameters of every rank
become views of the copy. Each rank's optimizer changes the parameters in place, so the other ranks see the change
immediately. When two ranks write the same number at the same moment, one of the two changes may be lost. The loss does
not matter if gradients are sparse or steps are small. Gradients, buffers and optimizer states stay separate on each
rank. The alternative, a lock around each step, would let only one rank step at a time.

Hogwild moves whole storages, not single tensors. So tied or overlapping parameters still share memory, and strides do
not change. The views keep the memory mapped, so they remain valid even after ``mpi.stop()``. If a rank moves a
parameter out of the shared memory (``network.to(dtype)``), only this rank trains the parameter. To detect this case, a
hook checks the addresses of the parameters before every step of an optimizer.

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

_ALIGNMENT = 512  # Storages start at multiples of this number of bytes, so that no two of them share a cache line.


class Hogwild:
    """Share one copy of a network's parameters among the ranks of a node, which train the copy without locks.

    All ranks of ``comm`` must call the constructor, which **overwrites** the parameters with rank 0's values.
    Afterwards, every rank trains like a single process, with its own optimizer and without any call per step. With n
    ranks, there are n times as many steps, so use a smaller learning rate and less momentum. If one rank calls
    ``network.load_state_dict``, the parameters of all ranks change.

    A parameter that is added, replaced, or moved to other memory (``network.to(dtype)``, ``p.data = ...``) is not
    shared. On that rank, the next step of an optimizer with the parameter raises ParameterServerError. ``free`` raises
    the error on every rank. Steps inside compiled functions are not checked.

    Args:
        network (torch.nn.Module): network on the CPU whose parameters are shared.
        comm (Communicator): communicator of ranks on one node. Default None, the current level.

    Raises:
        Unavailable: the ranks are on several nodes. Every error in this list is raised on every rank.
        ValueError: a parameter is not on the CPU.
        RanksDisagree: the ranks have different parameters.

    Examples:
        >>> network = torch.nn.Linear(4, 2)
        >>> shared = mpi.paramserver.Hogwild(network)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        >>> for step in range(3):
        ...     optimizer.zero_grad()
        ...     loss = network(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> shared.free()

    Source: Niu, Recht, Re, Wright: Hogwild: a lock-free approach to parallelizing stochastic gradient descent (2011).
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
        wait_for_all(self._comm, "Hogwild")  # No rank may train before rank 0's values are in place.
        _move(parameters, storages, places)
        self._watch = _Watch(network, places)
        self.is_free = False

    def free(self) -> None:
        """End the sharing, and give every rank its own copy of the parameters.

        All ranks must call it, and each rank sleeps until all ranks have called it. Repeated calls have no effect.

        Raises:
            ParameterServerError: a parameter of any rank was no longer in the shared memory. The error is raised on
                every rank, after the sharing has ended.
        """
        if self.is_free:
            return
        self.is_free = True
        unshared = next((name for name, p in self.network.named_parameters() if not _is_shared(p)), None)
        by_rank = [unshared]
        if communicators.is_started() and not self._comm.is_free:
            wait_for_all_after_training(self._comm, "Hogwild.free")  # No rank may train during the copy.
            by_rank = gathered(self._comm, "Hogwild.free", unshared)
        parameters = [p for p in self.network.parameters() if self._watch.holds(_address(p))]
        storages = _storages(parameters)
        _move(parameters, storages, [_bytes(storage).clone() for storage in storages])
        self._watch.end()
        for rank, name in enumerate(by_rank):
            if name is not None:
                raise ParameterServerError(f"Hogwild.free: rank {rank}: {_why(name)}")


class _Watch:
    """The shared memory of a Hogwild, and a hook that runs before every step of an optimizer.

    The memory stays mapped, so that its addresses cannot be reused. The hook remains until the Hogwild is freed or the
    network is garbage-collected.
    """

    def __init__(self, network: torch.nn.Module, places: list[Tensor]) -> None:
        self._places = places  # tensors of bytes in the shared memory, in ascending order of address
        self._begin = places[0].data_ptr() if places else 0
        self._end = places[-1].data_ptr() + places[-1].nbytes if places else 0
        self._network = weakref.ref(network)
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        _watches.append(self)
        weakref.finalize(network, self.end)

    def holds(self, address: int) -> bool:
        """Return whether an address is in the shared memory."""
        return self._begin <= address < self._end

    def end(self) -> None:
        """Remove the hook. Repeated calls have no effect."""
        self._hook.remove()
        if self in _watches:
            _watches.remove(self)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Raise ParameterServerError if the optimizer trains a parameter of the network that is not shared."""
        network = self._network()
        if network is None or torch.compiler.is_compiling():
            return
        outside = {id(p) for group in optimizer.param_groups for p in group["params"] if not _is_shared(p)}
        if outside and (name := next((name for name, p in network.named_parameters() if id(p) in outside), None)):
            raise ParameterServerError(f"{type(optimizer).__name__}.step: {_why(name)}")


_watches: list[_Watch] = []


def _is_shared(p: Tensor) -> bool:
    """Return whether a parameter is empty, or is in the shared memory of any Hogwild.

    The memory of every Hogwild counts, because a later Hogwild may share the same network.
    """
    if p.layout is not torch.strided:
        return False
    address = p.data_ptr()
    return any(watch.holds(address) for watch in tuple(_watches)) or p.numel() == 0


def _why(name: str) -> str:
    return (
        f"parameter {name} is not in the memory that the ranks share, so only this rank would train the parameter. "
        "It was added, replaced, or moved to other memory (.to(), .data) after the Hogwild was created. Before such a "
        "change, call free(). After the change, create a new Hogwild"
    )


def _flatten(network: torch.nn.Module) -> None:
    """Flatten all blocks of the network now. Otherwise, a block's first use would move parameters to other memory."""
    for module in network.modules():
        for block in module.blocks if isinstance(module, BlockSequential) else ():
            _ = block.weights


def _check(parameters: list[torch.nn.Parameter], comm: Communicator) -> None:
    """Raise an error on every rank unless all ranks can share one copy. All ranks of ``comm`` must call it.

    The error is Unavailable, ValueError or RanksDisagree.
    """
    if comm.num_nodes > 1:
        raise Unavailable(
            f"Hogwild: the ranks of {comm!r} are on different nodes and cannot share memory; pass "
            "comm=mpi.communicator(1) to share within each node, and use paramserver.DifferenceUpdate between nodes"
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
                f"Hogwild: rank {rank} has parameters on {', '.join(sorted(others))}, but ranks can share only host "
                "memory; train on the CPU (network.cpu()), or use paramserver.DownpourUpdate for GPUs"
            )
    if (rank_that_differs := agree.first_different(everyone)) is not None:
        raise RanksDisagree(
            f"Hogwild: the parameters of rank {rank_that_differs} differ from rank 0's in number, shape, stride, dtype "
            "or shared storages; create the same network on all ranks"
        )


def _storages(parameters: list[torch.nn.Parameter]) -> list[torch.UntypedStorage]:
    """Return the distinct storages of the parameters, without empty storages."""
    storages = {_address(p): p.untyped_storage() for p in parameters}
    return [storage for storage in storages.values() if storage.nbytes() > 0]


def _address(p: Tensor) -> int:
    return p.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _places(channel: Channel, storages: list[torch.UntypedStorage]) -> list[Tensor]:
    """Allocate memory for each storage in rank 0's part of a new segment, and return one tensor of bytes per storage.

    All ranks of the channel must call it.
    """
    offsets = [0, *itertools.accumulate(-(-s.nbytes() // _ALIGNMENT) * _ALIGNMENT for s in storages)]
    memory = symmetric.shared_bytes(channel, offsets[-1])[0].numpy()
    return [
        torch.frombuffer(memory, dtype=torch.uint8, count=storage.nbytes(), offset=offset)
        for storage, offset in zip(storages, offsets[:-1], strict=True)
    ]


def _move(parameters: list[torch.nn.Parameter], storages: list[torch.UntypedStorage], places: list[Tensor]) -> None:
    """Turn the parameters into views of ``places``, with the same offsets, shapes and strides."""
    place_of = {storage.data_ptr(): place for storage, place in zip(storages, places, strict=True)}
    for p in parameters:
        if (place := place_of.get(_address(p))) is not None:
            line = torch.empty(0, dtype=p.dtype, device="cpu")
            p.data = line.set_(place.untyped_storage(), p.storage_offset(), p.shape, p.stride())
