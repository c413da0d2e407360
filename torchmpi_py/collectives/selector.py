"""The selector chooses the flavour of each call without a ``flavour`` argument.

The selector is a table. A row belongs to a collective, a scope (``node``: all ranks on one node; ``nodes``: several),
symmetric or other tensors, and a type of device. A row is an ordered list of choices. A choice consists of the largest
size in bytes, the flavour, and the reason. The rows come from the defaults below, from the measurements of
``autotune``, and from assignments.

A look-up takes one dictionary access and one bisection, without communication. Therefore the table, the size, and the
kind of memory of a tensor must be the same on all ranks. The ranks do not exchange their choices in each call, because
the exchange would take as long as a small collective.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torchmpi_py.collectives.flavour import Flavour
from torchmpi_py.collectives.registry import BY_NAME, DEVICES, FLAVOURS, status
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import Unavailable, Unimplemented
from torchmpi_py.memory import caches

SCOPES = ("node", "nodes")


class Choice(NamedTuple):
    """The ``flavour`` for sizes up to ``max_bytes`` (infinite in the last choice); ``why`` is the reason, as text."""

    max_bytes: float
    flavour: str
    why: str


class Key(NamedTuple):
    """The calls to which a list of choices applies."""

    verb: str
    scope: str = "node"
    symmetric: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        where = "one node" if self.scope == "node" else "several nodes"
        return f"{self.verb} on {where}{', symmetric' * self.symmetric}{', cuda' * (self.device == 'cuda')}"


_KEYS = tuple(Key(*parts) for parts in itertools.product(COLLECTIVES, SCOPES, (False, True), DEVICES))


class Choices(NamedTuple):
    """The flavours for one collective on a communicator, each with the largest size in bytes for which it is used."""

    limits: list[float]
    flavours: list[Flavour]

    def flavour_for(self, num_bytes: int) -> Flavour:
        """Return the flavour for a size."""
        return self.flavours[bisect.bisect_left(self.limits, num_bytes)]


ASSIGNED = "assigned"
"""The reason (``Choice.why``) of a flavour that the program has assigned."""
NODES_MEASURED = 4  # The defaults for several nodes were measured with this number of nodes.
OF_OWN_CORES = "default for one rank per core (higher for more ranks per core): fewer barriers for small tensors"
"""The reason for a limit below which a flavour with fewer barriers is faster. The limit grows if ranks share cores."""
OF_THREE_RANKS = "default for more than two ranks (lower for two ranks): fewer barriers for small tensors"
"""The reason for a similar limit, which is smaller (``_OF_TWO_RANKS_BYTES``) for two ranks."""
_OF_TWO_RANKS_BYTES = 16 << 10
_OF_INTEL_BYTES = {OF_THREE_RANKS: 512 << 10, OF_OWN_CORES: 64 << 10}
"""Lower bounds of limits for Intel MPI, whose transfers within a node work like ``shared``, but without Python."""
OF_FEW_NODES = f"default for up to {NODES_MEASURED} nodes (higher for more nodes): fewer messages for small tensors"
"""The reason for a limit above which a ring of nodes is faster. The limit grows with the ring's number of steps."""


