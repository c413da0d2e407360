import itertools

import pytest
import torch

from torchmpi_py.bench import UsageError, buffers, candidates
from torchmpi_py.bench.buffers import TaskBuffers, format_size, parse_size, parse_sizes
from torchmpi_py.bench.cases import VERBS, Task

MIB = 1 << 20


def task(verb):
    return Task(VERBS[verb], torch.float32, "sum", 0, 2)


def planned(verb, sizes, **changed):
    options = {"max_bytes": 64 * MIB, "cache_bytes": 8 * MIB, "with_symmetric": False, "with_cold": True} | changed
    return buffers.plan(task(verb), sizes, **options)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("num_bytes", [8, 4096, MIB])
def test_cold_slots_exceed_the_cache_and_do_not_overlap(verb, num_bytes):
    plan = planned(verb, [8, MIB])
    num_slots = plan.num_slots(task(verb), num_bytes, is_symmetric=False, is_cold=True)
    pool = buffers.make_pool(plan.plain_bytes)
    rotation = buffers.Rotation(pool, task(verb), num_bytes, num_slots)
    slots = [rotation.take() for _ in range(num_slots)]
    tensors = [t for slot in slots for t in (slot.x, slot.out) if t is not None]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert ranges[-1][1] - ranges[0][0] > 8 * MIB
    assert not plan.is_too_small(task(verb), num_bytes)
    assert rotation.take().x.data_ptr() == slots[0].x.data_ptr()
    assert slots[0].whole.nbytes == num_bytes


def test_memory_is_kept_within_the_limit():
    plan = planned("allreduce", [8, MIB], max_bytes=4 * MIB, with_symmetric=True)
    assert plan.plain_bytes + plan.symmetric_bytes <= 4 * MIB
    assert plan.is_too_small(task("allreduce"), MIB)
    with pytest.raises(UsageError, match=r"allreduce of 2 MiB needs buffers of .* the limit is 4 MiB"):
        planned("allreduce", [8, 2 * MIB], max_bytes=4 * MIB)


def test_limits_are_copies_of_every_byte():
    cpu = torch.device("cpu")
    (copy,) = candidates.limits(cpu)
    assert (copy.name, copy.has_values, copy.is_ours) == (candidates.COPY, False, False)
    for candidate in (copy, candidates.host_copy(cpu, 64), candidates.host_copy(cpu, 4096)):
        source, destination = torch.arange(1000.0), torch.zeros(1000)
        slots = iter([TaskBuffers(source, None), TaskBuffers(destination, None)])
        candidate.bind(lambda slots=slots: next(slots))()
        assert source.equal(destination)


def test_sizes_and_their_lists():
    sizes = {"4": 4, "64K": 64 << 10, "1m": 1 << 20, "2G": 2 << 30, "1.5K": 1536, "480KiB": 480 << 10, "8B": 8}
    assert {text: parse_size(text) for text in sizes} == sizes
    lists = {
        "1K,4,1024": [4, 1024],
        "4:100:4x": [4, 16, 64, 100],
        "1K:4K": [1024, 2048, 4096],
        "8:8": [8],
        "4:16,1M": [4, 8, 16, 1 << 20],
    }
    assert {text: parse_sizes(text) for text in lists} == lists
    texts = {4: "4 B", 65536: "64 KiB", 1.5 * (1 << 30): "1.5 GiB", 4096 << 30: "4096 GiB"}
    assert {num_bytes: format_size(num_bytes) for num_bytes in texts} == texts


@pytest.mark.parametrize(
    "text", ["", "0", "4Q", "-4", "K", "4 4", "1e3", "0.1", "4:", "16:4", "4:16:1x", "4:16:4", "4:16:4x:2", "4,,8"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"size|write a number of bytes"):
        parse_sizes(text)
