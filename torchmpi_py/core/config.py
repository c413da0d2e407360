"""Configuration: ``Tuning`` holds every size, threshold and timeout; the functions read the variables TORCHMPI_*.

The module also names the directories of files for later jobs, and writes these files (``keep``).
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

from torchmpi_py import trusted_files

PREFIX = "TORCHMPI_"
TUNING_DIR = f"{PREFIX}TUNING_DIR"
PROFILE = f"{PREFIX}PROFILE"
DUMP_DIR = f"{PREFIX}DUMP_DIR"
LOG = f"{PREFIX}LOG"
ERRORS = f"{PREFIX}ERRORS"  # read by launch/notices.py
TIMELINE = f"{PREFIX}TIMELINE"
STARTED_PID = f"{PREFIX}STARTED_PID"
EXPERIMENT = f"{PREFIX}EXPERIMENT"  # folder of the sweep's experiment that runs in this process
AT_DEADLINE = ("abort", "report", "raise")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_OTHER_NAMES = {"deadline_seconds": "DEADLINE"}
_TEST_PREFIXES = ("BED", "FAULTS", "HOSTS", "MODEL", "PYTORCH_SUITE", "REPEATS", "SOAK_", "STORM_", "TEST_")
_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Sizes and timeouts, to pass as ``mpi.start(tuning=...)``; or set ``TORCHMPI_<FIELD>`` in the environment.

    All ranks must use the same values, because the values determine which messages are sent.
    """

    native_async_bytes: int = 64 << 10
    """Largest size, in bytes, of asynchronous collectives that are posted as MPI's own nonblocking calls (3 us from
    launch to result, against 19 us through the communication thread). Larger ones run on the communication thread.
    MPI_Iallreduce would copy them at launch (113 us for 4 MiB) and make no progress while Python computes: see
    decision 002."""

    message_bytes: int = 1 << 30
    """Size of the longest MPI message, in bytes. Longer data travel in pieces, because MPI 3 counts in 32 bits."""

    wire_bytes: int = 4 << 20
    """Bytes of the scratch memory for dtypes that are reduced in a different dtype (16-bit floats in float32)."""

    staging_bytes: int = 16 << 20
    """Largest shared memory per rank, in bytes, through which flavour shared passes tensors that are not symmetric.
    The flavour uses four times ``chunk_bytes`` for each communicator, once for blocking and once for asynchronous
    calls."""

    chunk_bytes: int = 1 << 20
    """Largest chunk, in bytes, in which flavour shared copies ordinary tensors through shared memory (twice this size
    in an allreduce of two ranks). The ranks wait for each other once per chunk. Larger tensors are read in place if
    that is faster: see decision 028."""

    cache_bytes: int = 1536 << 10
    """Size, in bytes over all ranks' tensors, of the block that a reduction in shared memory works on. It is a share of
    a core's own cache, but large enough to hide Python (2 ranks, 4 to 64 MiB: a quarter of it takes 1.1 to 1.4 times
    as long)."""

    gpu_chunk_bytes: int = 4 << 20
    """Largest chunk, in bytes, in which flavour staged copies tensors between GPU and host. Pinned memory has room for
    six chunks per communicator and thread."""

    gpu_scratch_bytes: int = 128 << 20
    """Largest GPU memory, in bytes per rank, communicator and thread, through which flavour cudaipc passes tensors that
    are not symmetric. The flavour uses less if the largest tensor is smaller. The ranks wait for each other twice per
    piece of this size."""

    gpu_cache_bytes: int = 24 << 20
    """Size, in bytes over all ranks' tensors, of the block that a reduction on a GPU works on: half of a large GPU's L2
    cache."""

    fuse_bytes: int = 16 << 20
    """Largest flat buffer, in bytes, in which small gradients, or parameters, travel together."""

    alone_bytes: int = 1 << 20
    """Smallest gradient, or parameter, that travels alone, in bytes."""

    deadline_seconds: float = 600
    """Timeout of every operation, in seconds, after which a report names the late ranks. ``at_deadline`` says what else
    happens. With 0 operations have no timeout. The environment variable may also be called TORCHMPI_DEADLINE."""

    at_deadline: str = "abort"
    """Effect of an operation that takes longer than ``deadline_seconds``: "abort" ends the job, "report" lets the
    operation go on, "raise" raises CollectiveTimeout in the program that waits."""

    unreachable_seconds: float = 15
    """Time, in seconds without a sign of life, after which another host counts as unreachable. This is reported and
    ends the job, except with ``at_deadline`` "report". With 0 no host counts as unreachable."""

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
    """Return the defaults, overridden by ``TORCHMPI_<FIELD>`` (for example TORCHMPI_FUSE_BYTES=1048576)."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Tuning):
        names = [field.name.upper(), *filter(None, [_OTHER_NAMES.get(field.name)])]
        texts = {PREFIX + name: environ[PREFIX + name] for name in names if PREFIX + name in environ}
        if len(set(texts.values())) > 1:
            settings = " and ".join(f"{name}={text}" for name, text in texts.items())
            raise ValueError(f"{settings} are the same setting: set only one of them")
        for name, text in texts.items():
            try:
                values[field.name] = _READERS[str(field.type)](text)
            except ValueError:
                kind, unit = "number" if field.type == "float" else "whole number", field.name.rpartition("_")[2]
                raise ValueError(f"{name}={text!r}: give a {kind} of {unit}") from None
    return Tuning(**values)


def known_names() -> set[str]:
    """Return the names of all variables TORCHMPI_... that the package reads or sets."""
    fields = {f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(Tuning)}
    return (
        fields
        | {f"{PREFIX}{name}" for name in ("CONFIG", *_OTHER_NAMES.values())}  # CONFIG is launch/site_settings.py's
        | {TUNING_DIR, PROFILE, DUMP_DIR, TIMELINE, LOG, ERRORS, STARTED_PID, EXPERIMENT}
    )


def unknown_settings(environ: Mapping[str, str] = os.environ) -> str:
    """Return a line about variables TORCHMPI_... without effect, which may be misspelt; "" without any."""
    short_names, texts = [name.removeprefix(PREFIX) for name in known_names()], []
    for name in sorted(environ):
        short_name = name.removeprefix(PREFIX)
        if short_name != name and short_name not in short_names and not short_name.startswith(_TEST_PREFIXES):
            near = difflib.get_close_matches(short_name, short_names, n=1)
            texts.append(f"{name} (did you mean {PREFIX}{near[0]}?)" if near else name)
    have = "have" if len(texts) > 1 else "has"
    return f"{', '.join(texts)} {have} no effect: the package reads no such variable" if texts else ""


def tuning_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Return the directory of ``autotune``'s measurements: TORCHMPI_TUNING_DIR, else one in the user's cache."""
    directory = environ.get(TUNING_DIR)
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(directory) if directory else pathlib.Path(cache, "torchmpi_py")


