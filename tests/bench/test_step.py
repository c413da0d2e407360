import json

import pytest

from torchmpi_py.bench import WrongValue, step, trainers as trainers_module
from torchmpi_py.bench.__main__ import parse
from torchmpi_py.bench.step import make_samples
from torchmpi_py.bench.trainers import NONE, OPTIMIZERS, WAYS, trainers
from torchmpi_py.core.mpi_api import MPI
from torchmpi_py.errors import RanksDisagree

OF_DDP = [name for constant, name in vars(trainers_module).items() if constant.startswith("DDP")]
OURS = ["DistributedOptimizer", "synchronize_gradients", "register_async_backward", "engine", "engine, asynchronous"]
TINY = ["step", "--layers", "6,5,3", "--batch", "4", "--steps", "7"]


@pytest.mark.mpi
def test_every_way_is_timed_and_trains_alike(mpi, capsys, tmp_path):
    if mpi.size() > 3:
        pytest.skip("the first use of DDP and of an optimizer imports for seconds a rank; 3 ranks show as much")
    file = tmp_path / "step.json"
    step.main(MPI.COMM_WORLD, parse([*TINY, "--json", str(file)]))
    if mpi.rank() == 0:
        printed = capsys.readouterr().out
        stored = json.loads(file.read_text())
        assert set(stored["median_seconds"]) == {NONE, *OF_DDP, *OURS}
        assert all(f"| {name} " in printed for name in stored["median_seconds"])
        assert stored["num_steps"] == 9  # whole runs
        assert "x DDP's added" in printed


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("is_compared", "error", "words"),
    [(True, WrongValue, "'DDP on gloo' and 'synchronize_gradients' differs"), (False, RanksDisagree, None)],
)
def test_a_way_that_does_not_average_is_found(mpi, monkeypatch, is_compared, error, words):
    """By its values, or else because the parameters drift apart."""
    if mpi.size() not in (2, 3):
        pytest.skip("one rank has nothing to average, and 3 show as much as more")
    if not is_compared:
        monkeypatch.setattr(step, "_check_alike", lambda made: None)
    monkeypatch.setattr("torchmpi_py.nn.synchronize_gradients", lambda network: None)
    with pytest.raises(error, match=words):
        step.main(MPI.COMM_WORLD, parse(TINY))


@pytest.mark.mpi
@pytest.mark.parametrize(
    "optimizer", ["sgd", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS if o != "sgd")]
)
def test_a_step_ends_with_done_in_every_way(mpi, optimizer):
    samples = make_samples([6, 5, 3], batch=4, num_steps=3, rank=mpi.rank())
    for trainer in trainers([6, 5, 3], with_ddp=False, ways=WAYS, optimizer=optimizer):
        ends = []
        before = [parameter.clone() for parameter in trainer.network.parameters()]
        trainer.train(samples, lambda ends=ends: ends.append(1))
        assert len(ends) == 3, trainer.name
        same = [old.equal(new) for old, new in zip(before, trainer.network.parameters(), strict=True)]
        assert not (any(same) if trainer.is_exact else all(same)), trainer.name


@pytest.mark.mpi
@pytest.mark.slow
def test_a_gpt_trains_alike_in_every_way(mpi, capsys):
    step.main(MPI.COMM_WORLD, parse(["step", "--network=gpt", "--ways=average,sharded", "--batch=1", "--steps=1"]))
