"""Reports of real measurements, in this process and its fellow ranks."""

import pytest
import torch

from torchmpi_py.bench import UsageError, WrongValue, candidates, compare
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.candidates import COPY, GLOO, RAW_MPI, TORCH_TORCHMPI
from torchmpi_py.bench.cases import VERBS, Task
from torchmpi_py.collectives.registry import AvailabilityRow
from torchmpi_py.core.mpi_api import MPI

pytestmark = pytest.mark.mpi
QUICK = ["--seconds", "0.001", "--max-memory", "1M"]


def measured(*words):
    return compare.report(MPI.COMM_WORLD, parse([*words, *QUICK]))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_gives_right_values(mpi, verb):
    report = measured("run", "--verb", verb, "--sizes", "4,3K")
    assert [(row.what, row.buffers) for row in report.rows] == [("selector", "warm"), ("selector", "cold")] * 2
    assert all(row.median_seconds <= row.p99_seconds for row in report.rows)
    assert all(row.num_turns >= 5 for row in report.rows)


@pytest.mark.parametrize(
    ("dtype", "op", "form", "name"),
    [
        ("bfloat16", "avg", "--async", "selector, async"),
        ("int8", "prod", "--flavour=symmetric", "symmetric"),
        ("bool", "bxor", "--flavour=mpi", "mpi"),
        ("float64", "max", "--buffers=cold", "selector"),
    ],
)
def test_dtypes_ops_and_forms_give_right_values(mpi, dtype, op, form, name):
    report = measured("run", "--verb", "reduce_scatter", "--sizes", "100K", "--dtype", dtype, "--op", op, form)
    assert (report.dtype, report.op, report.rows[0].what) == (dtype, op, name)


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
    assert MPI.COMM_WORLD.allgather(report.rows) == [report.rows] * mpi.size()


def test_without_flavours_all_that_are_available_take_part(mpi):
    task = Task(VERBS["allreduce"], torch.float32, "sum", mpi.rank(), mpi.size())
    groups = candidates.TorchGroups(torchmpi=object())
    found = compare.ours(task, None, groups, [False]) + compare.peers(MPI.COMM_WORLD, task, groups, [False])
    names = {candidate.name for candidate in found}
    rows = [row for row in mpi.availability() if (row.verb, row.device) == ("allreduce", "cpu")]
    available = [row.flavour for row in rows if row.status == "available"]
    assert names == {*available, "selector", "symmetric", TORCH_TORCHMPI, RAW_MPI, GLOO, COPY}


def test_who_cannot_is_left_out_with_the_reason(mpi, monkeypatch):
    monkeypatch.setattr(candidates.rendezvous, "open_store", lambda *_: "nowhere.invalid" / 0)
    report = measured("compare", "--sizes", "4", "--dtype", "bfloat16", "--buffers", "warm", "--flavours", "mpi")
    assert [row.what for row in report.rows] == ["mpi", COPY]
    assert any(f"{GLOO} is left out: " in note for note in report.notes)
    assert any(f"{RAW_MPI} is left out: " in note for note in report.notes)
    with pytest.raises(UsageError, match="no group on 'torchmpi': TypeError"):
        measured("compare", "--flavours", "torchmpi")


@pytest.mark.parametrize("verb", ["allreduce", pytest.param("alltoall", marks=pytest.mark.slow)])
def test_torch_distributed_takes_part_on_gloo_and_on_torchmpi(mpi, verb):
    if mpi.size() > 3:
        pytest.skip("3 ranks show as much as more")
    words = ["compare", "--verb", verb, "--flavours", "torchmpi", "--async", "--sizes", "8,3K", "--buffers", "warm"]
    names = [row.what for row in measured(*words).rows]
    forms = [name for what in (TORCH_TORCHMPI, GLOO) for name in (what, f"{what}, async")]
    assert [name for name in names if name.startswith("torch ")] == forms * 2


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
    report = measured(*words, "--patience", "99")  # small sizes are judged by their latency
    assert {row.num_bytes for row in report.rows} == {8, 400 << 10}
    assert not any("left out from" in note for note in report.notes)


@pytest.mark.parametrize(("when", "calls"), [("before", 0), ("after", 4)])
def test_a_wrong_value_ends_the_run_on_every_rank(mpi, monkeypatch, when, calls):
    last, allreduce, made = mpi.size() - 1, mpi.allreduce, []

    def wrong(x, **options):
        """A wrong last element on the last rank, from call number ``calls`` on."""
        made.append(result := allreduce(x, **options))
        if len(made) > calls and mpi.rank() == last:
            result[-1] += 1
        return result

    monkeypatch.setattr(mpi, "allreduce", wrong)
    message = rf"^mpi: allreduce of 1024 bytes .*, warm buffers, {when} timing: rank {last} has .* element 255"
    with pytest.raises(WrongValue, match=message):
        measured("run", "--sizes", "1K", "--flavour", "mpi")
    assert measured("run", "--sizes", "1K", "--flavour", "mpi", "--no-verify").rows


def test_what_cannot_be_had_is_refused_with_the_reason(mpi, monkeypatch):
    for words, reason in (
        ("--flavour foo", r"'foo' is unknown; known flavours: mpi.*selector, symmetric, torchmpi"),
        ("--op band", r"'band' is not defined for torch\.float32"),
        ("--sizes 4,1G", "--max-memory"),
    ):
        with pytest.raises(UsageError, match=reason):
            measured("run", *words.split())
    rows = [AvailabilityRow("allreduce", "cpu", "mpi", "unavailable: the moon is full")]
    monkeypatch.setattr(mpi, "availability", lambda: rows)
    with pytest.raises(UsageError, match=r"'mpi' cannot do allreduce here: unavailable: the moon is full"):
        measured("compare", "--flavours", "mpi")


def test_timed_sums_stay_finite(mpi, monkeypatch):
    seen = []

    def recorded(x, **options):
        seen.append(x)
        return x

    monkeypatch.setattr(mpi, "allreduce", recorded)
    measured("run", "--sizes", "1K", "--no-verify", "--buffers", "warm")
    assert torch.equal(seen[-1], torch.zeros(256))


def test_calls_in_a_row_count_one_by_one(mpi, monkeypatch):
    calls, allreduce = [], mpi.allreduce
    monkeypatch.setattr(mpi, "allreduce", lambda x, **options: calls.append(1) or allreduce(x, **options))
    words = ["run", "--flavour", "mpi", "--sizes", "8", "--buffers", "warm", "--no-verify"]
    report = measured(*words, "--in-a-row", "50")
    assert len(calls) >= 50 * report.rows[0].num_turns > 0
    assert report.facts["calls in a row"] == "50"
    assert "calls in a row" not in measured(*words).facts
