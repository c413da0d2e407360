"""Trains with checkpoints, and is killed in each of its starts but the last, as its second argument says.

checkpointed.py FOLDER KILLS: KILLS is a list of {"rank", "step", "point"}, one per start. The process is killed in this
step, or at this point of the saves that follow it (``dying``); at the point "asked" it gets SIGTERM instead. The last
start writes FOLDER/result.pt.
"""

import json
import os
import signal
import sys

import dying
import torch
from torch.utils.data import TensorDataset

import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator

folder, kills = sys.argv[1], json.loads(sys.argv[2])
start = int(os.environ["TORCHMPIRUN_RESTART"])
kill = kills[start] if start < len(kills) else {"rank": -1}

os.fsync = lambda descriptor: None  # it is slow, and not for those who are only killed
mpi.start()
torch.manual_seed(mpi.rank())
network = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(61, 6, generator=generator), torch.arange(61) % 3)


def on_update(state):
    if mpi.rank() == kill["rank"] and state.t >= kill["step"]:
        kill["rank"] = -1
        if kill["point"] == "asked":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if kill["point"] is None:
            os.kill(os.getpid(), signal.SIGKILL)
        dying.Points(kill["point"], writes_between=10).__enter__()


engine = AllReduceSGDEngine()
engine.hooks.on_update = on_update
state = engine.train(
    network=network,
    criterion=torch.nn.CrossEntropyLoss(),
    iterator=DatasetIterator(dataset, 3, seed=2),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    maxepoch=3,
    checkpoint=f"{folder}/checkpoints",
    every=1 if kills and kills[0]["point"] != "asked" else "epoch",
)
mpi.nn.check_with_allreduce(network)
if mpi.rank() == 0:
    torch.save({"network": network.state_dict(), "t": state.t, "start": start}, f"{folder}/result.pt")
mpi.stop()
