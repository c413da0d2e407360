"""Benchmarks: ``torchmpirun -n 2 -m torchmpi_py.bench compare --verb allreduce --sizes 4:64M:8x``.

docs/dev/bench.md describes the measurements and the method. Two errors can end a run early. Every rank raises the same
error, so the job ends with one message instead of a hang.
"""


class UsageError(Exception):
    """The command line contains an unknown name or an impossible request. The message explains what is valid."""


class WrongValue(Exception):  # noqa: N818 - the name says what happened
    """A collective returned a wrong value, or trainers have different parameters. The message states the details."""
