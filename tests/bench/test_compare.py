"""Reports of real measurements, in this process and its fellow ranks."""

import dataclasses

import pytest
import torch

from torchmpi_py.bench import UsageError, WrongValue, candidates, compare, measurement
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.candidates import COPY, GLOO, RAW_MPI, TORCH_TORCHMPI
from torchmpi_py.bench.cases import VERBS, Task
from torchmpi_py.collectives.registry import AvailabilityRow

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
QUICK = ["--seconds", "0.001", "--max-memory", "1M"]


def measured(*words):
    from mpi4py import MPI

    return compare.report(MPI.COMM_WORLD, parse([*words, *QUICK]))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_gives_right_values(mpi, verb):
    report = measured("run", "--verb", verb, "--sizes", "4,3K")
    assert [(row.what, row.buffers) for row in report.rows] == [("selector", "warm"), ("selector", "cold")] * 2
    assert all(row.median_seconds <= row.p99_seconds for row in report.rows)
    assert all(row.num_turns >= 5 for row in report.rows)


@pytest.mark.parametrize(("dtype", "op"), [("bfloat16", "avg"), ("int8", "prod"), ("bool", "bxor"), ("float64", "max")])
def test_every_dtype_gives_right_values(mpi, dtype, op):
    report = measured("run", "--verb", "reduce_scatter", "--sizes", "200K", "--dtype", dtype, "--op", op)
    assert (report.dtype, report.op) == (dtype, op)


def test_asynchronous_and_symmetric_forms_are_named(mpi):
    assert measured("run", "--sizes", "4", "--async", "--buffers", "warm").rows[0].what == "selector, async"
    report = measured("run", "--sizes", "4", "--flavour", "mpi", "--symmetric", "--buffers", "warm")
    assert report.rows[0].what == "mpi, symmetric"


