"""Sum a tensor with every flavour on every device, and print, as JSON, which flavours returned the right values.

    torchmpirun -n 2 trial.py

Each flavour is printed before its test. If the job ends early, the last printed flavour is the cause.
"""

from __future__ import annotations

import json
import sys

import torch

import torchmpi_py as mpi
from torchmpi_py.collectives.registry import AvailabilityRow
from torchmpi_py.doctor.probes import MARK

NUM_ELEMENTS = 1 << 18  # 1 MiB: large messages use a different protocol than small messages.
TRYING, RIGHT, WRONG = "trying", "right", "gives wrong values"


def main() -> None:
    """Test every flavour. Rank 0 reports each flavour before its test, and the outcome after the test."""
    has_gpu = torch.cuda.is_available()
    mpi.start(with_cuda=has_gpu)
    torch.set_num_threads(1)
    for row in mpi.availability():
        is_served = "unimplemented" not in row.status and "unavailable: serves" not in row.status
        if row.verb == "allreduce" and is_served and (has_gpu or row.device == "cpu"):
            report(row.flavour, row.device, TRYING)
            report(row.flavour, row.device, outcome(row))
    mpi.stop()


def outcome(row: AvailabilityRow) -> str:
    """Test allreduce with the flavour of ``row``. Every rank must make this call.

    Return RIGHT, WRONG or the status of a flavour that is not available; the result is the same on every rank.
    """
    if row.status != "available":
        return row.status
    place = mpi.device() if row.device == "cuda" else torch.device("cpu")
    own = torch.arange(NUM_ELEMENTS, dtype=torch.float32, device=place) % 1000
    expected = own * mpi.size() + sum(range(mpi.size()))
    result = mpi.allreduce(own + mpi.rank(), flavour=row.flavour)
    is_right = mpi.allreduce(int(torch.equal(result, expected)), op="min")
    return RIGHT if is_right else WRONG


def report(flavour: str, device: str, text: str) -> None:
    """Print a line with the state of the test, on rank 0, for the doctor to read."""
    if mpi.rank() == 0:
        print(MARK, json.dumps([flavour, device, text]), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
