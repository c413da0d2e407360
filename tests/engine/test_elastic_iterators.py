"""A rank dies in an epoch (torchmpirun --elastic): the survivors use what is left, every sample once."""

import json

import pytest
from support import jobs

PROGRAM = """
    import json, os, signal, sys

    import numpy as np
    import torch
    from torch.utils.data import IterableDataset, TensorDataset

    import torchmpi_py as mpi
    from torchmpi_py.engine import AllReduceSGDEngine, DatasetIterator, Shards, StreamIterator

    folder, way, moment, number = sys.argv[1:]
    mpi.start()
    rank = mpi.rank()
    file = open(f"{folder}/rank-{rank}", "w")

    def write(kind, epoch=0, at=(0, 0), numbers=()):
        file.write(json.dumps([kind, epoch, *at, mpi.size(), numbers]) + "\\n")
        file.flush()

    class Drawn:
        draw = np.random.default_rng(5)  # unknown to the engine, and another order at each iteration

        def __len__(self):
            return 84

        def __iter__(self):
            write("draw")
            return iter(self.draw.permutation(84).tolist())

    def read(first):
        return [(torch.ones(1), torch.tensor([float(first + i)])) for i in range(7)]

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([sample for first in range(0, 84, 7) for sample in read(first)])

    def reach(kind, state, numbers=()):
        write(kind, state.epoch, state.at, numbers)
        if rank == 1 and kind == moment and state.t == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_sample(state):
        state.at = state.position, state.next_position
        reach("sample", state, state.sample[1][: state.num_samples, 0].int().tolist())

    engine = AllReduceSGDEngine()
    engine.hooks.on_sample = on_sample
    for kind in ("backward", "update", "end_epoch"):
        setattr(engine.hooks, f"on_{kind}", lambda state, kind=kind: reach(kind, state))
    iterators = {
        "sampler": lambda: DatasetIterator(
            TensorDataset(torch.ones(84, 1), torch.arange(84.0).unsqueeze(1)), 2, sampler=Drawn()
        ),
        "files": lambda: StreamIterator(Shards(list(range(0, 84, 7)), read), 2),
        "iterable": lambda: StreamIterator(Stream(), 2),
    }
    network = torch.nn.Linear(1, 1)
    engine.train(network=network, criterion=torch.nn.MSELoss(), iterator=iterators[way](), lr=1e-6, maxepoch=2)
    mpi.nn.check_with_allreduce(network)
    mpi.stop()
"""


@pytest.mark.slow
@jobs.needs_mpi
@pytest.mark.parametrize(
    ("way", "moment", "number"),
    [
        *(("sampler", "sample", 0), ("sampler", "update", 3), ("sampler", "sample", 20), ("sampler", "end_epoch", 14)),
        *(("files", "sample", 3), ("files", "update", 4), ("iterable", "sample", 0), ("iterable", "backward", 2)),
    ],
)
def test_the_survivors_use_the_rest(tmp_path, way, moment, number):
    options = ["-n", 3, "--bind", "none", "--timeout", "150", "--elastic"]
    job = jobs.torchmpirun(*options, jobs.write(tmp_path, PROGRAM), tmp_path, way, moment, number)
    assert job.returncode == 0, job.stderr
    files = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(tmp_path.glob("rank-*"))]
    survivors = files[0], files[2]
    draws = [[kind for kind, *_ in lines].count("draw") for lines in survivors]
    assert draws == ([2, 2] if way == "sampler" else [0, 0])  # an order that was drawn is kept
    steps = {tuple(at) for lines in survivors for kind, *at, _ in lines if kind == "update"}
    assert {size for *_, size in steps} == ({2} if number == 0 else {2, 3})
    for epoch in (0, 1):
        samples = [(at, numbers) for lines in files for kind, *at, numbers in lines if kind == "sample"]
        used = [number for at, numbers in samples if tuple(at) in steps and at[0] == epoch for number in numbers]
        assert sorted(used) == list(range(84))
