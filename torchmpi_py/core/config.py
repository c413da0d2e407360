"""Every size, threshold and deadline of the package, in one frozen dataclass; the only reader of TORCHMPI_*.

Also where files for later jobs lie, and how they are written.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "TORCHMPI_"
TUNING_DIR = f"{PREFIX}TUNING_DIR"
PROFILE = f"{PREFIX}PROFILE"
DUMP_DIR = f"{PREFIX}DUMP_DIR"
STARTED_PID = f"{PREFIX}STARTED_PID"
AT_DEADLINE = ("abort", "report", "raise")
_OTHER_NAMES = {"deadline_seconds": "DEADLINE"}
_OF_TESTS = (
    "FAULTS",
    "MODEL",
    "PYTORCH_SUITE",
    "REPEATS",
    "SOAK_",
    "STORM_",
    "TEST_",
)  # variables of our tests begin so
_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What may be tuned; pass one to ``mpi.start(tuning=...)``, or set ``TORCHMPI_<FIELD>`` in the environment.

    All ranks must use the same values: they decide which messages are sent.
    """

    native_async_bytes: int = 64 << 10
    """Asynchronous collectives up to this size are posted as MPI's own nonblocking calls (3 us from launch to result,
    against 19 us through the communication thread); larger ones run on the communication thread, because MPI_Iallreduce
    copies at launch (113 us for 4 MiB) and makes no progress while Python computes. See docs/decisions/002."""

    message_bytes: int = 1 << 30
    """Longest single MPI message. Longer ones travel in pieces: MPI 3 counts in 32 bits."""

    wire_bytes: int = 4 << 20
    """Scratch for dtypes that are reduced in another form than they are stored in (16-bit floats as float32)."""

    staging_bytes: int = 16 << 20
    """The most shared memory per rank through which flavour shared passes tensors that are not symmetric. It takes four
    times ``chunk_bytes`` for each communicator that does so, once for blocking and once for asynchronous calls."""

    chunk_bytes: int = 1 << 20
    """Flavour shared stages ordinary tensors in chunks of up to this size: a meeting of the ranks per chunk."""

    cache_bytes: int = 1536 << 10
    """What a reduction in shared memory touches at a time, over all ranks' tensors: a share of a core's own cache, but
    large enough to hide Python (2 ranks, 4 to 64 MiB: a quarter of it takes 1.1 to 1.4 times as long)."""

    gpu_chunk_bytes: int = 4 << 20
    """Flavour staged copies tensors between GPU and host in chunks of up to this size, with room for six of them per
    communicator and thread in pinned memory."""

    gpu_scratch_bytes: int = 128 << 20
    """GPU memory per rank, as much as the largest tensor takes but not more than this, through which flavour cudaipc
    passes tensors that are not symmetric; once per communicator and thread. The ranks meet twice for this much."""

    gpu_cache_bytes: int = 24 << 20
    """What a reduction on a GPU touches at a time, over all ranks' tensors: half of a large GPU's L2 cache."""

    fuse_bytes: int = 16 << 20
    """Gradients and parameters: small tensors travel together in flat buffers of up to this size."""

    alone_bytes: int = 1 << 20
    """Gradients and parameters of at least this size travel by themselves."""

    deadline_seconds: float = 600
    """An operation that takes longer is reported, with who keeps it; ``at_deadline`` says what else happens; 0: none
    is. In the environment also TORCHMPI_DEADLINE."""

    at_deadline: str = "abort"
    """What becomes of an operation that takes longer than ``deadline_seconds``: "abort" ends the job, "report" lets it
    go on, "raise" makes it a CollectiveTimeout in the program that waits."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"Tuning.{field.name} = {value!r}: give a number of seconds, 0 or more")
            if field.type != "int":
                continue
            may_be_zero = field.name == "native_async_bytes"
            if not isinstance(value, int) or value < 0 or (value == 0 and not may_be_zero):
                unit = field.name.rpartition("_")[2]
                raise ValueError(f"Tuning.{field.name} = {value!r}: give a positive whole number (of {unit})")
        if self.at_deadline not in AT_DEADLINE:
            raise ValueError(f"Tuning.at_deadline = {self.at_deadline!r}: give one of {', '.join(AT_DEADLINE)}")
        if self.staging_bytes < 1 << 20 or self.chunk_bytes < 256:
            raise ValueError(
                f"Tuning.staging_bytes = {self.staging_bytes}, chunk_bytes = {self.chunk_bytes}: "
                "give at least 1048576 and 256"
            )
        if self.gpu_chunk_bytes < 1 << 20:
            raise ValueError(f"Tuning.gpu_chunk_bytes = {self.gpu_chunk_bytes}: give at least 1048576")
        if self.native_async_bytes > min(self.wire_bytes // 4, self.message_bytes):
            raise ValueError(
                f"Tuning.native_async_bytes = {self.native_async_bytes} is more than message_bytes or a quarter of "
                "wire_bytes: a natively posted operation must fit in one message, also when 8 bits travel as 32"
            )


def from_environment(environ: Mapping[str, str] = os.environ) -> Tuning:
    """Defaults, overridden by ``TORCHMPI_<FIELD>`` (for example TORCHMPI_FUSE_BYTES=1048576)."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Tuning):
        names = [field.name.upper(), *filter(None, [_OTHER_NAMES.get(field.name)])]
        given = {PREFIX + name: environ[PREFIX + name] for name in names if PREFIX + name in environ}
        if len(set(given.values())) > 1:
            told = " and ".join(f"{name}={text}" for name, text in given.items())
            raise ValueError(f"{told} are the same setting: give one of them")
        for name, text in given.items():
            try:
                values[field.name] = _READERS[str(field.type)](text)
            except ValueError:
                kind, unit = "number" if field.type == "float" else "whole number", field.name.rpartition("_")[2]
                raise ValueError(f"{name}={text!r}: give a {kind} of {unit}") from None
    return Tuning(**values)


