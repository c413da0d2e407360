import json

import pytest
import torch

from torchmpi_py.bench import UsageError, WrongValue, step
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.step import make_samples
from torchmpi_py.bench.trainers import (
    DDP,
    DDP_ALONE,
    DDP_HOOK,
    DDP_TORCHMPI,
    DDP_TORCHMPI_VIEWS,
    DDP_VIEWS,
    NONE,
    OPTIMIZERS,
    WAYS,
    make_perceptron,
    trainers,
)
from torchmpi_py.errors import RanksDisagree

pytestmark = pytest.mark.timeout(240)
TINY = ["step", "--layers", "6,5,3", "--batch", "4", "--steps", "7"]


@pytest.mark.mpi
def test_every_way_is_timed_and_trains_alike(mpi, capsys, tmp_path):
    from mpi4py import MPI

    if mpi.size() > 3:
        pytest.skip("the first use of DDP and of an optimizer imports for seconds a rank; 3 ranks show as much")
    file = tmp_path / "step.json"
    step.main(MPI.COMM_WORLD, parse([*TINY, "--json", str(file)]))
    if mpi.rank() == 0:
        printed = capsys.readouterr().out
        stored = json.loads(file.read_text())
        assert list(stored["median_seconds"]) == [
            NONE,
            DDP,
            DDP_ALONE,
            DDP_VIEWS,
            DDP_TORCHMPI,
            DDP_HOOK,
            DDP_TORCHMPI_VIEWS,
            "synchronize_gradients",
            "register_async_backward",
            "engine",
            "engine, asynchronous",
        ]
        assert all(f"| {name} " in printed for name in stored["median_seconds"])
        assert stored["num_steps"] == 9  # whole runs
        assert "x DDP's added" in printed


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["sharded", "compressed"])
def test_other_ways(mpi, tmp_path, way):
    from mpi4py import MPI

    if mpi.size() > 3:
        pytest.skip("the first use of DDP and of an optimizer imports for seconds a rank; 3 ranks show as much")
    file = tmp_path / "step.json"
    step.main(MPI.COMM_WORLD, parse([*TINY, "--ways", way, "--optimizer", "adam", "--json", str(file)]))
    if mpi.rank() == 0:
        stored = json.loads(file.read_text())
        assert list(stored["median_seconds"])[:2] == [NONE, DDP]
        expected = {"sharded": "ShardedOptimizer", "compressed": "compression=PowerSGD(2)"}
        assert expected[way] in stored["median_seconds"]
        assert stored["parts_seconds"] == {}


@pytest.mark.mpi
def test_a_way_that_does_not_average_is_found(mpi, monkeypatch):
    from mpi4py import MPI

    if mpi.size() not in (2, 3):
        pytest.skip("one rank has nothing to average, and 3 show as much as more")
    monkeypatch.setattr("torchmpi_py.nn.synchronize_gradients", lambda network: None)
    with pytest.raises(WrongValue, match="'synchronize_gradients' is not that of 'DDP on gloo'"):
        step.main(MPI.COMM_WORLD, parse(TINY))


@pytest.mark.mpi
def test_parameters_that_drift_apart_are_found(mpi, monkeypatch):
    from mpi4py import MPI

    if mpi.size() not in (2, 3):
        pytest.skip("one rank agrees with itself, and 3 show as much as more")
    monkeypatch.setattr(step, "_check_alike", lambda made: None)
    monkeypatch.setattr("torchmpi_py.nn.synchronize_gradients", lambda network: None)
    with pytest.raises(RanksDisagree):
        step.main(MPI.COMM_WORLD, parse(TINY))


@pytest.mark.mpi
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_ends_with_done_in_every_way(mpi, optimizer):
    samples = make_samples([6, 5, 3], batch=4, num_steps=3, rank=mpi.rank())
    for trainer in trainers([6, 5, 3], with_ddp=False, ways=WAYS, optimizer=optimizer):
        ends = []
        before = [parameter.clone() for parameter in trainer.network.parameters()]
        trainer.train(samples, lambda ends=ends: ends.append(1))
        assert len(ends) == 3, trainer.name
        same = [old.equal(new) for old, new in zip(before, trainer.network.parameters(), strict=True)]
        assert not (any(same) if trainer.is_exact else all(same)), trainer.name


def test_an_unknown_way_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match="'shared': give some of average, sharded, compressed"):
        parse([*TINY, "--ways", "average,shared"])


def test_networks_are_equal_and_data_is_each_ranks_own():
    one, other = make_perceptron([6, 5, 3]), make_perceptron([6, 5, 3])
    assert all(x.equal(y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
    (x, y), (of_other, _) = (make_samples([6, 5, 3], 4, 1, rank)[0] for rank in (0, 1))
    assert x.shape == (4, 6)
    assert y.dtype == torch.int64
    assert not x.equal(of_other)


def test_the_device_stands_in_the_title():
    report = step.StepReport([6, 3], 4, 5, {}, [], {NONE: 0.001}, {}, "cuda")
    assert step.render(report).startswith("# a training step on cuda: layers 6-3")


def test_the_table_without_ddp_has_no_ratio():
    report = step.StepReport(
        [6, 3], 4, 5, {}, ["DDP on gloo is left out: no reason"], {NONE: 0.001, "engine": 0.003}, {}
    )
    lines = step.render(report).splitlines()
    assert any(
        line.split("|")[1:5] == [" engine           ", "    3.00 ", "     2.00 ", "             - "] for line in lines
    )