@pytest.mark.parametrize("verb", ["allreduce", "gather"])
def test_all_take_part_at_every_size(mpi, verb):
    ours = ["mpi", "selector", "symmetric"]
    words = ["compare", "--verb", verb, "--sizes", "8,3K", "--buffers", "warm", "--flavours", ",".join(ours)]
    report = measured(*words)
    names = [row.what for row in report.rows]
    assert {*ours, RAW_MPI, COPY} <= set(names)
    assert names == 2 * names[: len(names) // 2]
    assert GLOO in names or any(GLOO in note for note in report.notes)
    assert report.num_ranks == mpi.size()
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allgather(report.rows) == [report.rows] * mpi.size()


def test_without_flavours_all_that_are_available_take_part(mpi):
    from mpi4py import MPI

    task = Task(VERBS["allreduce"], torch.float32, "sum", mpi.rank(), mpi.size())
    groups = candidates.TorchGroups(no_gloo="", no_torchmpi="", torchmpi=object())
    names = [candidate.name for candidate in compare.candidates_for_compare(MPI.COMM_WORLD, task, None, groups)]
    rows = [row for row in mpi.availability() if (row.verb, row.device) == ("allreduce", "cpu")]
    available = [row.flavour for row in rows if row.status == "available"]
    assert names == [*available, "selector", "symmetric", TORCH_TORCHMPI, RAW_MPI, GLOO, COPY]


def test_on_a_gpu_raw_mpi_takes_part_only_if_this_mpi_reads_its_memory(monkeypatch):
    import torchmpi_py as mpi

    task = Task(VERBS["allreduce"], torch.float32, "sum", 0, 2, torch.device("cuda", 0))
    for status, takes_part in (("available", True), ("unavailable: not CUDA-aware", False)):
        rows = [
            AvailabilityRow("allreduce", "cpu", "mpi", "available"),
            AvailabilityRow("allreduce", "cuda", "mpi", status),
        ]
        monkeypatch.setattr(mpi, "availability", lambda rows=rows: rows)
        assert compare._has_raw_mpi(task) is takes_part
        assert compare._has_raw_mpi(dataclasses.replace(task, device=torch.device("cpu")))


def test_who_cannot_is_left_out_with_the_reason(mpi, monkeypatch):
    monkeypatch.setattr(candidates.rendezvous, "open_store", lambda *_: "nowhere.invalid" / 0)
    report = measured("compare", "--sizes", "4", "--dtype", "bfloat16", "--buffers", "warm", "--flavours", "mpi")
    assert [row.what for row in report.rows] == ["mpi", COPY]
    assert any(f"{GLOO} is left out: " in note for note in report.notes)
    assert any(f"{RAW_MPI} is left out: " in note for note in report.notes)
    with pytest.raises(UsageError, match="no group on 'torchmpi' here: TypeError"):
        measured("compare", "--flavours", "torchmpi")


@pytest.mark.parametrize("verb", ["allreduce", "alltoall"])
def test_torch_distributed_takes_part_on_gloo_and_on_torchmpi(mpi, verb):
    if mpi.size() > 3:
        pytest.skip("3 ranks show as much as more")
    words = ["compare", "--verb", verb, "--flavours", "torchmpi", "--async", "--sizes", "8,3K", "--buffers", "warm"]
    names = [row.what for row in measured(*words).rows]
    forms = [name for what in (TORCH_TORCHMPI, GLOO) for name in (what, f"{what}, async")]
    assert [name for name in names if name.startswith("torch ")] == forms * 2
    alone = measured("run", "--verb", verb, "--flavour", "torchmpi", "--sizes", "8", "--buffers", "warm")
    assert [row.what for row in alone.rows] == [TORCH_TORCHMPI]


def test_cold_buffers_that_fit_the_cache_are_pointed_out(mpi, monkeypatch):
    monkeypatch.setattr("torchmpi_py.memory.caches.last_level_cache_bytes", lambda: 1 << 30)
    assert any("may be warm" in note for note in measured("run", "--sizes", "4").notes)
    monkeypatch.setattr("torchmpi_py.memory.caches.last_level_cache_bytes", lambda: 1 << 16)
    assert measured("run", "--sizes", "4").notes == []


def test_who_exceeds_the_patience_is_left_out_of_larger_sizes(mpi):
    words = ["compare", "--sizes", "8,400K", "--flavours", "mpi", "--buffers", "warm"]
    report = measured(*words, "--patience", "1e-9")
    assert {row.num_bytes for row in report.rows} == {8}
    assert any(note.startswith("mpi is left out from 400 KiB on: a call would take") for note in report.notes)
    assert not any("left out from" in note for note in measured(*words, "--patience", "99").notes)


def test_small_sizes_are_judged_by_their_latency(mpi):
    words = ["compare", "--sizes", "4,64K", "--flavours", "mpi", "--buffers", "warm"]
    assert {row.num_bytes for row in measured(*words, "--patience", "1").rows} == {4, 64 << 10}


def corrupted(verb, rank, calls=0):
    """The verb, which from call number ``calls`` on gives a wrong last element on ``rank``."""
    made = 0

    def wrong(x, **options):
        nonlocal made
        result = verb(x, **options)
        if made >= calls and mpi_rank() == rank:
            result[-1] += 1
        made += 1
        return result

    return wrong


def mpi_rank():
    import torchmpi_py

    return torchmpi_py.rank()


def test_a_wrong_value_ends_the_run_on_every_rank(mpi, monkeypatch):
    last = mpi.size() - 1
    monkeypatch.setattr(mpi, "allreduce", corrupted(mpi.allreduce, last))
    message = (
        rf"^mpi: allreduce of 1024 bytes \(float32 sum\), warm buffers, before timing: rank {last} has .* element 255"
    )
    with pytest.raises(WrongValue, match=message):
        measured("compare", "--sizes", "1K", "--flavours", "mpi")
    assert measured("run", "--sizes", "1K", "--flavour", "mpi", "--no-verify").rows


def test_a_value_that_goes_wrong_later_is_found(mpi, monkeypatch):
    monkeypatch.setattr(mpi, "allreduce", corrupted(mpi.allreduce, 0, calls=4))
    with pytest.raises(WrongValue, match="after timing: rank 0 has"):
        measured("run", "--sizes", "1K", "--flavour", "mpi")


def test_flavours_that_cannot_be_had_are_refused_with_the_reason(mpi, monkeypatch):
    with pytest.raises(UsageError, match=r"'foo' is unknown; known flavours: mpi.*selector, symmetric, torchmpi"):
        measured("run", "--flavour", "foo")
    rows = [AvailabilityRow("allreduce", "cpu", "mpi", "unavailable: the moon is full")]
    monkeypatch.setattr(mpi, "availability", lambda: rows)
    with pytest.raises(UsageError, match=r"'mpi' cannot do allreduce here: unavailable: the moon is full"):
        measured("compare", "--flavours", "mpi")


def test_what_the_verb_does_not_take_is_refused(mpi):
    with pytest.raises(UsageError, match=r"'band' is not defined for torch\.float32"):
        measured("run", "--op", "band")
    with pytest.raises(UsageError, match="--max-memory"):
        measured("run", "--sizes", "4,1G")


def test_timed_sums_stay_finite(mpi, monkeypatch):
    seen = []

    def recorded(x, **options):
        seen.append(x)
        return x

    monkeypatch.setattr(mpi, "allreduce", recorded)
    measured("run", "--sizes", "1K", "--no-verify", "--buffers", "warm")
    assert torch.equal(seen[-1], torch.zeros(256))


def test_calls_in_a_row_count_one_by_one(mpi, monkeypatch):
    made = []

    def interleaved(comm, functions, **_):
        return {name: [function() or 6.0] for name, function in functions.items()}

    monkeypatch.setattr(measurement, "interleaved", interleaved)
    monkeypatch.setattr(measurement, "_warm", lambda bind, take: measurement._Timed(int, lambda: made.append(1)))
    words = ["run", "--flavour", "mpi", "--sizes", "8", "--buffers", "warm", "--no-verify"]
    report = measured(*words, "--in-a-row", "3")
    assert (len(made), [row.median_seconds for row in report.rows]) == (3, [2.0])
    assert report.facts["calls in a row"] == "3"
    assert "calls in a row" not in measured(*words).facts
    assert (len(made), report.rows[0].num_turns) == (4, 1)
