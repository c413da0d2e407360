"""Measurements: ``torchmpirun -n 2 -m torchmpi_py.bench compare --verb allreduce --sizes 4:64M:8x``.

docs/dev/bench.md describes what is measured, and how. A run ends early by one of two errors, raised on every rank, so
that the job ends with one message instead of a hang.
"""


class UsageError(Exception):
    """The command line asks for something unknown or impossible here; the message names what is known."""


class WrongValue(Exception):  # noqa: N818 - the name says what happened
    """A collective gave a wrong value; the message names flavour, size, rank and element."""
