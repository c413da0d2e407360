"""Trains with checkpoints, is killed in each of its starts but the last, and compares the end with an undisturbed run.

checkpointed.py FOLDER EVERY KILLS: KILLS is a list of {"rank", "step", "point"}, one per start. The process is killed
in this step, or at this point of the saves that follow it (``dying``); at the point "asked" it gets SIGTERM instead.
Each rank of the last start prints the steps that it has taken, which start it is, and whether the bits are the same.
"""

import json
import os
import signal
import sys

import dying
import torch
from torch.utils.data import TensorDataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator

folder, every, kills = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
start = int(os.environ["TORCHMPIRUN_RESTART"])
kill = kills[start] if start < len(kills) else {"rank": -1}

os.fsync = lambda descriptor: None  # it is slow, and not for those who are only killed
mpi.start()


def on_update(state):
    if mpi.rank() == kill["rank"] and state.t >= kill["step"]:
        kill["rank"] = -1
        if kill["point"] == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if kill["point"] is None:
            os.kill(os.getpid(), signal.SIGKILL)
        dying.Points(kill["point"]).__enter__()


def trained(**options):
    torch.manual_seed(mpi.rank())
    network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(7)
    dataset = TensorDataset(torch.randn(61, 6, generator=generator), torch.arange(61) % 3)
    engine = AllReduceSGDEngine()
    engine.hooks.on_update = on_update
    state = engine.train(
        network=network,
        criterion=torch.nn.CrossEntropyLoss(),
        iterator=DatasetIterator(dataset, 3, seed=2),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        maxepoch=3,
        **options,
    )
    mpi.nn.check_with_allreduce(network)
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()]), state.t


parameters, step = trained(extensions=[Checkpoint(f"{folder}/checkpoints", every=every)])
undisturbed, steps = trained()
found = {"step": step, "start": start, "is_equal": torch.equal(parameters, undisturbed), "steps": steps}
sys.stdout.write(json.dumps(found) + "\n")
mpi.stop()
