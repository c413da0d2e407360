"""Measurements: ``torchmpirun -n 2 -m torchmpi_py.bench compare --verb allreduce --sizes 4:64M:8x``.

What is measured, and how, stands in docs/bench.md. A run ends early by one of two errors, raised on every rank alike:
the job ends with one message instead of a hang.
"""


class UsageError(Exception):
    """The command line asks for what does not exist or does not fit here; the message says what does."""


class WrongValue(Exception):  # noqa: N818 - the name says what happened
    """A collective gave a value that is not the right one; the message names flavour, size, rank and element."""
