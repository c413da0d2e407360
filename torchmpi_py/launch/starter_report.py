"""Search mpirun's output for the rank of another host that ended first, because torchmpirun cannot observe that rank.

When a rank dies on another host, mpirun kills the ranks of this host. mpirun's exit code does not identify the first
rank. But Open MPI's mpirun prints a report of the first death (`Vendor.death_reports`), and a rank that raises an error
prints its traceback. torchmpirun reads both outputs. With MPICH and Intel MPI, mpirun prints its reports to the
standard output, which torchmpirun does not read.
"""

import re
from typing import NamedTuple

from torchmpi_py.launch.mpirun import Vendor

_TRACEBACK = r"\[rank (?P<rank>\d+)\] Traceback"


class StarterReport(NamedTuple):
    """The first rank that ended, a message about the cause of its end, and the exit code of the job."""

    rank: int
    text: str
    code: int


def find(vendor: Vendor, output: str, code: int) -> StarterReport | None:
    """Return the first report or traceback in mpirun's output, or None.

    ``code`` is mpirun's exit code. It is also the job's exit code, unless the report contains a different code.
    """
    for pattern in (*vendor.death_reports, _TRACEBACK):
        if match := re.search(pattern, output):
            words = {"host": "another host", "signal": "", "code": "", **match.groupdict()}
            how = "raised an error"
            if words["signal"]:
                how, code = f"was killed by signal {words['signal']}", 128 + int(words["signal"])
            elif words["code"]:
                how, code = f"ended with exit code {words['code']}", int(words["code"])
            return StarterReport(int(match["rank"]), f"rank {match['rank']} on {words['host']} {how}", code)
    return None