class Selector:
    """The table from which the flavour of each call is chosen.

    Print ``mpi.selector`` to see which flavour is chosen for which size, and why. Assign to ``mpi.selector`` to choose
    flavours yourself; every rank must make the same assignments. A value is a flavour, or a list of (largest size in
    bytes, flavour) in ascending order that ends with ``math.inf``. The size is the size of ``x``, or in gather
    and allgather the size of the result. A key is a collective, which may be followed by:

    - ``"node"`` or ``"nodes"``: only for communicators on one node, or on several nodes;
    - ``True`` or ``False``: only for tensors from ``mpi.symmetric_empty``, or only for other tensors;
    - ``"cpu"`` or ``"cuda"``: only for tensors on this type of device.

    If a flavour cannot carry out a call, the next flavour in the list is used, and after the list any other flavour.
    ``print(mpi.availability())`` shows why a flavour cannot be used.

    Examples:
        >>> import math
        >>> former = mpi.selector["allreduce", "node"]
        >>> mpi.selector["allreduce", "node"] = [(65536, "mpi"), (math.inf, "ring")]
        >>> [choice.flavour for choice in mpi.selector["allreduce", "node"]]
        ['mpi', 'ring']
        >>> mpi.selector["allreduce", "node"] = [(limit, flavour) for limit, flavour, why in former]
    """

    def __init__(self) -> None:
        self._rows: dict[Key, list[Choice]] = _defaults()
        self._num_cores: float = math.inf
        self.generation = 0
        self.source = "built-in defaults"

    def use_cores(self, num_cores: int) -> None:
        """Set the number of cores that the ranks of this node share."""
        self._num_cores = num_cores
        self.generation += 1

    def load(self, rows: dict[Key, list[Choice]], source: str) -> None:
        """Replace the whole table with ``rows``; ``source`` describes their origin."""
        self._rows = dict(rows)
        self.source = source
        self.generation += 1

    def __setitem__(self, key: str | tuple[object, ...], choices: str | Sequence[tuple[float, str]]) -> None:
        parts, checked = _checked_key(key), _checked_choices(choices)
        devices = sorted({device for choice in checked for device in BY_NAME[choice.flavour].devices})
        num_parts = len(key) if isinstance(key, tuple) else 1
        for others in itertools.product(*(SCOPES, (False, True), devices)[num_parts - 1 :]):
            self._rows[Key(*parts[:num_parts], *others)] = checked  # type: ignore[arg-type]
        self.generation += 1

    def __getitem__(self, key: str | tuple[object, ...]) -> list[Choice]:
        default = [Choice(math.inf, FLAVOURS[0].name, "no other flavour is known to be faster")]
        return list(self._rows.get(_checked_key(key), default))

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self._rows))

    def __str__(self) -> str:
        lines = [f"source: {self.source}"]
        for key in self:
            lines.append(f"{key}:")
            for limit, flavour, why in self._rows[key]:
                up_to = "larger" if limit == math.inf else f"to {limit:.0f} B"
                lines.append(f"    {up_to:>14}  {flavour:13} {why}")
        return "\n".join([*lines, f"all other calls: {FLAVOURS[0].name}"])

    def flavour_for(
        self, verb: str, comm: Communicator, device: torch.device, num_bytes: int, *, symmetric: bool, name: str | None
    ) -> Flavour:
        """Return the flavour called ``name``, or the table's flavour for ``num_bytes``.

        Raise Unavailable or Unimplemented, with the reasons, if the named flavour cannot carry out the call, or if no
        flavour can.
        """
        return self.choices(verb, comm, device, symmetric=symmetric, name=name).flavour_for(num_bytes)

    def choices(
        self, verb: str, comm: Communicator, device: torch.device, *, symmetric: bool, name: str | None
    ) -> Choices:
        """Return the choices for calls whose size is not known yet. Raise the same errors as ``flavour_for``."""
        key = (self.generation, verb, device, symmetric, name)
        choices: Choices | None = comm.choices.get(key)
        if choices is None:
            choices = comm.choices[key] = self._choices_on(verb, comm, device, symmetric, name)
        return choices

    def check_flavour(self, verb: str, name: str | None) -> None:
        """Raise ValueError unless ``name`` is the name of a flavour, or None."""
        if name is not None and name not in BY_NAME:
            raise ValueError(f"{verb}: flavour {name!r} is unknown; use one of: {', '.join(BY_NAME)}")

    def fitted(self, choice: Choice, comm: Communicator) -> Choice:
        """Return a choice adapted to a communicator's numbers of ranks, of nodes, and of ranks per core."""
        least = _OF_INTEL_BYTES.get(choice.why, 0) if MPI.get_vendor()[0] == "Intel MPI" else 0
        if choice.why == OF_THREE_RANKS and comm.size == 2:
            choice = choice._replace(max_bytes=_OF_TWO_RANKS_BYTES, why=OF_OWN_CORES)
        choice = choice._replace(max_bytes=max(choice.max_bytes, least))
        if choice.why in (OF_OWN_CORES, OF_THREE_RANKS) and comm.size > self._num_cores:
            # Measurements with 2, 3, 4 and 8 ranks on 2 cores show that the limit grows with the square of the ranks
            # per core. The reason is that each barrier takes longer, and each rank's share of the work is smaller.
            crowding = comm.size / self._num_cores
            why = f"default for {crowding:.3g} ranks per core: fewer barriers for small tensors"
            return choice._replace(max_bytes=choice.max_bytes * crowding**2, why=why)
        return on_nodes(choice, comm.num_nodes)

    def _choices_on(
        self, verb: str, comm: Communicator, device: torch.device, symmetric: bool, name: str | None
    ) -> Choices:
        self.check_flavour(verb, name)
        others = [Choice(math.inf, flavour.name, "") for flavour in FLAVOURS]
        scope = "node" if comm.num_nodes == 1 else "nodes"
        chosen = self._rows.get(Key(verb, scope, symmetric, device.type), [])
        if device.type == "cpu" and comm.size == 1 and not any(choice.why == ASSIGNED for choice in chosen):
            chosen = []  # One rank uses the first of ``others``, the flavour mpi, because it does not copy.
        candidates = [*chosen, *others]
        candidates = candidates if name is None else [Choice(math.inf, name, "")]
        statuses = {choice.flavour: status(BY_NAME[choice.flavour], verb, device.type, comm) for choice in candidates}
        usable = [choice for choice in candidates if statuses[choice.flavour] == "available"]
        if not usable:
            kind = Unimplemented if name is not None and statuses[name] == "unimplemented" else Unavailable
            reasons = "; ".join(f"{flavour}: {reason}" for flavour, reason in statuses.items())
            refused = "no flavour can" if name is None else f"flavour {name!r} cannot"
            remedy = "" if name is None else "; omit flavour= to let mpi.selector choose"
            message = f"{verb} of a tensor on {device}: {refused} carry it out ({reasons}){remedy}"
            raise kind(message)._of_call(verb, comm)
        limits = [self.fitted(choice, comm).max_bytes for choice in usable]
        num_used = limits.index(math.inf) + 1  # Choices after the first choice without a limit are never used.
        return Choices(limits[:num_used], [BY_NAME[choice.flavour] for choice in usable[:num_used]])


