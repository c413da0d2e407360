"""The cost of sends to a parameter server and of receives, beside the same work done locally.

    torchmpirun -n 2 benchmarks/parameter_server.py --rules add,adam --clients 1

In a *race* some ranks, the clients, send by one rule (or receive) and wait; in turn with that, also all at once, they
do on private tensors of as many elements the work of the rule: ``add_``, ``copy_``, a step of ``torch.optim``. The
other ranks sleep meanwhile. Last comes the cost of a rank that only serves: its processor time while others send.
Between nodes, plain messages of MPI that carry the same bytes are timed before each race (``wire_messages.py``).

Values are whole numbers that depend on element and rank, and repeat after ``PERIOD`` elements. Rules work element by
element, so the values that a server must hold are computed on a *replica* of one period.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import wire_messages
from torch import Tensor

from torchmpi_py import paramserver
from torchmpi_py.bench import UsageError, WrongValue, cases, command_line, machine, progress_bar, results
from torchmpi_py.bench.buffers import format_size, parse_sizes
from torchmpi_py.bench.results import quantile
from torchmpi_py.collectives.timing import interleaved
from torchmpi_py.core import backoff
from torchmpi_py.core.handles import Handle, wait_all
from torchmpi_py.core.mpi_api import MPI

PERIOD = 1021
_RECEIVE = "receive"
_MIN_TURNS, _MAX_TURNS = 5, 1000  # so few that sums of whole numbers stay exact
_IDLE_BYTES = 1 << 20
_FORMAT = "torchmpi_py.bench ps 2"

Local = Callable[[Tensor], Callable[[Tensor], object]]  # from a private tensor: a function that applies a payload to it


class ServerRule(NamedTuple):
    """A rule with options. ``commutes``: whether the order of sends makes no difference, exactly."""

    name: str
    local: Local
    options: dict[str, Any]
    commutes: bool = False
    optimizer: str | None = None
    tolerance: float = 0.0  # relative


def _average(x: Tensor) -> Callable[[Tensor], object]:
    times = 0

    def apply(payload: Tensor) -> None:
        nonlocal times
        times += 1
        x.lerp_(payload, 1 / times)

    return apply


def _optimizer(name: str, make: Callable[..., torch.optim.Optimizer], **options: Any) -> ServerRule:
    def local(x: Tensor) -> Callable[[Tensor], object]:
        parameter = torch.nn.Parameter(x)
        optimizer = make([parameter], foreach=False, **options)

        def apply(payload: Tensor) -> None:
            parameter.grad = payload
            optimizer.step()

        return apply

    return ServerRule(name, local, options, optimizer=name, tolerance=1e-4)


RULES = {
    rule.name: rule
    for rule in (
        ServerRule("zero", lambda x: lambda payload: x.zero_(), {}, commutes=True),
        ServerRule("copy", lambda x: x.copy_, {}),
        ServerRule("add", lambda x: x.add_, {}, commutes=True),
        ServerRule("scaled_add", lambda x: lambda payload: x.add_(payload, alpha=-2.0), {"scale": -2.0}, commutes=True),
        ServerRule("average", _average, {}, tolerance=1e-5),
        ServerRule("elastic", lambda x: lambda payload: x.lerp_(payload, 0.5), {"weight": 0.5}, tolerance=1e-5),
        _optimizer("sgd", torch.optim.SGD, lr=0.1, momentum=0.5),
        _optimizer("adagrad", torch.optim.Adagrad, lr=0.1),
        _optimizer("adam", torch.optim.Adam, lr=0.1),
    )
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command line."""
    add, positive = parser.add_argument, command_line.positive
    sizes = command_line.with_message(parse_sizes)
    add("--sizes", type=sizes, default="4,4K:64M:16x", help="bytes; default: 4,4K:64M:16x")
    rules = f"of {', '.join(RULES)}; default: copy,add. The receive is always there"
    add("--rules", type=_rules, default="copy,add", metavar="a,b", help=rules)
    clients = "how many ranks send and receive at once, the others sleep; default: 1, 2, ... all"
    add("--clients", type=_counts, metavar="1,2", help=clients)
    add("--seconds", type=positive, default=0.5, help="about so long for each size, rule and clients; default: 0.5")
    idle = "how long to watch a rank that only serves; default: 10"
    add("--idle-seconds", type=positive, default=10.0, metavar="SECONDS", help=idle)
    queued = "how many requests a client makes before it waits for them; times are of one request; default: 1"
    add("--queued", type=command_line.count, default=1, metavar="N", help=queued)
    command_line.add_output(parser)


def _counts(text: str) -> list[int]:
    return [command_line.count(part) for part in text.split(",")]


