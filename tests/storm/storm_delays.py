"""Delays at every point of the shared-memory protocols, drawn from a seed: ranks and threads fall out of step there."""

import functools
import random
import threading
import time
import zlib

import pytest

from torchmpi_py.collectives.flavours import staging, two_shot
from torchmpi_py.collectives.flavours.node_group import NodeGroup
from torchmpi_py.collectives.flavours.trials import Trials
from torchmpi_py.memory.peer_memory import PeerMemory

LIKELIHOOD, LONGEST_SECONDS = 0.08, 0.003
_local = threading.local()
POINTS = [(NodeGroup, name) for name in ("announce", "read_headers", "views", "given", "reduced", "two_slots")]
POINTS += [(two_shot, "carry_out"), (two_shot, "publish"), (staging, "allreduce_at_once"), (staging, "pipeline")]
POINTS += [(PeerMemory, "read")]


def _pause(seed):
    if not hasattr(_local, "rng"):
        _local.rng = random.Random(f"{seed} {threading.current_thread().name}")
    if _local.rng.random() < LIKELIHOOD:
        time.sleep(_local.rng.random() * LONGEST_SECONDS)


def inject(patch: pytest.MonkeyPatch, seed):
    """Before and after each point, and each barrier of a node's ranks."""

    def delayed(former):
        @functools.wraps(former)
        def run(*args, **kwargs):
            _pause(seed)
            made = former(*args, **kwargs)
            _pause(seed)
            return made

        return run

    for owner, name in POINTS:
        patch.setattr(owner, name, delayed(getattr(owner, name)))
    make = NodeGroup.__init__

    def init(self, channel):
        make(self, channel)
        self.barrier = delayed(self.barrier)

    patch.setattr(NodeGroup, "__init__", init)


def alternate(patch: pytest.MonkeyPatch):
    """Go each way as often as the others, from the first call on: trials begin with the same one."""

    def run(self, key, num_bytes, ways):
        self.count = getattr(self, "count", -1) + 1
        ways[zlib.crc32(f"{key} {self.count}".encode()) % len(ways)]()

    patch.setattr(Trials, "run", run)
