"""The floor of the wire: its formulas (test_scale has what the ring sends), and its place in reports."""

import json

import pytest

from torchmpi_py.bench import UsageError, compare, step, wire
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.candidates import COPY, RAW_MPI, WIRE
from torchmpi_py.bench.step import FLOOR
from torchmpi_py.bench.trainers import NONE
from torchmpi_py.core.mpi_api import MPI


@pytest.mark.parametrize(
    ("verb", "ranks_per_node", "share"),
    [
        ("allreduce", [2, 2], 1.0),
        ("allreduce", [8, 8, 8, 8], 1.5),
        ("broadcast", [5, 2, 2], 1.0),
        ("reduce", [1, 7], 1.0),
        ("reduce_scatter", [3, 1], 0.75),
        ("allgather", [1, 3], 0.75),
        ("alltoall", [1, 2, 3], 1.5),
        ("gather", [3, 1], 0.25),
        ("scatter", [1, 3], 0.75),
        ("allreduce", [4], 0.0),
    ],
)
def test_floors_of_nodes_with_several_ranks(verb, ranks_per_node, share):
    assert wire.floor_bytes(verb, 1 << 20, ranks_per_node) == pytest.approx(share * (1 << 20))


def test_rates_are_those_of_tc():
    rates = {"1gbit": 125e6, "200Mbit": 25e6, "2.5gbit": 312.5e6, "8kbit": 1e3}
    assert {text: wire.parse_link(text) for text in rates} == rates
    for text in ("", "1", "1gb", "0gbit", "-1gbit", "fast", "measured"):
        with pytest.raises(UsageError, match=r"such as 200mbit"):
            parse(["compare", f"--link={text}"])


@pytest.fixture
def each_rank_is_a_node(mpi, monkeypatch):
    """Ranks on nodes of their own, as far as the bench sees."""
    if mpi.size() == 1:
        pytest.skip("one rank has nobody to send to")
    monkeypatch.setattr(wire, "_nodes", lambda: [[rank] for rank in range(mpi.size())])


@pytest.mark.mpi
def test_the_floor_is_a_row_and_every_other_row_has_its_ratio(mpi, each_rank_is_a_node, tmp_path):
    words = ["compare", "--flavours", "mpi", "--buffers", "warm", "--seconds", "0.001", "--max-memory", "1M"]
    file = tmp_path / "r.json"
    options = parse([*words, "--verb", "allreduce", "--sizes", "4,64K", "--link", "80kbit", "--json", str(file)])
    compare.main(MPI.COMM_WORLD, options)
    if mpi.rank() == 0:
        report = json.loads(file.read_text())
        rows = {(row["what"], row["num_bytes"]): row for row in report["rows"]}
        floor = 2 * (mpi.size() - 1) / mpi.size() * 65536 / 10_000
        assert rows[WIRE, 65536]["median_seconds"] == pytest.approx(floor)
        assert rows[COPY, 65536]["time_to_floor"] is None
        for what in ("mpi", RAW_MPI):
            row = rows[what, 65536]
            assert row["time_to_floor"] == pytest.approx(row["median_seconds"] / floor)
        assert report["facts"]["link"] == "0.01 MB/s in each direction"


@pytest.mark.mpi
def test_on_one_node_there_is_no_link(mpi):
    if mpi.num_nodes() > 1:
        pytest.skip("several nodes")
    with pytest.raises(UsageError, match="all ranks are on one node"):
        compare.report(MPI.COMM_WORLD, parse(["compare", "--link", "1gbit"]))


def test_a_step_has_the_larger_of_compute_and_wire_as_its_floor():
    seconds = {NONE: 0.002, "engine": 0.0105}
    on_wire = step.StepReport([6, 3], 4, 5, {}, [], seconds, {}, wire_seconds=0.01)
    assert on_wire.floor_seconds == 0.01
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in step.render(on_wire).splitlines()]
    assert ["engine", "10.5", "8.50", "-", "1.05"] in lines
    assert [FLOOR, "10.0", "-", "-", "1.00"] in lines
    computing = step.StepReport([6, 3], 4, 5, {}, [], seconds, {}, wire_seconds=0.001)
    assert computing.floor_seconds == 0.002
    assert "time/floor" not in step.render(step.StepReport([6, 3], 4, 5, {}, [], seconds, {}))
