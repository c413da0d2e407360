"""Experiments on groups of the ranks of one job: values, errors, levels, early stopping, wrong arguments."""

import functools
import logging
import os
import sys

import pytest
import torch
from torch.utils.data import TensorDataset

from torchmpi_py import nn as mpinn, paramserver as ps, sweeps
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator
from torchmpi_py.optim import DistributedOptimizer

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]


@pytest.fixture
def folder(mpi, tmp_path):
    """The same on all ranks."""
    return mpi.broadcast_object(str(tmp_path / "sweep"))


def group_sizes(size):
    return [number for number in range(1, size + 1) if size % number == 0]


def sweep(mpi, folder, configurations, train, **options):
    return mpi.experiments(configurations, train, directory=folder, progress=False, **options)


def test_a_group_is_the_world_of_its_experiment(mpi, folder):
    for k in group_sizes(mpi.size()):

        def train(configuration, k=k):
            assert (mpi.size(), mpi.communicator(0).size, mpi.communicator().key) == (k, k, "global")
            levels = mpi.communicator_names()
            own = torch.arange(5.0) + 10 * mpi.rank() + configuration["a"]
            total = mpi.allreduce(own.clone())
            assert torch.equal(total, k * (torch.arange(5.0) + configuration["a"]) + 10 * sum(range(k)))
            with mpi.split(mpi.rank() % 2) as half:
                assert mpi.allreduce(1, comm=half) == len(range(mpi.rank() % 2, k, 2))
            mpi.push_communicator("more")
            assert mpi.communicator_names() != levels
            server = ps.init(torch.zeros(7))  # level 0
            server.send(torch.ones(7), rule="add").wait()
            mpi.barrier()
            assert torch.equal(server.receive(torch.empty(7)).wait(), torch.full((7,), float(k)))
            return {"sum": total.sum().item(), "is_chief": mpi.is_chief()}

        before = mpi.communicator_names()
        grid = {"a": [0.5, 1.5, 2.5], "b": ["x", "y"]}
        results = sweep(mpi, folder, grid, train, ranks_per_experiment=k, resume=False)
        assert mpi.communicator_names() == before
        assert [row.configuration for row in results] == [{"a": a, "b": b} for a in grid["a"] for b in grid["b"]]
        for row in results:
            assert row.state == "finished", row.error
            expected = k * (10 + 5 * row.configuration["a"]) + 50 * sum(range(k))
            assert row.value == {"sum": expected, "is_chief": True}
        assert mpi.allreduce(1) == mpi.size()


def test_errors_leave_nothing_behind(mpi, folder):
    """Ranks raise with a communicator of their own and an operation under way; the experiments after that are right."""

    def train(number):
        if number % 2:
            own = mpi.split(0)
            assert mpi.allreduce_async(torch.ones(100_000), comm=own) is not None
            raise KeyError("with an operation under way")
        module = torch.nn.Linear(300, 300)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module)
        module(torch.full((2, 300), mpi.rank() + 1.0)).sum().backward()
        optimizer.step()
        mpinn.check_with_allreduce(module)
        return number

    for k in group_sizes(mpi.size()):
        results = sweep(mpi, folder, range(6), train, ranks_per_experiment=k, resume=False)
        assert [row.value for row in results] == [0, None, 2, None, 4, None]
        assert [row.error for row in results] == ["", "KeyError: 'with an operation under way'"] * 3


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_raises_while_the_others_finish_is_named(mpi, folder):
    def train(number):
        if number == 1 and mpi.rank() == 1:
            raise OSError("the disk of this host is full")
        return number

    results = sweep(mpi, folder, range(4), train, ranks_per_experiment=mpi.size())
    assert [row.value for row in results] == [0, None, 2, 3]
    assert results[1].error == "rank 1: OSError: the disk of this host is full"


def test_output_goes_to_a_log_of_each_experiment(mpi, folder, capfd):
    """Also that of a logger which the first experiment has set up."""
    logger = logging.getLogger("a sweep's own")

    def train(number):
        if number == 0:
            logger.addHandler(logging.StreamHandler(sys.__stderr__))
        logger.warning("logged by %d", number)
        print("printed by", number)  # noqa: T201
        os.write(2, f"written by {number}\n".encode())

    for row in sweep(mpi, folder, range(3), train, ranks_per_experiment=mpi.size()):
        with open(row.log) as log:
            lines = log.read().splitlines()
        for word in ("logged", "printed", "written"):
            assert lines.count(f"{word} by {row.number}") == mpi.size()
    logger.handlers.clear()


def test_stopped_early(mpi, folder):
    """Successive halving by two: of experiments one after the other those go on that are among the better half."""
    steps = {}

    def train(rate):
        for epoch in range(1, 9):
            steps[rate] = epoch
            mpi.report(rate * epoch, step=epoch)
        return "to the end"

    rates = [4, 3, 5, 1]
    stop = sweeps.successive_halving(first_step=2, factor=2)
    results = sweep(mpi, folder, rates, train, ranks_per_experiment=mpi.size(), stop=stop)
    assert [(row.state, row.value) for row in results] == [
        ("finished", "to the end"),
        ("stopped", 6.0),  # of 8 and 6 at step 2 one goes on
        ("finished", "to the end"),
        ("stopped", 2.0),
    ]
    assert steps == {4: 8, 3: 2, 5: 8, 1: 2}
    assert mpi.report(1.0) is None  # outside of an experiment


