"""Parameters, buffers and gradients of a module, made equal on all ranks.

Every function runs on the current level. Small tensors share flat buffers of up to ``Tuning.fuse_bytes``.
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

_buckets: WeakKeyDictionary[torch.nn.Module, Buckets] = WeakKeyDictionary()  # of synchronize_gradients
ParametersOf = Callable[[torch.nn.Module], Iterable[torch.nn.Parameter]]
reduced_in_backward: WeakSet[Any] = WeakSet()  # all AsyncBackward


def synchronize_parameters(module: torch.nn.Module, average: bool = False, *, comm: Communicator | None = None) -> None:
    """Give every rank rank 0's parameters and buffers, or with ``average`` the mean of all ranks'.

    Collective over ``comm`` (default: the current level), to whose ranks the rest refers.
    Buffers of whole numbers (such as counters) come from rank 0 in both cases. The module must have the same parameters
    and buffers, of the same names, shapes and dtypes, in the same order on every rank: RanksDisagree, on all ranks, if
    not, before anything is changed.
    """
    check_module("synchronize_parameters", module)
    named = dict([*module.named_parameters(), *module.named_buffers()])
    for name, x in named.items():
        check_tensor("synchronize_parameters", name, x)
    check_alike("synchronize_parameters", named, resolve(comm), strides=False)
    _make_equal([x.detach() for x in named.values()], average, resolve(comm))


def check_alike(call: str, named: Mapping[str, Tensor], comm: Communicator, *, strides: bool = True) -> None:
    """RanksDisagree, on all ranks, unless names, shapes and dtypes are the same in the same order. Collective.

    Tensors that ranks bring together are paired by their place: in another order they would be mixed up. With
    ``strides`` the strides are compared too, because a bucket holds its gradients in the order of their strides.
    """
    # torch.compile and DDP put a prefix before names, perhaps on some ranks alone.
    bare = {name.replace("_orig_mod.", "").removeprefix("module."): x for name, x in named.items()}
    table = [(name, *_description(x, strides)) for name, x in bare.items()]
    tables = allgather_object(table, comm=comm)
    rank = agree.first_different(tables)
    if rank is not None:
        _, here, there = agree.first_difference(tables[0], tables[rank], "nothing more")
        raise RanksDisagree(f"{call}: the ranks' modules differ: rank 0 has {here}, rank {rank} has {there}")


def _description(x: Tensor, strides: bool) -> tuple[Any, ...]:
    """Shape, dtype and type of device; with ``strides`` also those that matter, if ``x`` is not row-major."""
    own = [stride for stride, count in zip(x.stride(), x.shape, strict=True) if count > 1]
    more = [f"strides {own}"] if strides and not x.is_contiguous() else []
    return tuple(x.shape), str(x.dtype), x.device.type, *more


def _make_equal(tensors: Sequence[Tensor], average: bool, comm: Communicator) -> None:
    """Give all ranks of ``comm`` rank 0's tensors, or with ``average`` the mean of those that have one."""
    averaged = [x for x in tensors if average and (x.is_floating_point() or x.is_complex())]
    copied = [x for x in tensors if not average or not (x.is_floating_point() or x.is_complex())]
    fused(averaged, lambda flat: verbs.allreduce(flat, op="avg", comm=comm))
    fused(copied, lambda flat: verbs.broadcast(flat, 0, comm=comm))


def synchronize_buffers(module: torch.nn.Module, how: Literal["average", "root"] = "average") -> None:
    """Make the buffers equal that differ between ranks, such as BatchNorm's statistics. Collective.

    "average": those of floating-point numbers become the mean of all ranks', the others (counters, masks) rank 0's.
    "root": all become rank 0's. Buffers that are equal on all ranks keep their bits. The module has the same buffers on
    every rank. Raises ValueError for another ``how``.
    """
    if how not in ("average", "root"):
        raise ValueError(f"how={how!r}: give 'average' or 'root'")
    check_module("synchronize_buffers", module)
    buffers = {name: buffer for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    comm = resolve(None)
    _make_equal([buffers[name].detach() for name in differing(buffers, comm)], how == "average", comm)


def synchronize_gradients(module: torch.nn.Module, average: bool = True) -> None:
    """Replace every ``p.grad`` by its mean over the ranks (sum, with ``average=False``). Collective.

    TorchMPI summed. A parameter that got no gradient here counts as zero; one that got none on any rank keeps None.
    Call it once per step, after ``backward``. The same parameters must be trainable on every rank. ``p.grad`` becomes a
    view of a flat buffer, which is made at the first call and overwritten at the next: clone what you want to keep,
    save or send. ValueError for parameters that ``register_async_backward`` reduces; RanksDisagree, on all ranks, where
    the first call finds other names, shapes or dtypes on another rank.
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
    """Check that parameters and buffers are the same, bit for bit, on every rank. Collective.

    Raises RanksDisagree on every rank, with the names of those that differ and the ranks that differ from most others.
    ``synchronize_parameters`` and ``synchronize_buffers`` make them equal.
    """
    check_module("check_with_allreduce", module)
    buffers = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    check_all_with_allreduce({**dict(module.named_parameters()), **buffers})


def parameters_to_reduce(
    call: str, module: torch.nn.Module, comm: Communicator, parameters: ParametersOf = parameters_of
) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module that take a gradient, by name, the same on all ranks. Collective.

    Raises TypeError for what is no module and for a DTensor, ValueError for a parameter whose gradient is reduced
    already, RanksDisagree where the parameters differ.
    """
    check_module(call, module)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{call}: no gradient can be reduced in memory of torch.inference_mode(); call it outside")
    trained = {p for p in parameters(module) if p.requires_grad}
    named = {name: p for name, p in module.named_parameters() if p in trained}
    check_whole(call, named)
    check_unregistered(call, named.items())
    check_alike(call, named, comm)
    return named


def check_module(what: str, module: object) -> None:
    """TypeError for parameters, or a state_dict, in place of a module."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{what}: expected a torch.nn.Module, found {type(module).__name__}; pass the module itself")


def check_whole(what: str, named: Mapping[Any, Tensor]) -> None:
    """A TypeError for a parameter of which this rank holds a part, or that is not in memory."""
    for name, x in named.items():
        if hasattr(x, "device_mesh"):
            raise TypeError(
                f"{what}: parameter {name} is a DTensor, of which this rank holds a part; average the gradients of "
                "torch's tensor parallelism by torch's own, over the mesh's data-parallel dimension: see "
                "docs/from_0.1.md and examples/mnist_hybrid.py"
            )
        if type(x) is not torch.nn.Parameter:
            check_tensor(what, f"parameter {name}", x)


def check_unregistered(call: str, named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """ValueError if ``register_async_backward`` reduces one of these gradients: a second time gives a wrong number."""
    if not (registrations := list(reduced_in_backward)):
        return
    registered = [name for name, p in named if p.requires_grad and any(p in each.names for each in registrations)]
    if registered:
        raise ValueError(
            f"{call}: a register_async_backward, or an optimizer of optim, reduces the gradients of "
            f"{', '.join(registered[:3])} already ({len(registered)} in all), and reduced twice they would be wrong; "
            "call remove() on it first"
        )


def fused(tensors: Iterable[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
    """Run an in-place collective over all tensors, in the groups and the order of ``grouped``."""
    for group in grouped(tensors):
        if len(group) == 1:
            collective(group[0])
            continue
        flat = torch.cat([x.reshape(-1) for x in group])
        collective(flat)
        for x, part in zip(group, torch.split(flat, [x.numel() for x in group]), strict=True):
            x.copy_(part.view_as(x))
