"""The examples: their own processes, or several programs in the ranks of one job (``jobs``)."""

import gzip
import re
import sys

import pytest
import torch
from example_programs import EXAMPLES, TORCHMPIRUN, example, launch, run

pytestmark = pytest.mark.timeout(1200)


def sequential(*options, **expected):
    return run(sys.executable, EXAMPLES / "mnist_sequential.py", *options, **expected)


def result(output):
    """(test loss, accuracy in percent), printed once."""
    ((loss, accuracy),) = re.findall(r"test loss ([\d.]+), accuracy ([\d.]+) %", output)
    return float(loss), float(accuracy)


def assert_close(file, other):
    others = torch.load(other)
    for name, x in torch.load(file).items():
        assert (x - others[name]).abs().max() < 1e-5 * others[name].abs().max(), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Three epochs in one process: what is printed, and the file of parameters."""
    file = tmp_path_factory.mktemp("alone") / "1.pt"
    return sequential("--epochs", 3, "--save", file), file


@pytest.mark.slow
def test_two_ranks_learn_the_digits():
    output = launch(2, "mnist_allreduce.py", "--progress")
    loss, accuracy = result(output)
    assert loss < 0.1
    assert accuracy >= 97
    assert "bit-identical on all 2 ranks" in output
    assert "rounded" not in output
    assert len(re.findall("epoch 25/25: 100%.*accuracy", output)) == 1, "progress is shown once"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "percent"),
    [
        example(3, "digits_own_loop.py --epochs 3 --compression powersgd", 85),  # some ranks have a batch more
        example(3, "digits_own_loop.py --epochs 3 --sharded --clip 1.0", 85),
        example(3, "digits_own_loop.py --epochs 3 --sharded --placement round_robin", 85),
        example(3, "digits_local_sgd.py --epochs 6 --period 4", 80),
        example(3, "digits_local_sgd.py --epochs 6 --period 8 --group-period 2 --start 10", 80),
        example(3, "digits_local_sgd.py --epochs 6 --period 4 --slow-momentum 0.5", 80),
        example(3, "digits_gossip.py --epochs 6", 80),
        example(3, "digits_gossip.py --epochs 6 --partners random --asynchronous", 80),
        example(3, "digits_large_batch.py --epochs 6 --factor 1.5 --warmup-steps 10", 80),
    ],
)
def test_a_mode_learns(jobs, command, percent):
    assert float(re.search(r"accuracy ([\d.]+) %", jobs.printed(3, command))[1]) > percent


@pytest.mark.slow
def test_a_flavour_of_ones_choice_learns():
    assert result(launch(3, "mnist_allreduce.py", "--epochs", 6, "--flavour", "ring"))[1] > 80  # stays in a process


IN_FLOAT64 = "../tests/examples/in_float64.py"


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """The parameters after three steps of one process, in float64."""
    file = tmp_path_factory.mktemp("three") / "1.pt"
    run(sys.executable, EXAMPLES / IN_FLOAT64, "mnist_sequential.py", "--epochs", 1, "--save", file)
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "file"),
    [
        example(4, f"{IN_FLOAT64} {how} --epochs 1 --save {file}", file)
        for file, how in (
            ("parts.pt", "mnist_modelparallel.py --ranks-per-group 2"),
            ("hybrid.pt", "mnist_hybrid.py --ranks-per-group 2"),
            ("stages.pt", "digits_pipeline.py --stages 2 --micro-batches 3"),
        )
    ],
)
def test_four_ranks_divide_a_network_and_take_the_steps_of_one_process(jobs, three_steps, command, file):
    jobs.printed(4, command)
    parameters = torch.load(jobs.folder / file)
    assert parameters.keys() == three_steps.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(value, three_steps[name], rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "file"),
    [
        example(4, f"mnist_allreduce.py --epochs 3 --save {file}{how}", file)
        for file, how in (("blocking.pt", ""), ("asynchronous.pt", " --asynchronous"), ("sharded.pt", " --sharded"))
    ],
)
def test_four_ranks_train_as_one_process(jobs, alone, command, file):
    loss, accuracy = result(jobs.printed(4, command))
    assert (pytest.approx(loss, abs=2e-4), accuracy) == result(alone[0])
    assert_close(jobs.folder / file, alone[1])


GPT = "gpt.py --steps 4 --layers 1 --width 32 --context 16"
OTHER_WAYS = [(3, GPT), (2, f"{GPT} --ddp"), (2, f"{GPT} --fsdp")]


@pytest.mark.runs(1, GPT)
@pytest.mark.parametrize(
    ("command", "num_ranks"),
    [example(2, GPT, 2), *(example(n, command, n, marks=[pytest.mark.slow]) for n, command in OTHER_WAYS)],
)
def test_a_gpt_has_the_losses_of_one_process(jobs, command, num_ranks):
    printed = jobs.printed(1, GPT), jobs.printed(num_ranks, command)
    alone, together = ([float(loss) for loss in re.findall(r"loss ([\d.]+),", output)] for output in printed)
    assert len(alone) == 4
    assert together == pytest.approx(alone, abs=2e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")
@pytest.mark.parametrize("how", [[], ["--asynchronous"]])
def test_on_gpus(how):
    assert result(launch(2, "mnist_allreduce.py", "--usegpu", *how))[1] >= 97


ROUNDED = "mnist_allreduce.py --epochs 1 --batch 61"


@pytest.mark.slow
@pytest.mark.runs(2, ROUNDED)
def test_a_batch_that_cannot_be_split_is_rounded_up(jobs):
    output = jobs.printed(2, ROUNDED)
    assert output.count("batch of 61 rounded up to 62, 31 on each of 2 ranks") == 1
    loss, accuracy = result(output)
    assert (pytest.approx(loss, abs=2e-4), accuracy) == result(sequential("--epochs", 1, "--batch", 62))


def idx(tensor):
    sizes = b"".join(size.to_bytes(4, "big") for size in tensor.shape)
    return bytes([0, 0, 8, tensor.ndim]) + sizes + bytes(tensor.flatten().tolist())


@pytest.mark.slow
def test_mnist_files_are_read_plain_and_gzipped_and_missing_and_broken_ones_are_named(tmp_path):
    assert "train-images-idx3-ubyte.gz" in sequential("--data", tmp_path, fails=True)
    generator = torch.Generator().manual_seed(0)
    for part, total in (("train", 90), ("t10k", 30)):
        labels = torch.randint(10, (total,), generator=generator)
        images = torch.zeros(total, 28, 28, dtype=torch.int64)
        images[torch.arange(total), labels + 9, :] = 255  # a bar at the height of the label
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    assert result(sequential("--data", tmp_path, "--epochs", 20, "--batch", 10))[1] > 90
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x09short")
    assert "is not an idx file" in sequential("--data", tmp_path, fails=True)


@pytest.mark.slow
def test_sweep(tmp_path):
    options = ("--epochs", 2, "--lr", 0.1, 0.2, "--momentum", 0.0, "--directory", tmp_path / "sweep")
    output = run(TORCHMPIRUN, "-n", 2, "--groups", 2, EXAMPLES / "digits_sweep.py", *options)
    ((best, accuracy),) = re.findall(r"the best of 2: \{'lr': ([\d.]+), 'momentum': 0.0\}, accuracy ([\d.]+) %", output)
    assert best in ("0.1", "0.2")
    assert float(accuracy) > 20
    assert "epoch 1: accuracy" in (tmp_path / "sweep" / "0000.log").read_text()
