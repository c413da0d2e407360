"""Of what the time consists that ``synchronize_gradients`` takes in a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torchmpi_py import nn as mpinn
from torchmpi_py.bench.results import quantile
from torchmpi_py.bench.trainers import Sample, make_network
from torchmpi_py.collectives.timing import interleaved, until_done

if TYPE_CHECKING:
    from mpi4py import MPI

CALL = "synchronize_gradients, the call"
REDUCTION = "the same with gradients in their buckets: the reduction alone"
COPY = "a copy of as many bytes, all ranks at once"


def measure(comm: MPI.Comm, layers: list[int], sample: Sample, num_turns: int) -> dict[str, float]:
    """Median seconds of each part, where the sample is. Collective over ``comm``, which holds all ranks."""
    device = sample[0].device
    network, criterion = make_network(layers).to(device), torch.nn.CrossEntropyLoss()
    count = sum(p.numel() for p in network.parameters())
    source, destination = (torch.ones(count, device=device) for _ in range(2))

    def synchronize() -> None:
        mpinn.synchronize_gradients(network)

    def backward() -> None:
        network.zero_grad()
        criterion(network(sample[0]), sample[1]).backward()

    calls: dict[str, Callable[[], object]] = {
        CALL: synchronize,
        REDUCTION: synchronize,
        COPY: lambda: destination.copy_(source),
    }
    before: dict[str, Callable[[], object]] = {CALL: backward, REDUCTION: synchronize}
    calls, before = (
        {name: until_done(call, device) for name, call in functions.items()} for functions in (calls, before)
    )
    synchronize()
    times = interleaved(comm, calls, seconds=1.0, min_turns=num_turns, max_turns=num_turns, before=before)
    return {name: quantile(seconds, 0.5) for name, seconds in times.items()}
