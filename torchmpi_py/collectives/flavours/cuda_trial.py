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

Trial = Callable[[Any, str, int], bool]  # (MPI, device, number of elements) -> whether the values are right


def exchange(mpi: Any, device: str, count: int) -> bool:
    """A message to itself."""
    given, taken = _values(count, 1, device), _values(count, 0, device)
    _synchronize(device)
    mpi.COMM_SELF.Sendrecv(_message(mpi, given, mpi.BYTE), 0, 0, _message(mpi, taken, mpi.BYTE), 0, 0)
    return _is_multiple(taken, 1)


def allreduce(mpi: Any, device: str, count: int) -> bool:
    """The sum over one rank."""
    given, taken = _values(count, 3, device), _values(count, 0, device)
    _synchronize(device)
    mpi.COMM_SELF.Allreduce(_message(mpi, given, mpi.FLOAT), _message(mpi, taken, mpi.FLOAT), mpi.SUM)
    return _is_multiple(taken, 3)


def reduce_local(mpi: Any, device: str, count: int) -> bool:
    """A sum of two arrays: what a reduction over several ranks is made of."""
    given, summed = _values(count, 2, device), _values(count, 5, device)
    _synchronize(device)
    mpi.SUM.Reduce_local(_message(mpi, given, mpi.FLOAT), _message(mpi, summed, mpi.FLOAT))
    return _is_multiple(summed, 7)


TRIALS: dict[str, Trial] = {"Sendrecv": exchange, "Allreduce": allreduce, "Reduce_local": reduce_local}
COUNTS = (16, 1 << 18)  # 64 bytes go at once; 1 MiB by the way for large messages


def reports(mpi: Any, device: str) -> Iterator[str]:
    """The lines for the parent, in order: each trial before it is made, and the end."""
    for count in COUNTS:
        for name, trial in TRIALS.items():
            what = f"{name} of {4 * count} bytes"
            yield f"{TRYING} {what}"
            try:
                is_right = trial(mpi, device, count)
            except Exception as error:
                yield f"{FAILED} {what}: {' '.join(str(error).split())}"
                return
            if not is_right:
                yield f"{WRONG} {what}"
                return
    yield RIGHT


def _values(count: int, factor: int, device: str) -> Any:
    """0, f, 2f, ... in float32, which holds them exactly."""
    import torch

    return torch.arange(count, dtype=torch.float32, device=device) * factor


def _is_multiple(x: Any, factor: int) -> bool:
    import torch

    return torch.equal(x.cpu(), _values(x.numel(), factor, "cpu"))


def _message(mpi: Any, x: Any, mpi_type: Any) -> list[Any]:
    return [mpi.memory.fromaddress(x.data_ptr(), x.nbytes), mpi_type]


def _synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


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
