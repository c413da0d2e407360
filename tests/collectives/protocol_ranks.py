"""Ranks as threads of this process that carry out the product's own code, and what they do to memory that they share.

Each *process* (a rank, or one of its threads) runs a function of the test, which calls flavours as a program would.
One runs at a time, until it waits in a barrier; then the next one has its turn. Noted are

- what every operation of torch reads and writes of memory that processes share: as ranges of bytes, by a dispatch mode
- what is read and written of records: by a stand-in for ``memoryview``
- what is read of another rank's own memory, as far as a test has made it known (``add_memory``)
- barriers, with the line of the package that called them
- for a GPU: what is queued on streams, and where events are recorded and waited for

``model`` makes of that the steps of the model (``protocol_model.py``). A read has to see, in every interleaving, the
write that it saw here, in a run whose results were right.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from protocol_model import Step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchmpi_py
from torchmpi_py.collectives.flavours import node_group
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.core.channels import DIRECT, Channel, Place
from torchmpi_py.memory import cuda_ipc, symmetric
from torchmpi_py.memory.peer_memory import PeerMemory

PACKAGE = str(pathlib.Path(torchmpi_py.__file__).parent)
Span = tuple[Hashable, int, int]  # memory, begin, end


@dataclasses.dataclass
class Noted:
    """What a process, or a stream, does next."""

    name: str
    number: int  # of all that was noted, in the order of this run; from 1
    reads: list[Span] = dataclasses.field(default_factory=list)
    writes: list[Span] = dataclasses.field(default_factory=list)
    barrier: Hashable = None
    site: str = ""
    after: tuple[Hashable, int] | None = None
    awaits: tuple[tuple, Hashable] | None = None
    copies: tuple[Hashable, Hashable] | None = None
    is_fence: bool = False


class Ranks:
    """Carries out processes by turns. One at a time is under way in this Python process: ``run`` installs it."""

    def __init__(self) -> None:
        self.entry: dict[Hashable, list[Noted]] = {}
        self.mappings: list[tuple[int, int, Hashable]] = []  # address, length, memory
        self.rounds: dict[Hashable, list[list]] = {}  # what was given in each meeting of a communicator
        self._count = itertools.count(1)
        self._turn = threading.Condition()
        self._whose = 0
        self._ready: list[Callable[[], bool]] = []
        self._error: BaseException | None = None
        self.here = threading.local()

    # Turns.

    def run(self, monkeypatch, *functions: Callable[[], object]) -> None:
        """Each function is a process."""
        self._install(monkeypatch)
        self._ready = [lambda: True for _ in functions]
        threads = [threading.Thread(target=self._process, args=(p, f), daemon=True) for p, f in enumerate(functions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        if self._error is not None:
            raise self._error
        assert not any(thread.is_alive() for thread in threads), "a process hangs"

    def _process(self, p: int, function: Callable[[], object]) -> None:
        self.here.process, self.here.stream, self.here.streams = p, None, {}
        self.entry[p] = []
        try:
            with self._turn:
                self._turn.wait_for(lambda: self._whose == p or self._error)
            with _Recorder(self):
                function()
            self._ready[p] = lambda: False
            self._give_way(p)
        except BaseException as error:
            with self._turn:
                self._error = self._error or error
                self._turn.notify_all()

    def _give_way(self, p: int) -> None:
        with self._turn:
            others = [q % len(self._ready) for q in range(p + 1, p + 1 + len(self._ready))]
            self._whose = next((q for q in others if self._ready[q]()), -1)
            self._turn.notify_all()

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Let others have their turns until it is."""
        p = self.here.process
        self._ready[p] = is_ready
        self._give_way(p)
        with self._turn:
            self._turn.wait_for(lambda: self._whose in (p, -1) or self._error)
        assert self._error is None, "another process failed"
        assert self._whose == p, "all wait for each other"
        self._ready[p] = lambda: True

    # Notes.

    def note(self, name: str, *, queue: bool = False, **fields) -> int:
        """Of this process; with ``queue`` of the stream that is current, to be done when this process has come here."""
        p, stream = self.here.process, self.here.stream
        key, after = (p, None) if stream is None or not queue else ((p, stream), (p, len(self.entry[p])))
        self.entry.setdefault(key, []).append(Noted(name, number := next(self._count), after=after, **fields))
        return number

    def spans(self, x: Tensor) -> list[Span]:
        """Where a tensor lies in memory that is shared; nothing if it lies elsewhere."""
        if x.numel() == 0 or x.device.type != "cpu":
            return []
        address = x.untyped_storage().data_ptr() + x.storage_offset() * x.itemsize
        return [span for at, size in _ranges(address, x) for span in self._spans_at(at, size)]

    def _spans_at(self, address: int, num_bytes: int) -> list[Span]:
        return [
            (memory, address - begin, address - begin + num_bytes)
            for begin, length, memory in self.mappings
            if begin <= address < begin + length
        ]

    def _install(self, monkeypatch) -> None:
        allocate = symmetric.allocate

        def noted_allocate(comm, places, num_bytes):
            mapping, segment = allocate(comm, places, num_bytes)
            self.mappings.append((segment.address, segment.part_bytes * len(places), (comm.name, next(comm.segments))))
            return mapping, segment

        monkeypatch.setattr(symmetric, "allocate", noted_allocate)
        barrier = lambda comm, *_: types.SimpleNamespace(wait=comm.Barrier, release=lambda: None)  # noqa: E731
        monkeypatch.setattr(node_group, "FlagBarrier", barrier)
        monkeypatch.setattr(node_group, "memoryview", lambda mapping: _Words(self, mapping), raising=False)
        read = PeerMemory.read

        def noted_read(peers, rank, address, into):
            self.note("read of a peer", reads=self._spans_at(address, into.nbytes))
            self.note("what was read of a peer", writes=self.spans(into))
            read(peers, rank, address, into)

        monkeypatch.setattr(PeerMemory, "read", noted_read)

    def add_memory(self, name: Hashable, memory: Tensor) -> None:
        """Note what is done to memory of a rank's own, which other ranks may read."""
        self.mappings.append((memory.data_ptr(), memory.nbytes, name))

    def comm(self, name: Hashable, rank: int, size: int) -> _Comm:
        """A communicator of the processes that name the same."""
        return _Comm(self, name, rank, size)

    def channel(self, name: Hashable, rank: int, size: int, chunk_elements: int = 0) -> Channel:
        """A channel of the processes that name the same. ``chunk_elements``: of float32, in a chunk that is staged."""
        channel = Channel(self.comm(name, rank, size), [Place(0, local) for local in range(size)], DIRECT)
        node = channel.keep(NodeGroup, NodeGroup)
        if chunk_elements:
            node.chunk_bytes = node._slot_bytes = chunk_elements * 4
        return channel


