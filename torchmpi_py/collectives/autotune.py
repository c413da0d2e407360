"""The autotuner measures which flavour is fastest for each collective and size, and fills the selector with the result.

For each collective, and for ordinary and symmetric tensors, sizes grow by factors of 4. At each size the flavours are
timed alternately (``timing.py``). On a GPU, the time of a call includes the GPU's work.

``choose`` turns times into choices. It proceeds from small to large sizes, and changes to a different flavour where
that flavour is more than 5 % faster in both halves of the measurements. The limit between two choices is the geometric
mean of the sizes before and after the change. The fastest flavour at each size would be a simpler choice, but noise
would make the table alternate between flavours of equal speed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmpi_py.collectives import measured_cache, timing, verbs as all_verbs
from torchmpi_py.collectives.registry import BY_NAME, DEVICES, FLAVOURS, status
from torchmpi_py.collectives.selector import Choice, Key, selector
from torchmpi_py.core import agree, journal
from torchmpi_py.core.collective import COLLECTIVES
from torchmpi_py.core.communicators import Communicator, stack
from torchmpi_py.errors import RanksDisagree, TorchMPIError, Unavailable
from torchmpi_py.memory import gpus
from torchmpi_py.memory.symmetric import symmetric_empty

logger = logging.getLogger("torchmpi_py")
Times = Mapping[str, Sequence[float]]  # The times of each flavour, in seconds, turn by turn.
Point = tuple[int, Times]  # A number of bytes, and the times at this size.
Buffers = tuple[Tensor, Tensor]  # The tensor that calls read, and the tensor that they write if it is different.

_DISPLACES_BY = 1.05  # A flavour replaces the flavour for smaller sizes if it is faster by this factor.
_HOPELESS = 8.0  # A flavour that is slower than the fastest by this factor at two sizes is dropped.
_DROP_FROM_BYTES = 256 << 10  # Below this size, slow flavours cost little time, and may be faster at larger sizes.
_MIN_TURNS, _MAX_TURNS = 3, 300
_DTYPE = torch.float32

_VERBS = tuple(row.name for row in COLLECTIVES.values() if row.is_tuned)
_MEASURABLE = (*_VERBS, "gather", "scatter")
_IN_ONE_PIECE = ("allreduce", "broadcast", "reduce")  # Other collectives need a multiple of the number of ranks.
_INDIFFERENT = ("allgather", "gather")  # Symmetric tensors do not make these collectives faster.
_PEERS = ("gloo",)  # flavours for comparison, measured only if the user lists them


def autotune(
    *,
    verbs: Sequence[str] = _VERBS,
    flavours: Sequence[str] | None = None,
    max_bytes: int = 64 << 20,
    seconds: float = 40.0,
    path: str | pathlib.Path | None = None,
    save: bool = True,
    device: str = "cpu",
) -> None:
    """Measure which flavours are fastest on this machine, and let ``mpi.selector`` choose them.

    Every rank of the job must make this call with the same arguments. The measurement includes all ranks, whatever the
    current level. For sizes up to ``max_bytes``, the results replace the earlier choices for the measured collectives
    and device, including choices that the program assigned. The results are also written to a file, which
    ``mpi.start()`` loads in later jobs with the same MPI, host, and number of ranks on each node. In a job with a
    single rank, nothing is measured.

    Args:
        verbs (sequence of str): collectives to measure; default: allreduce, broadcast, reduce, reduce_scatter,
            allgather and alltoall. "gather" and "scatter" can be added.
        flavours (sequence of str): flavours to choose from; default None, all except gloo.
        max_bytes (int): largest size to measure, in bytes; default 64 MiB. Up to four tensors of this size are
            allocated. The fastest flavour at this size is also chosen for larger sizes, up to the next size at which
            the former table changes to another flavour.
        seconds (float): approximate duration of the measurement, in seconds; default 40.
        path (str or path): file to write; default None, the file that ``mpi.start()`` looks for in TORCHMPI_TUNING_DIR
            (default ``~/.cache/torchmpi_py``).
        save (bool): whether to write the file; default True.
        device (str): "cpu" (default), or "cuda" for tensors on the GPUs that ``mpi.start(with_cuda=True)`` chose, whose
            results are written to a separate file.

    Returns:
        None. ``print(mpi.selector)`` shows the new choices.

    Raises:
        ValueError: an argument is invalid, or ``device`` is "cuda" and this session computes on the CPU.
        RanksDisagree: the ranks pass different arguments.
        Unavailable: none of ``flavours`` can run here.
        TorchMPIError: the file cannot be written. The new choices are in use nevertheless.
        NotStarted: ``mpi.start()`` was not called.
    """
    names = tuple(name for name in BY_NAME if name not in _PEERS) if flavours is None else tuple(flavours)
    settings = _Settings(tuple(verbs), names, max_bytes, seconds, save, device)
    _check(settings)
    world = stack().levels[0]
    journal.run_together("autotune", world, lambda: _check_ranks(world, settings))
    if world.size == 1:
        logger.info("autotune: nothing is measured in a job with one rank")
        return
    rows = _measure(world, settings)
    if not rows:
        raise Unavailable(f"autotune: cannot use {', '.join(settings.flavours)}; print(mpi.availability()) shows why")
    measured_cache.install(rows, "measured in this process")
    if save:
        selector.source = _save(world, rows, path, device)


class _Settings(NamedTuple):
    """The arguments of ``autotune``."""

    verbs: tuple[str, ...]
    flavours: tuple[str, ...]
    max_bytes: int
    seconds: float
    save: bool
    device: str


def _check(settings: _Settings) -> None:
    """Raise ValueError if an argument is invalid."""
    verbs, flavours, max_bytes, seconds, _, device = settings
    for what, names, known in (("verbs", verbs, _MEASURABLE), ("flavours", flavours, tuple(BY_NAME))):
        if not names or not set(names) <= set(known):
            raise ValueError(f"autotune: {what}={names!r}: pass one or more of {', '.join(known)}")
    if not isinstance(max_bytes, int) or max_bytes < _DTYPE.itemsize or not 0 < seconds < math.inf:
        raise ValueError(
            f"autotune: max_bytes={max_bytes}, seconds={seconds}: pass a whole number of bytes, at least "
            f"{_DTYPE.itemsize}, and a finite number of seconds above 0"
        )
    if device not in DEVICES:
        raise ValueError(f"autotune: device={device!r}: pass one of {', '.join(DEVICES)}")


def _check_ranks(world: Communicator, settings: _Settings) -> None:
    """Raise the same error on every rank if the ranks pass different arguments or have no GPU to measure."""
    rows = world.direct.mpi.allgather(settings)
    if any(row != rows[0] for row in rows):
        by_rank = "; ".join(f"rank {rank} passes {row._asdict()}" for rank, row in enumerate(rows))
        raise RanksDisagree(f"autotune: the ranks pass different arguments; pass equal arguments ({by_rank})")
    if settings.device == "cuda" and gpus.table() is None:
        raise ValueError("autotune: device='cuda', but the session computes on the CPU; call mpi.start(with_cuda=True)")


def _measure(world: Communicator, settings: _Settings) -> measured_cache.Rows:
    """Measure the collectives, each for an equal share of the remaining time; return rows for the selector."""
    rows: measured_cache.Rows = {}
    buffers = _buffers(world, settings)
    series = [(verb, kind) for verb in settings.verbs for kind in buffers if not (kind and verb in _INDIFFERENT)]
    ends = time.perf_counter() + settings.seconds
    for index, (verb, is_symmetric) in enumerate(series):
        seconds = (ends - time.perf_counter()) / (len(series) - index)
        key = Key(verb, "node" if world.num_nodes == 1 else "nodes", is_symmetric, settings.device)
        points = _points(world, verb, buffers[is_symmetric], settings, seconds)
        if not points:
            continue
        choices = (selector.fitted(choice, world) for choice in selector[key])
        former = [choice for choice in choices if choice.flavour in settings.flavours]
        chosen = beyond(choose(points), points[-1][0], former)
        rows |= {key: chosen} | ({key._replace(symmetric=True): chosen} if verb in _INDIFFERENT else {})
        if world.rank == 0:
            logger.info("autotune: %d of %d, %s: %s", index + 1, len(series), key, _as_text(chosen))
    return rows


def _buffers(world: Communicator, settings: _Settings) -> dict[bool, Buffers]:
    """Return two tensors in ordinary memory (key False) and, if available, two in symmetric memory (key True).

    The tensors contain zeros, so that repeated sums stay finite. GPU tensors are on this rank's current GPU.
    """
    count, device = settings.max_bytes // _DTYPE.itemsize + world.size, settings.device
    zeros = functools.partial(torch.zeros, count, dtype=_DTYPE, device=device)
    buffers = {False: (zeros(), zeros())}
    try:
        x, out = (symmetric_empty(count, dtype=_DTYPE, device=device, comm=world) for _ in range(2))
        buffers[True] = (x.zero_(), out.zero_())
    except Unavailable as error:
        logger.info("autotune: symmetric tensors are not measured: %s", error)
    return buffers


def _points(world: Communicator, verb: str, buffers: Buffers, settings: _Settings, seconds: float) -> list[Point]:
    """Measure ``verb`` at growing sizes until ``seconds`` have passed or one flavour is left; return the times."""
    mpi, ends = world.direct.mpi, time.perf_counter() + seconds
    names = [name for name in settings.flavours if status(BY_NAME[name], verb, settings.device, world) == "available"]
    counts = element_counts(verb, world.size, settings.max_bytes) if names else []
    points: list[Point] = []
    for index, count in enumerate(counts):
        left_seconds = mpi.bcast(ends - time.perf_counter())
        if points and (left_seconds <= 0 or len(names) == 1):
            break
        calls = {name: _call(world, verb, name, buffers, count) for name in names}
        for name in names:
            for _ in range(BY_NAME[name].num_trial_calls):
                calls[name]()
        share = left_seconds / (len(counts) - index)
        times = timing.interleaved(mpi, calls, seconds=share, min_turns=_MIN_TURNS, max_turns=_MAX_TURNS)
        points.append((count * _DTYPE.itemsize, times))
        names = [name for name in names if not is_hopeless(name, points)]
    return points


def element_counts(verb: str, num_ranks: int, max_bytes: int) -> list[int]:
    """Return the number of elements of the call's larger tensor, for each size to measure."""
    step = 1 if verb in _IN_ONE_PIECE else num_ranks
    powers = itertools.takewhile(lambda count: count * _DTYPE.itemsize <= max_bytes, (4**n for n in itertools.count()))
    return sorted({-(-count // step) * step for count in powers})


def _call(world: Communicator, verb: str, name: str, buffers: Buffers, count: int) -> Callable[[], object]:
    """Return a function that calls ``verb``. For the selector, the size of the call is ``count`` elements."""
    part = 0 if verb in _IN_ONE_PIECE else count // world.size
    x_count = part if verb in ("allgather", "gather") else count
    out_count = part if verb in ("reduce_scatter", "scatter") else count
    call = functools.partial(getattr(all_verbs, verb), buffers[0][:x_count], comm=world, flavour=name)
    if verb not in _IN_ONE_PIECE:
        call = functools.partial(call, out=buffers[1][:out_count])
    return timing.until_done(call, buffers[0].device)


def _save(world: Communicator, rows: measured_cache.Rows, path: str | pathlib.Path | None, device: str) -> str:
    """Write the rows to a file on rank 0, and return the text for ``selector.source``. All ranks must call it."""

    def write() -> str:
        if world.rank != 0:
            return ""
        known = measured_cache.facts(world, device)
        target = known.path() if path is None else pathlib.Path(path)
        date = measured_cache.write(target, known, rows)
        logger.info("autotune: wrote %s", target)
        return f"measured on {date}, {target}"

    def failed(failures: Mapping[int, str]) -> TorchMPIError:
        why = f"the measured choices are in use, but cannot be saved: {agree.first_text(failures)}; pass another path"
        return TorchMPIError(f"autotune: {why}")._of_call("autotune", world)

    return agree.gather_results(world.direct.mpi.allgather, write, (OSError,), str, failed)[0]


def choose(points: Sequence[Point]) -> list[Choice]:
    """Return the choices for times at growing sizes. At each size, only flavours that have times are candidates."""
    runs: list[tuple[str, list[Point]]] = []  # each chosen flavour, with the points at which it is chosen
    for num_bytes, times in points:
        best = min(times, key=lambda name: statistics.median(times[name]))
        if not runs or _displaces(times, best, runs[-1][0]):
            runs.append((best, []))
        runs[-1][1].append((num_bytes, times))
    limits = [round(math.sqrt(run[-1][0] * after[0][0])) for (_, run), (_, after) in itertools.pairwise(runs)]
    return [
        Choice(limit, winner, _why(winner, run[len(run) // 2]))
        for limit, (winner, run) in zip([*limits, math.inf], runs, strict=True)
    ]


def beyond(choices: Sequence[Choice], largest_bytes: int, former: Sequence[Choice]) -> list[Choice]:
    """Return the choices, followed by the former choices that begin beyond the largest measured size."""
    begins = [-1.0, *(choice.max_bytes for choice in former)]
    tail = [(begin, choice) for begin, choice in zip(begins, former, strict=False) if begin >= largest_bytes]
    if not tail or tail[0][1].flavour == choices[-1].flavour:
        return list(choices)
    return [*choices[:-1], choices[-1]._replace(max_bytes=tail[0][0]), *(choice for _, choice in tail)]


def _displaces(times: Times, challenger: str, holder: str) -> bool:
    """Return whether the flavour ``challenger`` replaces the flavour ``holder``.

    The challenger must be faster by ``_DISPLACES_BY`` in both halves of the turns, because other programs on the
    machine may slow one of the flavours down for a while. A holder without times is always replaced.
    """
    if holder not in times:
        return True
    half = (len(times[holder]) + 1) // 2
    return all(
        statistics.median(times[holder][part]) > _DISPLACES_BY * statistics.median(times[challenger][part])
        for part in (slice(half), slice(-half, None))
    )


def _why(winner: str, point: Point) -> str:
    num_bytes, times = point
    medians = {name: statistics.median(turns) for name, turns in times.items()}
    if len(medians) == 1:
        return "the only flavour measured"
    seconds, usual = medians.pop(winner), FLAVOURS[0].name
    other = usual if usual in medians else min(medians, key=medians.__getitem__)
    return f"{medians[other] / seconds:.1f}x as fast as {other} at {in_units(num_bytes)}, measured"


def is_hopeless(name: str, points: Sequence[Point]) -> bool:
    """Return whether flavour ``name`` was much slower than the best at the last two sizes (``_HOPELESS``)."""
    recent = [times for num_bytes, times in points[-2:] if num_bytes >= _DROP_FROM_BYTES]
    return len(recent) == 2 and all(
        statistics.median(times[name]) > _HOPELESS * min(map(statistics.median, times.values())) for times in recent
    )


def in_units(num_bytes: float) -> str:
    """Return a size as text, for example "64 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def _as_text(choices: Sequence[Choice]) -> str:
    """Return the choices as text, for example "mpi to 64 KiB, shared beyond"."""
    *smaller, last = choices
    return ", ".join([*(f"{c.flavour} to {in_units(c.max_bytes)}" for c in smaller), f"{last.flavour} beyond"])
