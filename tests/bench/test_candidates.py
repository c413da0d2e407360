import contextlib

import pytest
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


def test_on_the_cpu_the_limit_is_a_copy():
    (only,) = candidates.limits(CPU)
    assert (only.name, only.has_values, only.is_ours) == (COPY, False, False)
    source, destination = copied(only)
    assert source.equal(destination)


@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_the_way_through_the_host_brings_every_byte_back(chunk_bytes):
    candidate = candidates.host_copy(CPU, chunk_bytes)
    assert (candidate.name, candidate.has_values) == (HOST_COPY, False)
    source, destination = copied(candidate)
    assert source.equal(destination)


class Recorder:
    """Stands in for streams and events of a GPU: notes who waits for what."""

    def __init__(self, said):
        self.said = said

    def __getattr__(self, name):
        return lambda *given: self.said.append((self, name, *given))


def test_both_directions_overlap_and_a_slot_is_filled_again_only_when_it_is_empty(monkeypatch):
    said = []
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: Recorder(said))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    overlapping = candidates._OverlappingCopy(torch.empty(2, 64, dtype=torch.uint8), torch.device("cuda", 0))
    source, destination = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    overlapping.copy(source, destination)
    assert source.equal(destination)
    off, back = overlapping.off, overlapping.back
    on_off = [entry[2] for entry in said if entry[:2] == (off, "wait_event")]
    on_back = [entry[2] for entry in said if entry[:2] == (back, "wait_event")]
    assert on_off == overlapping.emptied * 2
    assert on_back == overlapping.filled * 2
    assert [who for who, what, *_ in said if what == "record"] == [
        event for pair in zip(overlapping.filled, overlapping.emptied, strict=True) for event in pair
    ] * 2
    assert said[-1][1:] == ("wait_stream", back)