class _Comm:
    """A communicator of MPI, as far as channels need one."""

    def __init__(self, ranks: Ranks, name: Hashable, rank: int, size: int) -> None:
        self.ranks, self.name, self.rank, self.size = ranks, name, rank, size
        self._rounds = ranks.rounds.setdefault(name, [])
        self._number = 0
        self.segments = itertools.count()  # that were made of it: the first is the node group's

    def exchange(self, given: object) -> list:
        """What all give."""
        if self._number == len(self._rounds):
            self._rounds.append([])
        here = self._rounds[self._number]
        self._number += 1
        here.append((self.rank, given))
        if len(here) < self.size:
            self.ranks.wait(lambda: len(here) == self.size)
        return [value for _, value in sorted(here, key=lambda pair: pair[0])]

    def Barrier(self) -> None:
        self.ranks.note("barrier", barrier=self.name, site=_site())
        self.exchange(None)

    def allgather(self, given: object) -> list:
        self.ranks.note("allgather", barrier=self.name, site=_site())
        return self.exchange(given)

    def Free(self) -> None:
        """Nothing is held."""


class _Words:
    """A ``memoryview`` of bytes that notes what is read and written."""

    def __init__(self, ranks: Ranks, mapping: object) -> None:
        self._ranks, self._view = ranks, memoryview(mapping)
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        self._memory = next(memory for begin, _, memory in ranks.mappings if begin == address)

    def cast(self, _: str) -> _Words:
        return self

    def __getitem__(self, where: slice) -> bytes:
        self._ranks.note("read record", reads=[(self._memory, where.start, where.stop)])
        return bytes(self._view[where])

    def __setitem__(self, where: slice, value: bytes) -> None:
        self._ranks.note("write record", writes=[(self._memory, where.start, where.stop)])
        self._view[where] = value

    def release(self) -> None:
        self._view.release()


class _Recorder(TorchDispatchMode):
    """Notes what operations of torch do to shared memory."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = function._schema.arguments
        given = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(arguments)]
        if not any(a.alias_info is not None and not a.alias_info.is_write for a, _ in given):  # else it is a view
            reads, writes = [], []
            for argument, value in given:
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                for x in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(x, Tensor):
                        (writes if is_written else reads).extend(self._ranks.spans(x))
            name = function._schema.name.removeprefix("aten::")
            if reads:
                self._ranks.note(f"{name} reads", queue=True, reads=reads)
            if writes:
                self._ranks.note(f"{name} writes", queue=True, writes=writes)
        return function(*args, **kwargs)


def _ranges(address: int, x: Tensor) -> Iterator[tuple[int, int]]:
    """(address, length) of the pieces of a tensor."""
    if x.is_contiguous():
        yield address, x.numel() * x.itemsize
        return
    for index in range(x.shape[0]):
        yield from _ranges(address + index * x.stride(0) * x.itemsize, x[index])


def _site() -> str:
    """The line of the package that calls."""
    frame = sys._getframe(2)
    while not frame.f_code.co_filename.startswith(f"{PACKAGE}/collectives"):
        frame = frame.f_back
        if frame is None:  # the barrier is not a flavour's
            return ""
    return f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# A GPU, in name: memory of the host, on which work is queued on streams.


class Gpu:
    """Streams and events of the ranks, for the package's own PeerEvents. The stream is ``ranks.here.stream``."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def current(self) -> _Stream:
        return _Stream(self.ranks)

    def events(self, channel: Channel, device: torch.device) -> cuda_ipc.PeerEvents:
        """As ``peer_events``."""
        return _PeerEvents(self, channel)

    def event_of(self, channel: Channel, name: str, rank: int) -> _Event:
        return _Event(self.ranks, (channel.mpi.name, name, rank))


