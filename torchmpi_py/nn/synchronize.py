"""Functions that make the parameters, buffers and gradients of a module equal on all ranks.

Small tensors share flat buffers of up to ``Tuning.fuse_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from torchmpi_py.collectives import verbs
from torchmpi_py.collectives.check import check_all_with_allreduce, differing
from torchmpi_py.collectives.verbs import allgather_object
from torchmpi_py.core import agree
from torchmpi_py.core.communicators import Communicator, resolve
from torchmpi_py.core.tensors import check_tensor
from torchmpi_py.errors import RanksDisagree
from torchmpi_py.nn.buckets import Buckets, buckets_of, grouped
from torchmpi_py.nn.members import parameters_of

_buckets: WeakKeyDictionary[torch.nn.Module, Buckets] = WeakKeyDictionary()  # buckets of synchronize_gradients
ParametersOf = Callable[[torch.nn.Module], Iterable[torch.nn.Parameter]]
reduced_in_backward: WeakSet[Any] = WeakSet()  # all registrations (AsyncBackward)


def synchronize_parameters(module: torch.nn.Module, average: bool = False, *, comm: Communicator | None = None) -> None:
    """Give every rank the parameters and buffers of rank 0, or the mean over all ranks if ``average`` is True.

    Every rank of ``comm`` must make this call, with a module that has the same parameters and buffers in the same
    order. **Overwrites** the parameters and buffers of ``module``. Integer buffers, such as counters, always get
    the values of rank 0.

    Args:
        module (torch.nn.Module): module to change.
        average (bool): False (default) uses the values of rank 0; True uses the mean over the ranks.
        comm (Communicator): ranks that make this call; default None, the current level.

    Raises:
        TypeError: ``module`` is not a module, or a parameter cannot be sent.
        RanksDisagree: on every rank, before anything is changed, if names, shapes or dtypes differ between ranks.

    Examples:
        >>> net = torch.nn.Linear(4, 1)  # different initial values on each rank
        >>> mpi.nn.synchronize_parameters(net)
        >>> mpi.nn.check_with_allreduce(net)  # raises RanksDisagree if the values differ between ranks
    """
    check_module("synchronize_parameters", module)
    named = dict([*module.named_parameters(), *module.named_buffers()])
    for name, x in named.items():
        check_tensor("synchronize_parameters", name, x)
    check_alike("synchronize_parameters", named, resolve(comm), strides=False)
    _make_equal([x.detach() for x in named.values()], average, resolve(comm))


def check_alike(call: str, named: Mapping[str, Tensor], comm: Communicator, *, strides: bool = True) -> None:
    """Raise RanksDisagree, on all ranks, unless names, shapes, dtypes and their order are the same on all ranks.

    All ranks of ``comm`` must call it. Collectives match tensors by their position, so tensors in a different order
    would be mixed up. With ``strides``, the strides are compared too, because a bucket stores each gradient with its
    strides.
    """
    # torch.compile and DDP add prefixes to names, and a program may use them on some ranks only.
    bare = {name.replace("_orig_mod.", "").removeprefix("module."): x for name, x in named.items()}
    table = [(name, *_description(x, strides)) for name, x in bare.items()]
    tables = allgather_object(table, comm=comm)
    rank = agree.first_different(tables)
    if rank is not None:
        _, here, there = agree.first_difference(tables[0], tables[rank], "nothing more")
        raise RanksDisagree(f"{call}: rank 0 has {here}, rank {rank} has {there}; create equal modules on all ranks")


def _description(x: Tensor, strides: bool) -> tuple[Any, ...]:
    """Return shape, dtype and device type; with ``strides`` also the relevant strides, unless ``x`` is row-major."""
    own = [stride for stride, count in zip(x.stride(), x.shape, strict=True) if count > 1]
    more = [f"strides {own}"] if strides and not x.is_contiguous() else []
    return tuple(x.shape), str(x.dtype), x.device.type, *more


def _make_equal(tensors: Sequence[Tensor], average: bool, comm: Communicator) -> None:
    """Give all ranks of ``comm`` the tensors of rank 0, or with ``average`` the mean of floating-point tensors."""
    averaged = [x for x in tensors if average and (x.is_floating_point() or x.is_complex())]
    copied = [x for x in tensors if not average or not (x.is_floating_point() or x.is_complex())]
    fused(averaged, lambda flat: verbs.allreduce(flat, op="avg", comm=comm))
    fused(copied, lambda flat: verbs.broadcast(flat, 0, comm=comm))


def synchronize_buffers(module: torch.nn.Module, how: Literal["average", "root"] = "average") -> None:
    """Make the buffers of a module, such as the statistics of BatchNorm, equal on all ranks.

    Every rank of the current level must make this call, with a module that has the same buffers. **Overwrites** the
    buffers that differ; buffers that are equal on all ranks keep their bits.

    Args:
        module (torch.nn.Module): module to change.
        how (str): "average" (default) replaces floating-point buffers with the mean over the ranks, and other buffers
            (counters, masks) with the values of rank 0. "root" replaces all buffers with the values of rank 0.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: ``how`` is neither "average" nor "root".
    """
    if how not in ("average", "root"):
        raise ValueError(f"synchronize_buffers: how={how!r} is unknown; pass 'average' or 'root'")
    check_module("synchronize_buffers", module)
    buffers = {name: buffer for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    comm = resolve(None)
    _make_equal([buffers[name].detach() for name in differing(buffers, comm)], how == "average", comm)


def synchronize_gradients(module: torch.nn.Module, average: bool = True) -> None:
    """Replace every ``p.grad`` by the mean (or sum) of the gradient over the ranks.

    Every rank of the current level must make this call, once per step, after ``backward``. The same parameters must be
    trainable on every rank. A parameter without a gradient on this rank counts as zero. A parameter without a gradient
    on any rank keeps None.

    **Overwrites** ``p.grad``: it becomes a view of a flat buffer, which the next call overwrites. Clone a gradient that
    you want to keep, save or send.

    Args:
        module (torch.nn.Module): module whose gradients are reduced.
        average (bool): True (default) divides the sum by the number of ranks; False keeps the sum, as TorchMPI did.

    Raises:
        TypeError: ``module`` is not a module, or a parameter is a DTensor.
        ValueError: ``register_async_backward`` or an optimizer of ``optim`` already reduces these gradients.
        RanksDisagree: on every rank, in the first call, if names, shapes or dtypes differ between ranks.

    Examples:
        >>> net = torch.nn.Linear(4, 1)
        >>> net(torch.ones(2, 4) * mpi.rank()).sum().backward()
        >>> mpi.nn.synchronize_gradients(net)
        >>> bool((net.weight.grad == mpi.size() - 1).all())  # the mean of 2 * rank
        True
    """
    call, comm = "synchronize_gradients", resolve(None)
    check_module(call, module)
    check_unregistered(call, module.named_parameters())
    buckets = _buckets.get(module)
    if buckets is None or buckets.comm is not comm or not buckets.serve(module):
        named = parameters_to_reduce(call, module, comm)
        buckets = _buckets[module] = buckets_of(module, list(named.values()), comm)
    buckets.reduce("avg" if average else "sum")


def check_with_allreduce(module: torch.nn.Module) -> None:
    """Check that parameters and buffers have the same bits on every rank of the current level.

    Every rank must make this call, which changes nothing. To make different values equal, call
    ``synchronize_parameters`` or ``synchronize_buffers``.

    Args:
        module (torch.nn.Module): module to check.

    Raises:
        TypeError: ``module`` is not a module.
        RanksDisagree: on every rank, with the names that differ and the ranks that differ from most others.
    """
    check_module("check_with_allreduce", module)
    buffers = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    check_all_with_allreduce({**dict(module.named_parameters()), **buffers})


def parameters_to_reduce(
    call: str, module: torch.nn.Module, comm: Communicator, parameters: ParametersOf = parameters_of
) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters of a module by name. All ranks of ``comm`` must call it.

    Raise TypeError if ``module`` is not a module or a parameter is a DTensor. Raise ValueError if a registration
    already reduces one of the gradients, and RanksDisagree if the parameters differ between ranks. Raise
    RuntimeError in inference mode.
    """
    check_module(call, module)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: gradients cannot be reduced in torch.inference_mode(); leave that block first")
    trained = {p for p in parameters(module) if p.requires_grad}
    named = {name: p for name, p in module.named_parameters() if p in trained}
    check_whole(call, named)
    check_unregistered(call, named.items())
    check_alike(call, named, comm)
    return named


