"""How long a collective takes on machines that are not at hand: flavours ring and hierarchical, simulated.

    python benchmarks/scale/simulator.py --hosts 16x1 --flavour ring --verb allreduce --sizes 64K:64M:4x --link 1gbit

The classes ``Ring`` and ``Hierarchical`` run as they are: their plans, chunks, trees and turns are those of
``collectives/flavours``, whatever these are. ``engine.py`` stands in for MPI and has the clock. Additions are charged
and not carried out. Inside a host, where ``hierarchical`` calls flavour ``shared``, a collective takes the time in
which the tensors of all its ranks pass through the memory once, between two meetings. Copies within a rank take none.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import mpi4py

mpi4py.rc.initialize = False  # buffers and the names of types are all that is needed of MPI

import torch  # noqa: E402
from engine import Comm, Machine, Simulation  # noqa: E402
from torch import Tensor  # noqa: E402

from torchmpi_py.bench import wire  # noqa: E402
from torchmpi_py.bench.buffers import parse_sizes  # noqa: E402
from torchmpi_py.bench.cases import ROOT, VERBS  # noqa: E402
from torchmpi_py.bench.results import number  # noqa: E402
from torchmpi_py.collectives import mpi_buffers, reductions  # noqa: E402
from torchmpi_py.collectives.flavour import Flavour, Sizes  # noqa: E402
from torchmpi_py.collectives.flavours import hierarchical, ring  # noqa: E402
from torchmpi_py.core import communicators  # noqa: E402
from torchmpi_py.core.channels import DIRECT, Channel, Place  # noqa: E402
from torchmpi_py.core.text_tables import table  # noqa: E402

ITEM_BYTES = 4  # float32


class Outcome(NamedTuple):
    """Of a collective: its time, its messages, the bytes over each host's link, and the ranks' results, if any."""

    seconds: float
    num_messages: int
    sent_bytes: dict[int, int]
    results: dict[int, Tensor]


class Inside(Flavour):
    """Stand-in for flavour ``shared``: the tensors of the ranks of a host pass through its memory."""

    name = "shared"  # whose contract it keeps: what it reads of others has been read when the call returns
    devices = frozenset({"cpu"})

    def allreduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        _pass(channel, source, source.nbytes, destination, sum)

    def reduce_scatter(self, channel: Channel, source: Tensor, destination: Tensor, op: str) -> None:
        _pass(channel, source, source.nbytes, destination, lambda xs: sum(xs).chunk(channel.size)[channel.rank])

    def reduce(self, channel: Channel, source: Tensor, destination: Tensor, op: str, root: int) -> None:
        _pass(channel, source, source.nbytes, destination if channel.rank == root else None, sum)

    def broadcast(self, channel: Channel, x: Tensor, root: int) -> None:
        _pass(channel, x, x.nbytes, x, lambda xs: xs[root])

    def allgather(self, channel: Channel, x: Tensor, out: Tensor, sizes: Sizes) -> None:
        _pass(channel, x, out.nbytes, out, torch.cat)

    def gather(self, channel: Channel, x: Tensor, out: Tensor | None, root: int, sizes: Sizes) -> None:
        _pass(channel, x, x.nbytes, out, torch.cat)

    def scatter(self, channel: Channel, source: Tensor, destination: Tensor, root: int) -> None:
        _pass(channel, source, destination.nbytes, destination, lambda xs: xs[root].chunk(channel.size)[channel.rank])

    def send(self, channel: Channel, x: Tensor, destination: int) -> None:
        channel.mpi.Isend(mpi_buffers.raw(x), destination).Wait()

    def recv(self, channel: Channel, x: Tensor, source: int) -> None:
        channel.mpi.Irecv(mpi_buffers.raw(x), source).Wait()


def _pass(
    channel: Channel, x: Tensor | None, num_bytes: int, out: Tensor | None, result: Callable[[list[Tensor]], Any]
) -> None:
    """Meet, take ``num_bytes`` of each rank through the memory, meet. ``out`` becomes the ``result`` of all ``x``."""
    simulation: Simulation = channel.mpi.simulation  # type: ignore[attr-defined]
    given = simulation.meet(channel.mpi, x)  # type: ignore[arg-type]
    machine = simulation.machine
    if channel.size > 1:
        simulation.work(machine.memory_latency_seconds + channel.size * num_bytes / machine.memory_bytes_per_second)
    value = result(given).clone() if simulation.carries_values and out is not None else None
    simulation.meet(channel.mpi, None)  # type: ignore[arg-type]
    if value is not None and out is not None:
        out.view(-1).copy_(value.view(-1))


@dataclasses.dataclass(frozen=True)
class ChargedKernel(reductions.Kernel):
    """Arithmetic that takes time on the clock, and is carried out only where messages carry values."""

    simulation: Simulation

    @property
    def combine(self) -> Callable[..., Tensor]:
        simulation, plain = self.simulation, super().combine

        def charged(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
            simulation.work(a.nbytes / simulation.machine.reduce_bytes_per_second)
            return plain(a, b, out=out) if simulation.carries_values else out

        return charged


@contextlib.contextmanager
def _package_in(simulation: Simulation) -> Iterator[None]:
    """The flavours find the simulation's kernels, and a stack of levels without a span, though nothing is started."""
    level = types.SimpleNamespace(direct=None, background=None, size=1)
    stack = types.SimpleNamespace(levels=[level], span=(0, 0))

    def kernel(dtype: torch.dtype, op: str) -> ChargedKernel:
        plain = reductions.kernel(dtype, op)
        return ChargedKernel(plain.dtype, plain.op, plain.encode, plain.decode, plain.divide, simulation)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(communicators, "stack", return_value=stack))
        for module in (ring, hierarchical):
            patches.enter_context(mock.patch.object(module, "kernel", kernel))
        yield


