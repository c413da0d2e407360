"""Train a program several times on this rank: torchmpirun -n 4 trainings.py SEED:PAUSE,... PROGRAM OPTIONS...

Training number i runs in the folder ``training-i``, with ``--seed`` and ``--pause``. Between two trainings ``mpi.stop``
is called, so the job is started, and torch imported, only once for all of them. Each training counts the bytes that
this rank sends.

Bytes are those of the algorithm, whatever memory they pass through: of a collective the least that ranks send for it,
mean over the ranks; of a parameter server what goes to or comes from the shards of other ranks. Each rank leaves their
sum in the folder of the training, in a file ``bytes-RANK-...``. The counter takes the place of a trace
(``torchmpirun --profile``), and costs about a microsecond per operation. It does not count the clocks of bounded
staleness, nor what the launcher and the watchdog send.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torchmpi_py as mpi
from torchmpi_py.collectives.flavour import Sizes
from torchmpi_py.core.communicators import Communicator
from torchmpi_py.core.journal import Recorded
from torchmpi_py.paramserver.server import ParameterServer
from torchmpi_py.watch import tracing

# Times the bytes of an operation's input, for n ranks.
SENT_BY_EACH = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "allgather": lambda n: n - 1,
    "gather": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "sendreceive": lambda n: 1,
    "send": lambda n: 1,
    "recv": lambda n: 0,
    "barrier": lambda n: 0,
    "memory": lambda n: 0,  # that the gradients of DDP meet in
    "allgather_object": lambda n: n - 1,
    "broadcast_object": lambda n: (n - 1) / n,
}


class Counter:
    """What takes the place of a trace between ``start`` and ``stop``; written by ``stop``."""

    servers: list[ParameterServer] = []
    numbers = itertools.count()

    def __init__(self, world: Communicator) -> None:
        self.file = Path(f"bytes-{world.rank}-{next(self.numbers)}").absolute()
        self.num_ranks = world.size
        self.sent: list[float] = []  # several threads append

    def begin(self, operation: Recorded) -> int:
        """An operation begins."""
        return 0

    def end(self, operation: Recorded, thread_role: int, begin: int, launched: int) -> None:
        """An operation is over. A gather of torch.distributed states the bytes of all ranks, so its input counts."""
        sizes = operation.others[-1] if operation.others else None
        num_bytes = sizes.num_bytes[operation.comm.rank] if isinstance(sizes, Sizes) else operation.num_bytes
        self.sent.append(num_bytes * SENT_BY_EACH[operation.name](operation.comm.size))

    def read_clock(self) -> None:
        """Nothing: bytes need no clock."""

    def write(self) -> None:
        """Store the sum. A server that spans ``num_ranks`` has but one part of what is exchanged on this rank."""
        exchanged = sum(server.num_bytes_sent + server.num_bytes_received for server in self.servers)
        through_servers = exchanged * (self.num_ranks - 1) / self.num_ranks
        self.file.write_text(json.dumps(sum(self.sent) + through_servers))
        self.servers.clear()


def main() -> None:
    """Run the trainings of the command line."""
    trainings, program, *words = sys.argv[1:]
    make, start = ParameterServer.__init__, Path.cwd()

    def remembered(server: ParameterServer, *arguments: Any) -> None:
        Counter.servers.append(server)
        make(server, *arguments)

    sys.path[0] = str(Path(program).parent)
    with mock.patch.object(tracing, "start", Counter), mock.patch.object(ParameterServer, "__init__", remembered):
        for number, training in enumerate(trainings.split(",")):
            seed, pause = training.split(":")
            folder = start / f"training-{number}"
            folder.mkdir(exist_ok=True)
            os.chdir(folder)
            sys.argv = [program, *words, "--seed", seed, "--pause", pause]
            runpy.run_path(program, run_name="__main__")
            mpi.stop()


if __name__ == "__main__":
    main()