@command_line.with_message
def _rules(text: str) -> list[str]:
    for name in text.split(","):
        if name not in RULES:
            raise ValueError(f"{name!r} is unknown; known rules: {', '.join(RULES)}")
    return text.split(",")


@dataclasses.dataclass(frozen=True)
class UpdateRow:
    """A race: statistics of times of one request, each of the slowest client."""

    num_bytes: int
    num_clients: int
    what: str
    median_seconds: float
    p99_seconds: float
    local_median_seconds: float
    num_turns: int
    num_queued: int
    wire_median_seconds: float | None


@dataclasses.dataclass(frozen=True)
class ServerReport:
    """The races, and the processor time of a rank that only serves, in percent; None where there is no other rank."""

    facts: dict[str, str]
    rows: list[UpdateRow]
    idle_seconds: float
    idle_percent: float | None


def main(words: list[str] | None = None) -> int:
    """Carry out the command line; return its exit code, the same on every rank."""
    return command_line.exit_code(lambda: command_line.in_job(measure, parse(words)))


def parse(words: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line. Raises UsageError for mistakes."""
    parser = command_line.Parser(prog="parameter_server.py", description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    return parser.parse_args(words)


def measure(comm: MPI.Comm, options: argparse.Namespace) -> None:
    """Measure, print on rank 0, and store. Collective over ``comm``, which holds all ranks.

    Raises UsageError for more clients than ranks, and WrongValue if a server holds wrong values; on every rank.
    """
    counts = options.clients or list(range(1, comm.size + 1))
    if max(counts) > comm.size:
        raise UsageError(f"--clients {max(counts)}: there are {comm.size} ranks; start more with torchmpirun -n")
    whats = [*(f"send {name}" for name in options.rules), _RECEIVE]
    races = [(num_bytes, count, what) for num_bytes in options.sizes for count in counts for what in whats]
    shown = progress_bar.shown(
        races, lambda race: f"{format_size(race[0])} {race[2]}", rank=comm.rank, always=options.progress
    )
    rows = [_race(comm, *race, options.queued, options.seconds) for race in shown]
    idle_percent = _idle_percent(comm, options.idle_seconds)
    report = ServerReport(machine.facts(comm), rows, options.idle_seconds, idle_percent)
    results.publish(comm.rank, render(report), _FORMAT, report, options.json)


def render(report: ServerReport) -> str:
    """The report in Markdown."""
    header = ["bytes", "clients", "what", "us median", "us p99", "GB/s a client", "local us", "x local"]
    if has_wire := any(row.wire_median_seconds for row in report.rows):
        header += ["wire us", "x wire"]
    cells = [_cells(row, has_wire) for row in report.rows]
    num_queued = max((row.num_queued for row in report.rows), default=1)
    queued = [f"requests made before the first is waited for: {num_queued}"] if num_queued > 1 else []
    whole = results.document("parameter server of float32", report.facts, queued, header, cells)
    if report.idle_percent is None:
        return whole
    percent = f"while the others send for {report.idle_seconds:g} s: {results.number(report.idle_percent)} %"
    return f"{whole}\n\nProcessor time of a rank that only serves, {percent} of a core."


def _cells(row: UpdateRow, has_wire: bool) -> list[str]:
    wire = row.wire_median_seconds
    over_wire = [results.number(wire and wire * 1e6), results.number(wire and row.median_seconds / wire)]
    return [
        str(row.num_bytes),
        str(row.num_clients),
        row.what,
        results.number(row.median_seconds * 1e6),
        results.number(row.p99_seconds * 1e6),
        results.number(row.num_bytes / row.median_seconds / 1e9),
        results.number(row.local_median_seconds * 1e6),
        results.number(row.median_seconds / row.local_median_seconds),
        *(over_wire if has_wire else []),
    ]


def _race(comm: MPI.Comm, num_bytes: int, num_clients: int, what: str, num_queued: int, seconds: float) -> UpdateRow:
    """One race, on a server over all ranks whose first ``num_clients`` are the clients. WrongValue on every rank."""
    rule = RULES[what.removeprefix("send ") if what != _RECEIVE else "copy"]
    count = -(-num_bytes // torch.float32.itemsize)
    server = paramserver.init(torch.zeros(count), optimizer=rule.optimizer)
    has_payload = what not in (_RECEIVE, "send zero")
    wire = wire_messages.median_seconds(comm, server.bounds, num_clients, has_payload, what == _RECEIVE, seconds)
    clients = comm.Split(int(comm.rank >= num_clients))
    # The clients race; the other ranks sleep in the barrier meanwhile.
    outcome: tuple[dict[str, list[float]], str] = {}, ""
    if comm.rank < num_clients:
        outcome = _Client(clients, server, rule, count, num_queued).raced(what, seconds)
    backoff.barrier(comm)
    clients.Free()
    server.free()
    times, problem = comm.bcast(outcome)  # of num_queued requests
    if problem:
        raise WrongValue(f"parameter server, {what} of {num_bytes} bytes by {num_clients} clients: {problem}")
    ours, local = times["server"], times["local"]
    return UpdateRow(
        num_bytes=count * torch.float32.itemsize,
        num_clients=num_clients,
        what=what,
        median_seconds=quantile(ours, 0.5) / num_queued,
        p99_seconds=quantile(ours, 0.99) / num_queued,
        local_median_seconds=quantile(local, 0.5) / num_queued,
        num_turns=len(ours),
        num_queued=num_queued,
        wire_median_seconds=wire,
    )


class _Client:
    """A client of a race. Every method is collective over ``comm``, the clients."""

    def __init__(
        self, comm: MPI.Comm, server: paramserver.ParameterServer, rule: ServerRule, count: int, num_queued: int
    ) -> None:
        self.comm, self.server, self.rule, self.num_queued = comm, server, rule, num_queued
        self.payload, self.private, self.fetched = (torch.zeros(count) for _ in range(3))
        cases.write(self.payload, pattern(comm.rank))
        self.replica = torch.zeros(PERIOD)
        self._repeat = rule.local(self.replica)

    def raced(self, what: str, seconds: float) -> tuple[dict[str, list[float]], str]:
        """Times of "server" and "local", of the slowest client; and what is wrong with the server's values, or ""."""
        problem = self._checked_in_turns()
        local = self.rule.local(self.private)
        is_receive = what == _RECEIVE
        times = interleaved(
            self.comm,
            {
                "server": self._queue(self._ask_values if is_receive else self._ask_send),
                "local": lambda: [local(self.payload) for _ in range(self.num_queued)],
            },
            seconds=seconds,
            min_turns=_MIN_TURNS,
            max_turns=max(_MIN_TURNS, _MAX_TURNS // self.num_queued),
        )
        num_sends = 0 if is_receive else self.num_queued * (1 + len(times["server"]))  # one turn untimed
        return times, problem or self._checked_after(num_sends)

    def _ask_send(self) -> Handle[Tensor]:
        return self.server.send(self.payload, self.rule.name, **self.rule.options)

    def _ask_values(self) -> Handle[Tensor]:
        # Requests into one tensor would wait for each other.
        return self.server.receive(self.fetched if self.num_queued == 1 else None)

    def _queue(self, ask: Callable[[], Handle[Tensor]]) -> Callable[[], object]:
        """A call that makes all requests, and then waits for them."""
        return lambda: wait_all([ask() for _ in range(self.num_queued)])

    def _checked_in_turns(self) -> str:
        """Client after client sends once; what is wrong then, or ""."""
        for rank in range(self.comm.size):
            if rank == self.comm.rank:
                self._ask_send().wait()
            self.comm.Barrier()
            self._repeat(pattern(rank))  # every client does on its replica what the server does
        return self._checked()

    def _checked_after(self, num_sends: int) -> str:
        """The mistake after ``num_sends`` of every client at once, or "", as where the order of sends matters."""
        if num_sends and not self.rule.commutes and self.comm.size > 1:
            return ""
        for rank in range(self.comm.size):
            for _ in range(num_sends):
                self._repeat(pattern(rank))
        return self._checked()

    def _checked(self) -> str:
        """The mistake in the server's values that the lowest client has found, or ""."""
        self.comm.Barrier()
        self.server.receive(self.fetched).wait()
        index = cases.first_wrong(self.fetched, self.replica, self.rule.tolerance)
        mistake = ""
        if index is not None:
            got, right = self.fetched[index].item(), self.replica[index % PERIOD].item()
            mistake = f"rank {self.comm.rank} got {got} in element {index}, where {right} is right"
        return machine.first_failure(self.comm, mistake)


def pattern(rank: int) -> Tensor:
    """One period of the values that client ``rank`` sends."""
    return ((torch.arange(PERIOD) * 7 + rank * 3) % 13 - 6).float()


def _idle_percent(comm: MPI.Comm, seconds: float) -> float | None:
    """The last rank only serves, in ``free``, while the others send; percent of a core. None for one rank alone."""
    if comm.size == 1:
        return None
    payload = torch.zeros(_IDLE_BYTES // torch.float32.itemsize)
    server = paramserver.init(payload)
    backoff.barrier(comm)
    begin, used = time.perf_counter(), _processor_seconds()
    while comm.rank < comm.size - 1 and time.perf_counter() - begin < seconds:
        server.send(payload).wait()
    server.free()
    percent = 100 * (_processor_seconds() - used) / (time.perf_counter() - begin)
    return comm.bcast(percent, comm.size - 1)  # type: ignore[no-any-return]


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