def _checked_key(key: str | tuple[object, ...]) -> Key:
    """Return the key of a row. Raise KeyError if it is not valid."""
    parts = key if isinstance(key, tuple) else (key,)
    row_key = Key(*parts) if 1 <= len(parts) <= 4 else None  # type: ignore[arg-type]
    if row_key is None or row_key not in _KEYS or not isinstance(row_key.symmetric, bool):
        raise KeyError(
            f"selector[{key!r}]: pass a collective ({', '.join(COLLECTIVES)}). A scope (node or nodes), whether "
            "the tensors are symmetric (True or False), and a type of device (cpu or cuda) may follow"
        )
    return row_key


def _checked_choices(choices: str | Sequence[tuple[float, str]]) -> list[Choice]:
    """Return the choices of a row. Raise ValueError if they are not valid."""
    try:
        pairs = [(math.inf, choices)] if isinstance(choices, str) else [(limit, flavour) for limit, flavour in choices]
    except (TypeError, ValueError):
        pairs = []
    limits = [limit for limit, _ in pairs]
    unknown = [flavour for _, flavour in pairs if flavour not in BY_NAME]
    if unknown or not pairs or limits != sorted(limits) or limits[-1] != math.inf:
        raise ValueError(
            f"selector: expected a flavour, or a list of (largest size in bytes, flavour) in rising order "
            f"that ends with math.inf, not {choices!r}; flavours: {', '.join(BY_NAME)}"
        )
    return [Choice(limit, flavour, ASSIGNED) for limit, flavour in pairs]


def on_nodes(choice: Choice, num_nodes: int) -> Choice:
    """Return a choice adapted to ``num_nodes``: a ring of n nodes has n - 1 steps, but MPI needs only log2(n) steps."""
    if choice.why != OF_FEW_NODES or num_nodes <= NODES_MEASURED:
        return choice
    limit = choice.max_bytes * (num_nodes - 1) / (NODES_MEASURED - 1)
    return choice._replace(max_bytes=limit, why=f"default for {num_nodes} nodes: fewer messages for small tensors")


