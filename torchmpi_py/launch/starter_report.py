"""What is said of the first end of a rank on another host, which torchmpirun cannot see.

When a rank dies elsewhere, the MPI's starter ends the ranks here, which looks as if they had been killed, and its exit
code does not name the rank. But Open MPI's starter prints where the first death was (`Vendor.death_reports`), and a
rank that raises an error prints its traceback, and all that passes through torchmpirun. MPICH's and Intel MPI's
starters print their reports to the standard output, which torchmpirun does not read.
"""

import re
from typing import NamedTuple

from torchmpi_py.launch.mpirun import Vendor

_TRACEBACK = r"\[rank (?P<rank>\d+)\] Traceback"


class StarterReport(NamedTuple):
    """The first rank that ended, what is said of it, and the exit code of the job."""

    rank: int
    text: str
    code: int


def find(vendor: Vendor, output: str, code: int) -> StarterReport | None:
    """The report in the output of a starter that ends with this code, if there is one."""
    for pattern in (*vendor.death_reports, _TRACEBACK):
        if found := re.search(pattern, output):
            words = {"host": "another host", "signal": "", "code": "", **found.groupdict()}
            how = "raised an error"
            if words["signal"]:
                how, code = f"was killed by signal {words['signal']}", 128 + int(words["signal"])
            elif words["code"]:
                how, code = f"ended with exit code {words['code']}", int(words["code"])
            return StarterReport(int(found["rank"]), f"rank {found['rank']} on {words['host']} {how}", code)
    return None
