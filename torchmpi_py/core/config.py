"""Configuration: ``Tuning`` contains all sizes and timeouts, and the functions read the variables TORCHMPI_*.

The module also determines the directories of files that later jobs read, and writes such files (``keep``).
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
    """Sizes and timeouts, to pass as ``mpi.start(tuning=...)``.

    Alternatively, set the environment variable ``TORCHMPI_<FIELD>``, such as ``TORCHMPI_FUSE_BYTES``. All ranks must
    use the same values, because the values determine which messages are sent. The descriptions of the fields give more
    details on each argument.

    Args:
        native_async_bytes (int): largest asynchronous collective, in bytes, that MPI carries out as its own nonblocking
            call; default 64 KiB. 0 means none.
        message_bytes (int): longest MPI message, in bytes; default 1 GiB.
        wire_bytes (int): scratch memory, in bytes, for dtypes that are reduced in another dtype; default 4 MiB.
        staging_bytes (int): largest shared memory per rank, in bytes, of flavour shared for tensors that are not
            symmetric; default 16 MiB, at least 1 MiB.
        chunk_bytes (int): largest chunk, in bytes, that flavour shared copies; default 1 MiB, at least 256.
        cache_bytes (int): size, in bytes, of the blocks of a reduction in shared memory; default 1.5 MiB.
        gpu_chunk_bytes (int): largest chunk, in bytes, that flavour staged copies; default 4 MiB, at least 1 MiB.
        gpu_scratch_bytes (int): largest GPU memory per rank, in bytes, of flavour cudaipc for tensors that are not
            symmetric; default 128 MiB.
        gpu_cache_bytes (int): size, in bytes, of the blocks of a reduction on a GPU; default 24 MiB.
        fuse_bytes (int): largest buffer, in bytes, for several small gradients; default 16 MiB.
        alone_bytes (int): smallest gradient, in bytes, that is sent alone; default 1 MiB.
        deadline_seconds (float): timeout of every operation, in seconds; default 600. 0 means no timeout.
        at_deadline (str): effect of the timeout: "abort" (default), "report" or "raise".
        unreachable_seconds (float): time without a sign of life, in seconds, after which another host counts as
            unreachable; default 15. 0 means never.

    Raises:
        ValueError: a value is not valid.

    Examples:
        >>> mpi.Tuning(deadline_seconds=60, at_deadline="raise").deadline_seconds
        60
    """

    native_async_bytes: int = 64 << 10
    """Largest size, in bytes, of asynchronous collectives that are posted as MPI's own nonblocking calls. Such a call
    takes 3 us from launch to result, against 19 us through the communication thread. Larger collectives run on the
    communication thread. MPI_Iallreduce would copy their data at launch (113 us for 4 MiB) and make no progress while
    Python computes: see decision 002."""

    message_bytes: int = 1 << 30
    """Size of the longest MPI message, in bytes. Longer data travel in pieces, because MPI 3 counts in 32 bits."""

    wire_bytes: int = 4 << 20
    """Size, in bytes, of the scratch memory for dtypes that are reduced in another dtype (16-bit floats in float32)."""

    staging_bytes: int = 16 << 20
    """Largest shared memory per rank, in bytes, through which flavour shared passes tensors that are not symmetric.
    The flavour uses four times ``chunk_bytes`` for each communicator, once for blocking and once for asynchronous
    calls."""

    chunk_bytes: int = 1 << 20
    """Largest chunk, in bytes, in which flavour shared copies ordinary tensors through shared memory (twice this size
    in an allreduce of two ranks). The ranks wait for each other once per chunk. Larger tensors are read in place if
    that is faster: see decision 028."""

    cache_bytes: int = 1536 << 10
    """Size, in bytes, of the blocks in which shared memory is reduced, summed over the tensors of all ranks. A block
    fits in a core's own cache, but is large enough to hide the overhead of Python. With a quarter of this size, 2 ranks
    take 1.1 to 1.4 times as long for 4 to 64 MiB."""

    gpu_chunk_bytes: int = 4 << 20
    """Largest chunk, in bytes, in which flavour staged copies tensors between GPU and host. The pinned memory of each
    communicator and thread holds six chunks."""

    gpu_scratch_bytes: int = 128 << 20
    """Largest GPU memory, in bytes per rank, communicator and thread, through which flavour cudaipc passes tensors that
    are not symmetric. The flavour uses less if the largest tensor is smaller. The ranks wait for each other twice per
    piece of this size."""

    gpu_cache_bytes: int = 24 << 20
    """Size, in bytes, of the blocks in which a GPU reduces, summed over the tensors of all ranks. The default is half
    of a large GPU's L2 cache."""

    fuse_bytes: int = 16 << 20
    """Largest flat buffer, in bytes, in which several small gradients or parameters are sent together."""

    alone_bytes: int = 1 << 20
    """Smallest gradient or parameter, in bytes, that is sent alone."""

    deadline_seconds: float = 600
    """Timeout of every operation, in seconds, after which a report lists the late ranks. ``at_deadline`` determines
    what happens next. With 0, operations have no timeout. The environment variable may also be called
    TORCHMPI_DEADLINE."""

    at_deadline: str = "abort"
    """Effect of an operation that takes longer than ``deadline_seconds``: "abort" ends the job, "report" lets the
    operation continue, and "raise" raises CollectiveTimeout on the ranks that wait."""

    unreachable_seconds: float = 15
    """Time, in seconds, after which another host that sends no sign of life counts as unreachable. A report lists this
    host, and the job ends unless ``at_deadline`` is "report". With 0, no host counts as unreachable."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ValueError(f"Tuning.{field.name} = {value!r}: expected a number of seconds, 0 or more")
            if field.type != "int":
                continue
            may_be_zero = field.name == "native_async_bytes"
            if not isinstance(value, int) or value < 0 or (value == 0 and not may_be_zero):
                unit = field.name.rpartition("_")[2]
                raise ValueError(f"Tuning.{field.name} = {value!r}: use a whole number of {unit} >= {1 - may_be_zero}")
        if self.at_deadline not in AT_DEADLINE:
            raise ValueError(f"Tuning.at_deadline = {self.at_deadline!r}: expected one of {', '.join(AT_DEADLINE)}")
        if self.staging_bytes < 1 << 20 or self.chunk_bytes < 256:
            raise ValueError(
                f"Tuning.staging_bytes = {self.staging_bytes}, chunk_bytes = {self.chunk_bytes}: "
                "expected at least 1048576 for staging_bytes, and at least 256 for chunk_bytes"
            )
        if self.gpu_chunk_bytes < 1 << 20:
            raise ValueError(f"Tuning.gpu_chunk_bytes = {self.gpu_chunk_bytes}: expected at least 1048576")
        if self.native_async_bytes > min(self.wire_bytes // 4, self.message_bytes):
            raise ValueError(
                f"Tuning.native_async_bytes = {self.native_async_bytes}: expected at most message_bytes and a quarter "
                "of wire_bytes, because such an operation is sent as one message, in which 8-bit values take 32 bits"
            )


def from_environment(environ: Mapping[str, str] = os.environ) -> Tuning:
    """Return a Tuning with the values of the variables ``TORCHMPI_<FIELD>``, and defaults for the other fields.

    For example, TORCHMPI_FUSE_BYTES=1048576 sets ``fuse_bytes``. Raise ValueError if a value is not valid.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Tuning):
        names = [field.name.upper(), *filter(None, [_OTHER_NAMES.get(field.name)])]
        texts = {PREFIX + name: environ[PREFIX + name] for name in names if PREFIX + name in environ}
        if len(set(texts.values())) > 1:
            settings = " and ".join(f"{name}={text}" for name, text in texts.items())
            raise ValueError(f"{settings}: these variables set the same timeout; set only one of them")
        for name, text in texts.items():
            try:
                values[field.name] = _READERS[str(field.type)](text)
            except ValueError:
                kind, unit = "number" if field.type == "float" else "whole number", field.name.rpartition("_")[2]
                raise ValueError(f"{name}={text!r}: expected a {kind} of {unit}") from None
    return Tuning(**values)


