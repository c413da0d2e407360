"""What the tests of the engine share: data, trainings that are killed, and what the ranks have used."""

import os
import threading

import torch
from torch.utils.data import TensorDataset

from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, checkpoint


class Killed(Exception):
    """Stands for a kill between two steps, on all ranks."""


def listed(folder):
    """Return the names of what lies in a folder of checkpoints, without its lock file."""
    return sorted(name for name in os.listdir(folder) if name != ".lock")


def classes(total, width=6, dtype=torch.float32):
    """Return samples of three classes."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(total, width, generator=generator, dtype=dtype), torch.arange(total) % 3)


def numbered(total, width=3):
    """Return samples whose target is their number."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(total, width, generator=generator), torch.arange(float(total)).unsqueeze(1))


def sample_of(number):
    """Return a sample whose target is this number."""
    return torch.tensor([number % 7, number % 3, 1.0], dtype=torch.float64), torch.tensor([float(number)]).double()


def loss_of(output, target):
    """Return the mean square error for numbers, and the cross entropy for classes."""
    is_number = target.is_floating_point()
    return (torch.nn.functional.mse_loss if is_number else torch.nn.functional.cross_entropy)(output, target)


def prefetching():
    """Return the threads that read ahead in this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchmpi_py prefetch")]


def train(network, iterator, *, engine=None, criterion=loss_of, killed_at=None, **options):
    """Train as in a process of its own, and return the state; None if it was killed in step ``killed_at``.

    Hooks are given by their names: ``on_update=...``, and the arguments of ``Checkpoint`` with ``checkpoint=folder``.
    """
    checkpoint.completed.clear()
    engine = engine or AllReduceSGDEngine()
    folder = options.pop("checkpoint", None)
    saving = {name: options.pop(name) for name in ("every", "keep", "stateful") if name in options}
    if folder is not None:
        options["extensions"] = [Checkpoint(folder, **saving), *options.get("extensions", ())]
    for name in [name for name in options if name.startswith("on_")]:
        setattr(engine.hooks, name, options.pop(name))
    on_update = engine.hooks.on_update

    def killed(state):
        on_update(state)
        if state.t == killed_at:
            raise Killed

    if killed_at is not None:
        engine.hooks.on_update = killed
    if "optimizer" not in options:
        options.setdefault("lr", 0.1)
    try:
        return engine.train(network=network, criterion=criterion, iterator=iterator, **options)
    except Killed:
        return None


def trained(iterator, **options):
    """Return the parameters of a small network after two epochs; None if training was killed."""
    torch.manual_seed(5)  # the same on all ranks: a sampler may draw from it
    network = torch.nn.Linear(3, 1).double()
    state = train(network, iterator, lr=1e-4, **{"maxepoch": 2, **options})
    return None if state is None else torch.cat([p.detach().flatten() for p in network.parameters()])


def numbers_in(sample, num_samples):
    """Return the targets of a batch, which is None where this rank has none."""
    assert num_samples == (0 if sample is None else len(sample[1]))
    return [] if sample is None else sample[1].flatten().int().tolist()


def together(mpi, mine):
    """Return what all ranks have, in one list."""
    return [number for part in mpi.allgather_object(mine) for number in part]


def epoch_of(mpi, iterator):
    """Return the numbers that all ranks read from an iterator of the engine in one epoch."""
    return together(mpi, [number for batch in iterator for number in numbers_in(batch, iterator.num_samples)])


def used(mpi, iterator, **options):
    """Return the numbers that all ranks use in each epoch of a training."""
    epochs = []

    def on_sample(state):
        epochs[-1].extend(numbers_in(state.sample, state.num_samples))

    options = {"lr": 0} | options
    train(torch.nn.Linear(3, 1), iterator, on_start_epoch=lambda _: epochs.append([]), on_sample=on_sample, **options)
    return [together(mpi, epoch) for epoch in epochs]


def on_few(mpi, work):
    """Return what ``work()`` gives on a level of half of the ranks."""
    is_few = mpi.rank() < (mpi.size() + 1) // 2
    with mpi.at(mpi.push_communicator(is_few)):
        result = work() if is_few else None
    return mpi.broadcast_object(result)