def dump_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory for records of a hanging job: TORCHMPI_DUMP_DIR, else the temporary directory."""
    return environ.get(DUMP_DIR) or tempfile.gettempdir()


def log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the lowest level of messages that the package logs (TORCHMPI_LOG); None: Python's logging decides."""
    level = environ.get(LOG, "").upper()
    if level and level not in _LOG_LEVELS:
        raise ValueError(f"{LOG}={environ[LOG]!r}: give one of {', '.join(_LOG_LEVELS).lower()}")
    return level or None


def keep(path: pathlib.Path, content: object) -> None:
    """Write ``content`` as JSON to a file for later jobs. Raise OSError if the file cannot be written.

    Readers see the whole file or none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    trusted_files.refuse_others(path)
    file, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.chmod(temporary, 0o644)  # readable for all, because users may share the directory
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def profile_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """Return the directory of traces, or None without tracing. ``torchmpirun --profile`` sets TORCHMPI_PROFILE."""
    directory = environ.get(PROFILE)
    return pathlib.Path(directory).absolute() if directory else None


def timeline_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory where the ranks' boards stay, or "". ``torchmpirun --timeline`` sets TORCHMPI_TIMELINE."""
    return environ.get(TIMELINE, "")


current = Tuning()
"""The tuning of the session. Only a session assigns it, through ``use``. Read it as ``config.current``."""

can_raise = False
"""Whether an operation raises an error after its timeout."""


def use(tuning: Tuning) -> None:
    """Make ``tuning`` the current one."""
    global current, can_raise
    current = tuning
    can_raise = tuning.at_deadline == "raise" and tuning.deadline_seconds > 0