def _cached_bytes(part: int, least: int) -> int:
    """Return the size above which ordinary tensors exceed the cache: 1 / ``part`` of the last-level cache.

    The result is at least ``least`` and at most 16 MiB. Below this size the copies that MPI makes stay in the cache;
    above it, the number of times each byte moves determines the speed. The bounds come from measurements with caches of
    32 and 480 MiB. The result is the same on all ranks of a node.
    """
    cache_bytes = caches.last_level_cache_bytes() or 0  # If the cache size is unknown, use the lower bound.
    return min(max(cache_bytes // part, least), 16 << 20)


def _defaults() -> dict[Key, list[Choice]]:
    """Return the default table: crossover sizes measured with 2 and 4 ranks, Open MPI 5, and two cores."""
    small, in_memory = "default: fewer barriers for small tensors", "default: each byte moves once, through memory"
    cached = _cached_bytes(8, 4 << 20)
    rows = {}
    # Each row for one node lists the largest size for which MPI is faster, and the reason: first for ordinary tensors,
    # then for symmetric tensors.
    for verb, *limits in (
        ("allreduce", (_cached_bytes(32, 1 << 20), OF_THREE_RANKS), (8 << 10, OF_OWN_CORES)),
        ("broadcast", (cached, small), (4 << 20, small)),
        ("reduce", (cached // 4, small), (512 << 10, small)),
        ("reduce_scatter", (1 << 20, OF_OWN_CORES), (512 << 10, OF_OWN_CORES)),
        ("allgather", (2 * cached, small), (32 << 20, small)),
        ("alltoall", (64 << 20, small), (16 << 20, small)),
    ):
        for symmetric, (limit, why) in zip((False, True), limits, strict=True):
            rows[Key(verb, "node", symmetric)] = [Choice(limit, "mpi", why), Choice(math.inf, "shared", in_memory)]
    anywhere = "default: fewer messages for small tensors"
    by_links = "default: the links between nodes stay busy in both directions"
    # Each row for several nodes lists the flavour for sizes above the limit, the limit, and the reason. A limit with
    # the reason OF_FEW_NODES grows with the number of nodes.
    for verb, flavour, limit, why in (
        ("allreduce", "hierarchical", 128 << 10, OF_FEW_NODES),
        ("broadcast", "hierarchical", 128 << 10, anywhere),  # Both methods are trees, so the limit does not grow.
        ("reduce", "hierarchical", 128 << 10, anywhere),
        ("reduce_scatter", "hierarchical", 256 << 10, OF_FEW_NODES),
        ("allgather", "hierarchical", 2 << 20, OF_FEW_NODES),
        ("alltoall", "ring", 4 << 20, anywhere),
    ):
        choices = [Choice(limit, "mpi", why), Choice(math.inf, flavour, by_links)]
        rows |= dict.fromkeys((Key(verb, "nodes"), Key(verb, "nodes", True)), choices)
    return rows | _gpu_defaults()


def _gpu_defaults() -> dict[Key, list[Choice]]:
    """Return the rows for GPUs.

    If all ranks can reach each other through links between GPUs or through GPU memory, the data moves there. Otherwise
    the data moves through the host.
    """
    nccl = Choice(math.inf, "nccl", "default: made for links between GPUs")
    cudaipc = Choice(math.inf, "cudaipc", "default: through the GPUs' memory alone")
    staged = Choice(math.inf, "staged", "default: through the host")
    rows = {}
    for verb in ("allreduce", "broadcast", "reduce", "reduce_scatter", "allgather", "alltoall", "gather", "scatter"):
        rows[Key(verb, "node", False, "cuda")] = [nccl, cudaipc, staged]
        rows[Key(verb, "node", True, "cuda")] = [cudaipc, nccl, staged]
    between_nodes = [
        nccl._replace(max_bytes=1 << 20),
        Choice(1 << 20, "staged", "default: fewer messages for small tensors"),
        nccl,
        Choice(math.inf, "hierarchical", "default: each byte leaves a node once, not once per rank"),
    ]
    for verb, symmetric in itertools.product(("allreduce", "reduce", "broadcast"), (False, True)):
        rows[Key(verb, "nodes", symmetric, "cuda")] = between_nodes
    return rows


selector = Selector()
