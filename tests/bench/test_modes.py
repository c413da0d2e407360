import json

import pytest
import torch

from torchmpi_py.bench import UsageError, command_line, modes, modes_slow
from torchmpi_py.bench.modes_ways import MODES

pytestmark = pytest.mark.timeout(240)
SHORT = ["modes", "--epochs", "1", "--seeds", "1", "--batch", "240"]
SLOW = ["--slow-rank", "--slow-seconds", "0.05", "--step-seconds", "0.002", "--rounds", "1", "--lead-steps", "12"]


@pytest.mark.mpi
def test_every_mode_trains_and_is_told(mpi, capsys, tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'torchmpi-py[examples]'")
    from mpi4py import MPI

    if mpi.size() != 3:
        pytest.skip("3 ranks show as much as other numbers, and it takes seconds")
    file = tmp_path / "modes.json"
    modes.main(MPI.COMM_WORLD, command_line.parse([*SHORT, *SLOW, "--json", str(file)]))
    if mpi.rank() == 0:
        printed = capsys.readouterr().out
        stored = json.loads(file.read_text())
        runs = {run["mode"]: run for run in stored["runs"]}
        assert set(runs) == set(MODES)
        assert all(f"| {name} " in printed for name in MODES)
        assert runs["dsgd"]["accuracy"] == pytest.approx(runs["allreduce"]["accuracy"], abs=1)
        # both send the least possible, but the servers are seeded first; there are six steps
        assert 1 < runs["synchronous"]["num_bytes"] / runs["allreduce"]["num_bytes"] < 1.3
        assert 0 == runs["hogwild"]["num_bytes"] < runs["easgd"]["num_bytes"] < runs["allreduce"]["num_bytes"]
        assert max(stored["slow"]["leads"]) <= stored["slow"]["staleness"] == 3
        assert "## One slow rank" in printed


@pytest.mark.mpi
def test_an_unknown_mode_is_named(mpi):
    from mpi4py import MPI

    with pytest.raises(UsageError, match=r"'x' is unknown; known modes: allreduce, dsgd"):
        modes.main(MPI.COMM_WORLD, command_line.parse([*SHORT, "--modes", "easgd,x"]))


def test_the_largest_lead():
    """Rank 0 begins and returns at once; rank 1's updates begin at 2, 5, 9."""
    slow = [2.0, 5.0, 9.0]
    assert modes_slow.largest_lead([[0.0, 1.0, 3.0], slow], [[0.0, 1.5, 3.0], slow]) == 2
    assert modes_slow.largest_lead([[0.0, 4.0, 8.0], slow], [[2.0, 5.0, 9.0], slow]) == 0
    assert modes_slow.largest_lead([[0.0, 0.0, 0.0], slow], [[0.0, 0.0, 0.0], slow]) == 3


def test_a_paced_iterator_ends_after_its_steps_or_its_time():
    by_steps = modes_slow.Paced(["a", "b"], 0.0, seconds=None, steps=3)
    assert list(by_steps) == ["a", "b", "a", "b"]
    assert by_steps.num_timed == 3
    by_time = modes_slow.Paced(["a", "b"], 0.001, seconds=0.02, steps=None)
    assert len(list(by_time)) == by_time.num_timed + 1 > 1


def test_what_is_told_of_seeds():
    runs = [
        modes.Run(mode, seed, 90.0 + seed + gain, 1.0, 1e6)
        for mode, gain in (("allreduce", 0), ("easgd", -0.5))
        for seed in (2, 0, 1)
    ]
    report = modes.ModesReport(1, 60, 100, {"allreduce": "lr 1", "easgd": "lr 2"}, {}, [], runs, None)
    assert report.gain("easgd") == -0.5
    (line,) = [line for line in modes.render(report).splitlines() if line.startswith("| easgd")]
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        "easgd", "90.50", "89.50", "91.50", "-0.50", "1.00", "1.00", "lr 2",
    ]  # fmt: skip


def test_a_way_starts_from_the_same_network():
    from torchmpi_py.bench.modes_data import make_network

    one, other = (make_network(7) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
