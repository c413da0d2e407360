"""Every size, threshold and deadline of the package, in one frozen dataclass; the only reader of TORCHMPI_*."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

PREFIX = "TORCHMPI_"


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

    fuse_bytes: int = 16 << 20
    """nn.synchronize_*: small tensors travel together in flat buffers of up to this size."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 0 or (value == 0 and field.name != "native_async_bytes"):
                raise ValueError(f"Tuning.{field.name} = {value!r}: give a positive whole number (of bytes)")
        if self.native_async_bytes > min(self.wire_bytes // 4, self.message_bytes):
            raise ValueError(
                f"Tuning.native_async_bytes = {self.native_async_bytes} is more than message_bytes or a quarter of "
                "wire_bytes: a natively posted operation must fit in one message, also when 8 bits travel as 32"
            )


def from_environment(environ: Mapping[str, str] = os.environ) -> Tuning:
    """Defaults, overridden by ``TORCHMPI_<FIELD>`` (for example TORCHMPI_FUSE_BYTES=1048576)."""
    values = {}
    for field in dataclasses.fields(Tuning):
        text = environ.get(PREFIX + field.name.upper())
        if text is not None:
            try:
                values[field.name] = int(text)
            except ValueError:
                raise ValueError(f"{PREFIX}{field.name.upper()}={text!r}: give a whole number of bytes") from None
    return Tuning(**values)


current = Tuning()
"""The tuning in use; read it as ``config.current``, for ``install`` replaces it."""


def install(tuning: Tuning) -> None:
    """Make ``tuning`` the one in use."""
    global current
    current = tuning
