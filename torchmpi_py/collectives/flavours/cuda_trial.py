"""A program that tests whether this MPI accepts addresses of GPU memory: ``python cuda_trial.py cuda:0``.

The program runs in its own process, as a job of one rank, because an MPI that takes a GPU address for a host address
crashes. Therefore the program announces each trial on standard output before the trial starts, so that the parent
process can tell which trial crashed. The program imports nothing from the package. With the argument ``cpu`` the trials
use host memory.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

MARK = "cuda_trial:"  # This prefix marks the lines for the parent, because MPI may also write to standard output.
TRYING, WRONG, FAILED, RIGHT = "trying", "wrong", "failed", "right"
LAST_SECONDS = 120  # The program ends after this time, because its parent may have been killed.

# Each trial is an MPI call on x = 0, 2, 4, ... and y = 0, 5, 10, ..., and the factor k of the expected result
# y = 0, k, 2k, ...
TRIALS: dict[str, tuple[Callable[[Any, Any, Any], object], int]] = {
    "Sendrecv": (lambda mpi, x, y: mpi.COMM_SELF.Sendrecv(x, 0, 0, y, 0, 0), 2),  # a message from the rank to itself
    "Allreduce": (lambda mpi, x, y: mpi.COMM_SELF.Allreduce(x, y, mpi.SUM), 2),  # a reduction over one rank
    "Reduce_local": (lambda mpi, x, y: mpi.SUM.Reduce_local(x, y), 7),  # MPI's addition of two buffers
}
COUNTS = (16, 1 << 18)  # MPI sends 64 bytes eagerly, and 1 MiB with its protocol for large messages.


def reports(mpi: Any, device: str) -> Iterator[str]:
    """Run the trials, and yield the lines for the parent: one before each trial, and one at the end."""
    for count in COUNTS:
        for name in TRIALS:
            what = f"{name} of {4 * count} bytes"
            yield f"{TRYING} {what}"
            try:
                failure = "" if is_right(mpi, name, device, count) else f"{WRONG} {what}"
            except Exception as error:
                failure = f"{FAILED} {what}: {' '.join(str(error).split())}"
            if failure:
                yield failure
                return
    yield RIGHT


def is_right(mpi: Any, name: str, device: str, count: int) -> bool:
    """Run one trial with ``count`` integers that float32 represents exactly; return whether the result is right."""
    import torch

    call, factor = TRIALS[name]
    x, y = (torch.arange(count, dtype=torch.float32, device=device) * each for each in (2, 5))
    if device != "cpu":
        torch.cuda.synchronize(device)
    call(mpi, _message(mpi, x), _message(mpi, y))
    return torch.equal(y.cpu(), torch.arange(count, dtype=torch.float32) * factor)


def _message(mpi: Any, x: Any) -> list[Any]:
    """Return ``x`` as mpi4py's description of a message: buffer and datatype."""
    return [mpi.memory.fromaddress(x.data_ptr(), x.nbytes), mpi.FLOAT]


def main(device: str) -> None:
    """Select the GPU before MPI starts, like ``start(with_cuda=True)``; then run the trials and report the results."""
    signal.alarm(LAST_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # Write no core file, because a crash is an expected result.
    del sys.path[0]  # Modules in the folder of this file could hide library modules with the same names.
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    from mpi4py import MPI

    for report in reports(MPI, device):
        sys.stdout.write(f"{MARK} {report}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
