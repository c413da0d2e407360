"""What the journal, the reports and the traces read of an operation.

The verbs' ``Operation`` has it, and so has ``Plain``, an operation that is no verb.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchmpi_py.core.sequences import CallSequence


class RecordedGroup(Protocol):
    """The communicator of an operation."""

    @property
    def key(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def sequences(self) -> Sequence[CallSequence]:
        """The sequence of operations of each thread role."""


class Method(Protocol):
    """The way in which an operation is carried out: a flavour."""

    @property
    def name(self) -> str: ...

    @property
    def exchanges_headers(self) -> bool:
        """Whether the ranks compare what they call themselves, before any data moves."""


class Recorded(Protocol):
    """An operation, as far as the journal reads it."""

    @property
    def name(self) -> str:
        """The verb."""

    @property
    def flavour(self) -> Method: ...

    @property
    def comm(self) -> RecordedGroup: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def arguments(self) -> Sequence[Any]: ...

    @property
    def fingerprint(self) -> tuple[Any, ...] | None:
        """What has to be equal on all ranks; None for an operation without counterparts to compare with."""


class Traced(Recorded, Protocol):
    """An operation, as far as a trace reads it."""

    @property
    def launched(self) -> int:
        """When it was launched, in ns of ``time.monotonic_ns``; 0 for a blocking call."""


class Plain:
    """An operation that is no verb: a barrier, a file that all ranks write. ``fingerprint`` as in ``Recorded``."""

    exchanges_headers = False
    num_bytes = 0
    arguments = ()

    def __init__(self, name: str, comm: RecordedGroup, fingerprint: tuple[str] | None) -> None:
        self.name, self.comm, self.fingerprint, self.flavour = name, comm, fingerprint, self