def simulate(
    flavour: str, verb: str, num_bytes: int, ranks_per_host: Sequence[int], machine: Machine, *, values: bool = False
) -> Outcome:
    """One call, of ``num_bytes`` as the bench counts them. ``values``: the ranks' inputs are computed with."""
    host_of = [host for host, ranks in enumerate(ranks_per_host) for _ in range(ranks)]
    simulation = Simulation(host_of, machine, carries_values=values)
    firsts = [host_of.index(host) for host in host_of]
    places = [Place(first, rank - first) for rank, first in enumerate(firsts)]
    one = {"ring": ring.Ring, "hierarchical": lambda: _hierarchical()}[flavour]()
    make = _inputs if values else _shared_inputs(verb, num_bytes, len(host_of))
    begins, results = {}, {}

    def program(comm: Comm) -> None:
        channel = Channel(comm, places, DIRECT)  # type: ignore[arg-type]
        if flavour == "hierarchical":
            hierarchical.groups_of(channel)  # made in the first call, which is not the one that is timed
        call, results[comm.rank] = _call(one, channel, verb, *make(verb, num_bytes, comm.rank, comm.size))
        comm.Barrier()
        begins[comm.rank] = simulation.now[comm.rank]
        call()

    with _package_in(simulation):
        simulation.run(program)
    seconds = max(simulation.now) - max(begins.values())
    return Outcome(seconds, simulation.num_messages, dict(simulation.sent_bytes), results if values else {})


def _hierarchical() -> Flavour:
    return hierarchical.Hierarchical({"cpu": hierarchical.Members((Inside(),), (Inside(),), ring.Ring())})


def _counts(verb: str, num_bytes: int, size: int) -> tuple[int, int]:
    """Elements of ``x`` and of ``out`` on a rank; the larger one has ``num_bytes``."""
    of = {"whole": num_bytes // ITEM_BYTES, "slice": num_bytes // ITEM_BYTES // size, "": 0}
    return of[VERBS[verb].x], of[VERBS[verb].out]


def _inputs(verb: str, num_bytes: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    count, of_out = _counts(verb, num_bytes, size)
    return torch.arange(count, dtype=torch.float32) % 1000 + 7 * rank, torch.full((of_out,), -1.0)


def _shared_inputs(verb: str, num_bytes: int, size: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Without values all ranks have the same memory, or 1024 of them would not fit."""
    x, out = (torch.empty(count, dtype=torch.float32) for count in _counts(verb, num_bytes, size))
    return lambda *_: (x, out)


def _call(flavour: Flavour, channel: Channel, verb: str, x: Tensor, out: Tensor) -> tuple[Callable[[], None], Tensor]:
    """The call on this rank, and the tensor that has the result afterwards."""
    sizes, is_root = Sizes.equal(x, channel.size), channel.rank == ROOT
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": (x, x, "sum"),
        "broadcast": (x, ROOT),
        "reduce": (x, x, "sum", ROOT),
        "allgather": (x, out, sizes),
        "reduce_scatter": (x, out, "sum"),
        "alltoall": (x, out),
        "gather": (x, out if is_root else None, ROOT, sizes),
        "scatter": (x, out, ROOT),
    }
    method = getattr(flavour, verb)
    return lambda: method(channel, *calls[verb]), x if VERBS[verb].out == "" else out


def parse_hosts(text: str) -> list[int]:
    """Ranks of each host, from "16x2" (16 hosts with 2 ranks each) or "3,1"."""
    hosts, _, ranks = text.partition("x")
    return [int(ranks)] * int(hosts) if ranks else [int(part) for part in text.split(",")]


def main() -> None:
    """Print a table: each size's time, beside the floor of the wire."""
    parser = argparse.ArgumentParser(description="Simulate collectives of flavours ring and hierarchical.")
    parser.add_argument("--hosts", type=parse_hosts, default="16x1", help='"16x2" or "3,1"; default: 16x1')
    parser.add_argument("--flavour", choices=("ring", "hierarchical"), default="ring")
    parser.add_argument("--verb", choices=list(VERBS), default="allreduce")
    parser.add_argument("--sizes", type=parse_sizes, default="64K:64M:4x")
    parser.add_argument("--link", type=wire.parse_link, help="rate of a link; default: that of the machine")
    for field in dataclasses.fields(Machine):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    machine = Machine(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Machine)})
    if options.link:
        machine = dataclasses.replace(machine, link_bytes_per_second=options.link)
    rows = []
    for num_bytes in options.sizes:
        begin = time.perf_counter()
        outcome = simulate(options.flavour, options.verb, num_bytes, options.hosts, machine)
        floor = wire.floor_bytes(options.verb, num_bytes, options.hosts) / machine.link_bytes_per_second
        took = time.perf_counter() - begin
        cells = (outcome.seconds * 1e3, floor * 1e3, outcome.seconds / floor if floor else None, took)
        rows.append([str(num_bytes), *map(number, cells), str(outcome.num_messages)])
    print(table(["bytes", "ms", "floor ms", "time/floor", "s to simulate", "messages"], rows))


if __name__ == "__main__":
    sys.exit(main())
