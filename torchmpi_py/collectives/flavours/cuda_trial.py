"""A program that tries whether this MPI takes addresses of GPU memory: ``python cuda_trial.py cuda:0``.

The program is a process, and a job of one rank, of its own: an MPI that takes such an address for one of the host
crashes. So each trial is announced on standard output before it is made; the parent reads there where the program
ended, and how. Nothing of the package is imported; the host (``cpu``) serves as well.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

MARK = "cuda_trial:"  # before lines for the parent; an MPI may write on standard output too
TRYING, WRONG, FAILED, RIGHT = "trying", "wrong", "failed", "right"
LAST_SECONDS = 120  # the parent may have been killed

# The calls, on x = 0, 2, 4, ... and y = 0, 5, 10, ...; and the first multiple that they leave in y.
TRIALS: dict[str, tuple[Callable[[Any, Any, Any], object], int]] = {
    "Sendrecv": (lambda mpi, x, y: mpi.COMM_SELF.Sendrecv(x, 0, 0, y, 0, 0), 2),  # a message to itself
    "Allreduce": (lambda mpi, x, y: mpi.COMM_SELF.Allreduce(x, y, mpi.SUM), 2),  # over one rank
    "Reduce_local": (lambda mpi, x, y: mpi.SUM.Reduce_local(x, y), 7),  # what a reduction over several is made of
}
COUNTS = (16, 1 << 18)  # 64 bytes go at once; 1 MiB by the way for large messages


def reports(mpi: Any, device: str) -> Iterator[str]:
    """The lines for the parent, in order: each trial before it is made, and the end."""
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
    """Make a trial with ``count`` numbers in float32, which holds them exactly. Whether the result is right."""
    import torch

    call, factor = TRIALS[name]
    x, y = (torch.arange(count, dtype=torch.float32, device=device) * each for each in (2, 5))
    if device != "cpu":
        torch.cuda.synchronize(device)
    call(mpi, _message(mpi, x), _message(mpi, y))
    return torch.equal(y.cpu(), torch.arange(count, dtype=torch.float32) * factor)


def _message(mpi: Any, x: Any) -> list[Any]:
    return [mpi.memory.fromaddress(x.data_ptr(), x.nbytes), mpi.FLOAT]


def main(device: str) -> None:
    """Take the GPU, then start MPI, in the order of ``start(with_cuda=True)``; make the trials and report each."""
    signal.alarm(LAST_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer
    del sys.path[0]  # the folder of this file, whose names are not meant for others
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