def check_module(what: str, module: object) -> None:
    """Raise TypeError if the argument is not a module but, for example, its parameters or a state_dict."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{what}: expected a torch.nn.Module, found {type(module).__name__}; pass the module itself")


def check_whole(what: str, named: Mapping[Any, Tensor]) -> None:
    """Raise TypeError if a parameter is a DTensor, or an unsupported tensor such as an uninitialized parameter."""
    for name, x in named.items():
        if hasattr(x, "device_mesh"):
            raise TypeError(
                f"{what}: parameter {name} is a DTensor, and this rank holds only a part of it. Average the gradients "
                "with torch's own functions over the mesh's data-parallel dimension; see docs/from_0.1.md and "
                "examples/mnist_hybrid.py"
            )
        if type(x) is not torch.nn.Parameter:
            check_tensor(what, f"parameter {name}", x)


def check_unregistered(call: str, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise ValueError if a registration already reduces one of the gradients. A second reduction would be wrong."""
    if not (registrations := list(reduced_in_backward)):
        return
    registered = [name for name, p in named if p.requires_grad and any(p in each.names for each in registrations)]
    if registered:
        raise ValueError(
            f"{call}: register_async_backward, or an optimizer of optim, already reduces the gradients of "
            f"{', '.join(registered[:3])} ({len(registered)} in all). A second reduction would be wrong; "
            "call remove() on the registration or optimizer first"
        )


def fused(tensors: Iterable[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    """Run an in-place collective on all tensors, fused into the groups that ``grouped`` yields."""
    for group in grouped(tensors):
        if len(group) == 1:
            collective(group[0])
            continue
        flat = torch.cat([x.reshape(-1) for x in group])
        collective(flat)
        for x, part in zip(group, torch.split(flat, [x.numel() for x in group]), strict=True):
            x.copy_(part.view_as(x))