def known_names() -> set[str]:
    """Return the names of all environment variables TORCHMPI_* that the package reads or sets."""
    fields = {f"{PREFIX}{field.name.upper()}" for field in dataclasses.fields(Tuning)}
    return (
        fields
        | {f"{PREFIX}{name}" for name in ("CONFIG", *_OTHER_NAMES.values())}  # launch/site_settings.py reads CONFIG.
        | {TUNING_DIR, PROFILE, DUMP_DIR, TIMELINE, LOG, ERRORS, STARTED_PID, EXPERIMENT}
    )


def unknown_settings(environ: Mapping[str, str] = os.environ) -> str:
    """Return a warning about variables TORCHMPI_* that have no effect and may be misspelt; "" if there are none."""
    short_names, texts = [name.removeprefix(PREFIX) for name in known_names()], []
    for name in sorted(environ):
        short_name = name.removeprefix(PREFIX)
        if short_name != name and short_name not in short_names and not short_name.startswith(_TEST_PREFIXES):
            near = difflib.get_close_matches(short_name, short_names, n=1)
            texts.append(f"{name} (did you mean {PREFIX}{near[0]}?)" if near else name)
    have = "have" if len(texts) > 1 else "has"
    return f"{', '.join(texts)} {have} no effect: the package reads no such variable" if texts else ""


