import torch

from torchmpi_py.bench import candidates
from torchmpi_py.bench.buffers import TaskBuffers
from torchmpi_py.bench.candidates import COPY, HOST_COPY

CPU = torch.device("cpu")


def copied(candidate, count=1000):
    """A source of numbers, and what the candidate made of a destination."""
    source, destination = torch.arange(count, dtype=torch.float32), torch.zeros(count)
    slots = iter([TaskBuffers(source, None), TaskBuffers(destination, None)])
    candidate.bind(lambda: next(slots))()
    return source, destination


def test_limits_are_copies_of_every_byte():
    (only,) = candidates.limits(CPU)
    assert (only.name, only.has_values, only.is_ours) == (COPY, False, False)
    for candidate in (only, candidates.host_copy(CPU, 64), candidates.host_copy(CPU, 4096)):
        assert candidate.name == (COPY if candidate is only else HOST_COPY)
        source, destination = copied(candidate)
        assert source.equal(destination)
