"""A sweep for test_sweep_jobs: twelve experiments, some of which do what a plan (JSON: number -> code) says."""

import json
import os
import signal
import sys
import time

import torch

import torchmpi_py as mpi

folder, plan, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])


def train(configuration):
    """The sum of the ranks' numbers, and what the seed gives."""
    number = configuration["number"]
    total = mpi.allreduce(torch.full((100_000,), float(number + mpi.rank())))
    assert (total == mpi.size() * number + sum(range(mpi.size()))).all()
    print("experiment", number, "on rank", mpi.rank(), "of", mpi.size(), flush=True)  # noqa: T201
    time.sleep(seconds)
    exec(plan.get(str(number), ""), {"mpi": mpi, "os": os, "signal": signal, "time": time, "torch": torch})
    return {"total": float(total[0]), "drawn": torch.rand(1).item()}


mpi.start()
results = mpi.experiments(({"number": number} for number in range(12)), train, directory=folder, progress=False)
if mpi.is_chief():
    print(json.dumps([[row.number, row.state, row.value, row.error, row.began, row.seconds] for row in results]))  # noqa: T201
mpi.stop()