class _PeerEvents(cuda_ipc.PeerEvents):
    """The package's own steps, with events that need no GPU."""

    def __init__(self, gpu: Gpu, channel: Channel) -> None:
        self._device, self._over = gpu, gpu.event_of(channel, "over", channel.rank)
        of_all = [[gpu.event_of(channel, name, rank) for name in ("READY", "DONE")] for rank in range(channel.size)]
        self._own = of_all.pop(channel.rank)
        self._peers = list(zip(*of_all, strict=True))


class _Stream:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def wait_event(self, event: _Event) -> None:
        """For what was recorded last when the host says so."""
        ranks, number = self._ranks, next(self._ranks._count)
        captured = ("captured", number)
        ranks.note(f"wait for {event}", copies=(captured, ("recorded", event.key)))
        ranks.note(f"{event} is past", queue=True, awaits=(("past", event.key), captured))


class _Event:
    def __init__(self, ranks: Ranks, key: tuple[Hashable, str, int]) -> None:
        self._ranks, self.key = ranks, key

    def __repr__(self) -> str:
        return f"{self.key[1]} of {self.key[2]}"

    def record(self, stream: _Stream) -> None:
        number = self._ranks.note(f"record {self}", writes=[(("recorded", self.key), 0, 1)])
        self._ranks.note(f"{self} is reached", queue=True, writes=[(("past", self.key, number), 0, 1)])


# From notes to the model.


def model(entry: dict[Hashable, Sequence[Noted]]) -> list[list[Step]]:
    """The steps of each process and stream.

    Bytes that are always read and written together are one cell; what only one process touches is left out.
    """
    cuts: dict[Hashable, set[int]] = {}
    everything = [(key, step) for key, steps in entry.items() for step in steps]
    for _, step in everything:
        for memory, begin, end in (*step.reads, *step.writes):
            cuts.setdefault(memory, set()).update((begin, end))
    pieces = {memory: sorted(points) for memory, points in cuts.items()}

    def cells(spans: Sequence[Span]) -> list[tuple[Hashable, int]]:
        return [(memory, at) for memory, begin, end in spans for at in pieces[memory] if begin <= at < end]

    users: dict[Hashable, list[tuple[Hashable, int, bool]]] = {}
    for key, step in everything:
        for is_write, spans in ((False, step.reads), (True, step.writes)):
            for cell in cells(spans):
                users.setdefault(cell, []).append((key, step.number, is_write))
    of_events = {cell for cell in users if _is_event(cell[0])}
    common = {cell: tuple(used) for cell, used in users.items() if len({key for key, *_ in used}) > 1}
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(common.values()))}
    names = {cell: numbers[signature] for cell, signature in common.items()} | {cell: cell[0] for cell in of_events}

    latest: dict[Hashable, int] = {}
    made: dict[Hashable, list[Step]] = {key: [] for key in entry}
    for key, step in sorted(everything, key=lambda pair: pair[1].number):
        reads = tuple({names[cell]: latest.get(cell, 0) for cell in cells(step.reads) if cell in names}.items())
        latest.update(dict.fromkeys(cells(step.writes), step.number))
        writes = tuple({names[cell]: step.number for cell in cells(step.writes) if cell in names}.items())
        name = f"{step.name} ({step.number})" + (f" at {step.site}" if step.site else "")
        rest = {"after": step.after, "awaits": step.awaits, "copies": step.copies}
        made[key].append(Step(name, reads, writes, step.barrier, step.is_fence, **rest))
    return _without_idle(made)


def _is_event(memory: Hashable) -> bool:
    return isinstance(memory, tuple) and memory[0] in ("recorded", "past")


def _without_idle(made: dict[Hashable, list[Step]]) -> list[list[Step]]:
    """Without the steps that do nothing; what is queued refers to the rest, and to the number of its process."""
    does = {
        key: [bool(s.reads or s.writes or s.copies or s.awaits or s.is_fence) or s.barrier is not None for s in steps]
        for key, steps in made.items()
    }
    positions = {key: position for position, key in enumerate(made)}

    def moved(step: Step) -> Step:
        if step.after is None:
            return step
        key, count = step.after
        return dataclasses.replace(step, after=(positions[key], sum(does[key][:count])))

    return [[moved(s) for s, is_used in zip(steps, does[key], strict=True) if is_used] for key, steps in made.items()]
