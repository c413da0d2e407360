"""Delays at every point of the shared-memory protocols, drawn from a seed: ranks and threads fall out of step there."""

import functools
import random
import threading
import time

import pytest

from torchmpi_py.collectives.flavours import staging, two_shot
from torchmpi_py.collectives.flavours.node_group import NodeGroup

LIKELIHOOD, LONGEST_SECONDS = 0.08, 0.003
_local = threading.local()
POINTS = [
    (NodeGroup, "announce"),
    (NodeGroup, "read_headers"),
    (NodeGroup, "views"),
    (NodeGroup, "given"),
    (NodeGroup, "reduced"),
    (two_shot, "carry_out"),
    (two_shot, "publish"),
    (staging, "pipeline"),
]


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