def tuning_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Return the directory of ``autotune``'s measurements: TORCHMPI_TUNING_DIR, else a folder in the user's cache."""
    directory = environ.get(TUNING_DIR)
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(directory) if directory else pathlib.Path(cache, "torchmpi_py")


def dump_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory for records of a hanging job: TORCHMPI_DUMP_DIR, else the temporary directory."""
    return environ.get(DUMP_DIR) or tempfile.gettempdir()


def log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the lowest level of messages that the package logs (TORCHMPI_LOG), or None if the variable is not set."""
    level = environ.get(LOG, "").upper()
    if level and level not in _LOG_LEVELS:
        raise ValueError(f"{LOG}={environ[LOG]!r}: expected one of {', '.join(_LOG_LEVELS).lower()}")
    return level or None


def keep(path: pathlib.Path, content: object) -> None:
    """Write ``content`` as JSON to a file for later jobs. Raise OSError if the file cannot be written.

    No reader ever sees a partly written file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    trusted_files.refuse_others(path)
    file, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.chmod(temporary, 0o644)  # All users may read the file, because they may share the directory.
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def profile_directory(environ: Mapping[str, str] = os.environ) -> pathlib.Path | None:
    """Return the directory of traces (TORCHMPI_PROFILE, from ``torchmpirun --profile``), or None without tracing."""
    directory = environ.get(PROFILE)
    return pathlib.Path(directory).absolute() if directory else None


def timeline_directory(environ: Mapping[str, str] = os.environ) -> str:
    """Return the directory in which the ranks' boards are kept for ``torchmpirun --timeline``; "" without a timeline.

    The directory is the value of TORCHMPI_TIMELINE, which torchmpirun sets.
    """
    return environ.get(TIMELINE, "")


current = Tuning()
"""The tuning of the session. Only a session assigns this variable, through ``use``. Read it as ``config.current``."""

can_raise = False
"""Whether an operation raises an error after its timeout."""


def use(tuning: Tuning) -> None:
    """Make ``tuning`` the current tuning of this process."""
    global current, can_raise
    current = tuning
    can_raise = tuning.at_deadline == "raise" and tuning.deadline_seconds > 0