def known_names() -> set[str]:
    """Every variable TORCHMPI_... that the package reads or sets."""
    fields = {f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(Tuning)}
    return fields | {f"{PREFIX}{name}" for name in _OTHER_NAMES.values()} | {TUNING_DIR, PROFILE, DUMP_DIR, STARTED_PID}


def unknown_settings(environ: Mapping[str, str] = os.environ) -> str:
    """A line about the variables TORCHMPI_... that nothing reads, which may be misspelt; "" if there are none."""
    short_names, texts = [name.removeprefix(PREFIX) for name in known_names()], []
    for name in sorted(environ):
        short_name = name.removeprefix(PREFIX)
        if short_name != name and short_name not in short_names and not short_name.startswith(_OF_TESTS):
            near = difflib.get_close_matches(short_name, short_names, n=1)
            texts.append(f"{name} (did you mean {PREFIX}{near[0]}?)" if near else name)
    have = "have" if len(texts) > 1 else "has"
    return f"{', '.join(texts)} {have} no effect: the package reads no such variable" if texts else ""


def tuning_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where ``autotune`` keeps what it measured: TORCHMPI_TUNING_DIR, else in the user's cache."""
    given = environ.get(TUNING_DIR)
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(given) if given else pathlib.Path(cache, "torchmpi_py")


def dump_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Where the last operations of a job that hangs are written: TORCHMPI_DUMP_DIR, else the temporary folder."""
    return environ.get(DUMP_DIR) or tempfile.gettempdir()


def keep(path: pathlib.Path, content: object) -> None:
    """Write a file for later jobs, as JSON: it is there as a whole or not at all. OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.chmod(temporary, 0o644)  # the directory may be shared
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def profile_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """Where traces go, if this job is traced: TORCHMPI_PROFILE, which ``torchmpirun --profile`` sets."""
    given = environ.get(PROFILE)
    return pathlib.Path(given).absolute() if given else None


current = Tuning()
"""The tuning of the session; read it as ``config.current``, for ``use`` replaces it."""

can_raise = False
"""Whether operations are given up at the deadline."""


def use(tuning: Tuning) -> None:
    """Make ``tuning`` the current one."""
    global current, can_raise
    current = tuning
    can_raise = tuning.at_deadline == "raise" and tuning.deadline_seconds > 0
