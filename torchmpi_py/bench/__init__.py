"""Measurements: ``torchmpirun -n 2 -m torchmpi_py.bench compare --verb allreduce --sizes 4:64M:8x``.

docs/dev/bench.md describes the measurements and the method. Two errors can end a run early. Every rank raises them, so
the job ends with one message instead of a hang.
"""


class UsageError(Exception):
    """The command line contains an unknown name or an impossible request; the message lists the valid ones."""


class WrongValue(Exception):  # noqa: N818 - the name says what happened
    """A collective returned a wrong value; the message names the flavour, size, rank and element."""