def test_a_stop_function_that_raises_fails_the_experiment_on_all_ranks(mpi, folder):
    def train(number):
        mpi.report(number if number != 2 else "two")

    def stop(own, others):
        assert len(others) == len({1, 2} & set(range(len(others) + 1)))
        if own[1] == 1.0:
            raise ZeroDivisionError("in stop")
        return False

    results = sweep(mpi, folder, range(3), train, ranks_per_experiment=mpi.size(), stop=stop)
    assert [row.state for row in results] == ["finished", "failed", "failed"]
    assert "rank 0 of the group raised ZeroDivisionError: in stop; " in results[1].error
    assert "could not convert string to float: 'two'" in results[2].error


def test_seeds_and_values_do_not_depend_on_the_groups(mpi, folder):
    found = []
    for k in group_sizes(mpi.size()):
        results = sweep(mpi, folder, range(4), lambda _: torch.rand(3), ranks_per_experiment=k, seed=7, resume=False)
        assert [row.seed for row in results] == [7, 8, 9, 10]
        found.append(torch.stack([row.value for row in results]))
    assert all(torch.equal(found[0], other) for other in found)
    assert len(found[0].unique()) == found[0].numel()


def test_a_finished_sweep_is_not_run_again_and_a_value_that_cannot_be_kept_is_an_error(mpi, folder):
    calls = []

    def train(number):
        calls.append(number)
        return (lambda: None) if number == 1 else number

    for again in (True, True, False):
        results = sweep(mpi, folder, range(3), train, ranks_per_experiment=mpi.size(), resume=again)
        assert calls == list(range(3)) * (1 if again else 2)
        assert [row.state for row in results] == ["finished", "failed", "finished"]
        assert "cannot be pickled" in results[1].error


def test_wrong_arguments(mpi, folder):
    def listing():
        yield 1
        raise RuntimeError("no more")

    size = mpi.size()
    for words, configurations, where, options in (
        (f"={size + 1}: pass a divisor of the number of ranks", [1], folder, {"ranks_per_experiment": size + 1}),
        ("found no configuration; pass a non-empty list", [], folder, {}),
        ("cannot be listed: TypeError: 'int' object is not iterable", 5, folder, {}),
        ("cannot be listed: RuntimeError: no more", listing(), folder, {}),
        (r"cannot be listed: .*([Pp]ickl|local object)", [{"f": lambda: 1}], folder, {}),
        ("cannot start: NotADirectoryError", [1], os.devnull + "/folder", {}),
    ):
        with pytest.raises(ValueError, match=words):
            sweep(mpi, where, configurations, abs, **options)

    def nested(_):
        return sweep(mpi, folder, [1], abs)

    results = sweep(mpi, folder, [1], nested, ranks_per_experiment=size, resume=False)
    assert "experiments cannot be nested" in results[0].error


def test_what_a_train_fn_does_to_its_process_and_configuration_stays_in_the_experiment(mpi, folder):
    shared = [1, 2]

    def train(configuration):
        configuration["list"].append(3)
        if configuration.pop("way") == "exit":
            raise SystemExit(0)
        with pytest.raises(mpi.TorchMPIError, match=r"mpi.stop\(\) in an experiment"):
            mpi.stop()
        (mpi.experiment_folder() / f"rank-{mpi.rank()}").write_text("here")
        assert os.environ["TORCHMPI_EXPERIMENT"] == str(mpi.experiment_folder())
        return len(configuration["list"])

    ways = ["exit", "return", "return"]
    configurations = [{"way": way, "list": shared} for way in ways]
    results = sweep(mpi, folder, configurations, train, ranks_per_experiment=mpi.size())
    assert [row.configuration for row in results] == configurations
    assert [(row.value, row.error) for row in results] == [(None, "SystemExit: 0"), (3, ""), (3, "")]
    assert len(os.listdir(os.path.join(folder, "0001"))) == mpi.size()
    with pytest.raises(ValueError, match="outside of an experiment"):
        mpi.experiment_folder()


def engine_trains(engine, **options):
    """Return the weight after the engine's training."""
    data = TensorDataset(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
    network, criterion = torch.nn.Linear(2, 2), torch.nn.CrossEntropyLoss()
    engine.train(network=network, criterion=criterion, iterator=DatasetIterator(data, 4), lr=0.1, **options)
    return network.weight.detach()


def test_a_checkpoint_of_another_experiment_is_refused(mpi, folder):
    def train(_, own=True):
        place = mpi.experiment_folder() if own else f"{folder}-checkpoints"
        return engine_trains(AllReduceSGDEngine(), extensions=[Checkpoint(place)])

    k = mpi.size()
    results = sweep(mpi, folder, range(3), train, ranks_per_experiment=k)
    assert [row.error for row in results] == [""] * 3
    assert not torch.equal(results[0].value, results[1].value)
    results = sweep(mpi, folder, range(3), functools.partial(train, own=False), ranks_per_experiment=k, resume=False)
    assert [bool(row.error) for row in results] == [False, True, True]
