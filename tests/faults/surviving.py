"""The program of test_survivors.py: a network is trained, ranks die where the plan says so, every step is written down.

surviving.py FOLDER EPOCHS ASYNCHRONOUS RANK:PLACE:NUMBER... (a rank dies the n-th time that it comes to a place)
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import torchmpi_py as mpi
from torchmpi_py.collectives.flavours import mpi_steps, node_group, two_shot
from torchmpi_py.collectives.flavours.mpi import Mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

BATCH, SEED, SAMPLES = 32, 3, 1437


def dataset():
    """Samples, each with a class and its number."""
    x = torch.randn(SAMPLES, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.TensorDataset(x, torch.stack([x.argmax(1) % 10, torch.arange(SAMPLES)], 1))


def network():
    """In float64: what one process computes in another order is nearly the same."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Tanh(), torch.nn.Linear(100, 10)).double()


def optimizer(parameters):
    """One with a state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def criterion(output, target):
    """Cross entropy; beside the class stands the number of the sample."""
    return torch.nn.functional.cross_entropy(output, target[:, 0])


class Fate:
    """Counts how often this rank comes to a place, and ends the process there."""

    def __init__(self, rank, deaths):
        self.file = Path(os.environ["FAULTS_JOB"], f"fault-{rank}")
        self.deaths = {(place, int(number)) for of, place, number in deaths if int(of) == rank}
        self.counts = {}

    def comes_to(self, place):
        self.counts[place] = self.counts.get(place, 0) + 1
        if (place, self.counts[place]) in self.deaths:
            self.file.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(10)

    def before(self, owner, name, place):
        """Each call of a function comes to a place."""
        function = getattr(owner, name)

        def watched(*arguments):
            self.comes_to(place)
            return function(*arguments)

        setattr(owner, name, watched)

    def between_chunks(self):
        """Reductions come to "half" after each chunk: part of the result is then in everybody's memory."""
        carry_out = two_shot.carry_out

        def watched(steps, how):
            for step in steps:
                carry_out([step], how)
                self.comes_to("half")

        two_shot.carry_out = watched


class Notes:
    """What this rank has done, a line each, on the disk before it goes on."""

    def __init__(self, engine, path, fate):
        self.file, self.fate, self.begin = path.open("w"), fate, 0
        for moment in ("on_sample", "on_backward", "on_update", "on_end_epoch", "on_recovery"):
            setattr(engine.hooks, moment, getattr(self, moment))

    def note(self, kind, **what):
        self.file.write(json.dumps({"kind": kind, "size": mpi.size(), "time": time.time(), **what}) + "\n")
        self.file.flush()
        self.fate.comes_to(kind)

    def on_sample(self, state):
        numbers = state.sample[1][:, 1].tolist()
        self.note("sample", at=[state.epoch, state.position, state.place.next_position], numbers=numbers)

    def on_backward(self, state):
        self.begin = state.position
        self.fate.comes_to("backward")

    def on_update(self, state):
        self.note("update", at=[state.epoch, self.begin, state.position])

    def on_end_epoch(self, state):
        self.fate.comes_to("epoch")
        mpi.allreduce(1.0)

    def on_recovery(self, state):
        self.note("recovery")


def main():
    folder, epochs, asynchronous, *deaths = sys.argv[1:]
    mpi.start(tuning=mpi.Tuning(cache_bytes=1 << 14))  # small: a reduction has many chunks
    torch.set_num_threads(1)
    fate = Fate(mpi.rank(), [death.split(":") for death in deaths])
    fate.between_chunks()
    fate.before(node_group.NodeGroup, "announce", "meeting")
    fate.before(mpi_steps, "allreduce", "mpi")
    fate.before(Mpi, "allreduce", "mpi")
    engine = AllReduceSGDEngine(asynchronous=asynchronous == "1")
    notes, net = Notes(engine, Path(folder, f"rank-{mpi.rank()}"), fate), network()
    batches = DatasetIterator(dataset(), BATCH, seed=SEED)
    engine.train(network=net, criterion=criterion, iterator=batches, maxepoch=int(epochs), optimizer=optimizer)
    mpi.check_with_allreduce(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    notes.note("end")
    if mpi.rank() == 0:
        torch.save(net.state_dict(), Path(folder, "network"))
    mpi.stop()


if __name__ == "__main__":
    main()
