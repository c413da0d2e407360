"""Find out from mpirun's output which rank of another host ended first; torchmpirun cannot see it directly.

When a rank dies elsewhere, mpirun ends the ranks here. They look as if they had been killed, and mpirun's exit code
does not name the first rank. But Open MPI's mpirun prints where the first death was (`Vendor.death_reports`), and a
rank that raises an error prints its traceback; both pass through torchmpirun. The mpirun of MPICH and of Intel MPI
prints its reports to the standard output, which torchmpirun does not read.
"""

import re
from typing import NamedTuple

from torchmpi_py.launch.mpirun import Vendor

_TRACEBACK = r"\[rank (?P<rank>\d+)\] Traceback"


class StarterReport(NamedTuple):
    """The first rank that ended, a sentence about its end, and the exit code of the job."""

    rank: int
    text: str
    code: int


def find(vendor: Vendor, output: str, code: int) -> StarterReport | None:
    """Return the report in the output of an mpirun that ends with this code, or None."""
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
