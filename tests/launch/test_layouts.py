"""``--layouts``: the steps and samples that are counted, programs that cannot be measured, what is refused."""

import re

import pytest
from support import jobs

from torchmpi_py.launch import __main__ as launcher, layouts, topology

pytestmark = pytest.mark.timeout(240)

# Two passes of 3 samples for a step, by way of argv[1]; argv[2] steps at most.
TRAIN = """
import os, sys, time, torch
model = torch.nn.Linear(4, 2)
if sys.argv[1] == "fails" and os.environ["WORLD_SIZE"] == "2":
    raise ValueError(f"two {'ranks'}")
if sys.argv[1] == "ddp":
    torch.distributed.init_process_group("torchmpi")
    model = torch.nn.parallel.DistributedDataParallel(model)
if sys.argv[1] == "engine":
    import torchmpi_py as mpi
    mpi.start()
    data = mpi.engine.DatasetIterator(torch.utils.data.TensorDataset(torch.ones(999, 4), torch.zeros(999, 2)), 6)
    criterion = torch.nn.functional.mse_loss
    mpi.engine.AllReduceSGDEngine().train(network=model, criterion=criterion, iterator=data, lr=0.1, maxepoch=999)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(int(sys.argv[2])):
    for part in range(2):
        model(torch.ones(3, 4)).sum().backward()
    time.sleep(0.01)  # no faster than 100 steps a second
    optimizer.step()
"""


@jobs.needs_mpi
@pytest.mark.parametrize(
    ("way", "steps", "num_bytes", "num_rows", "said"),
    [
        ("ddp", 10**9, 1 << 40, 2, ""),
        ("engine", 0, 1 << 40, 2, ""),
        ("loop", 60, 1, 1, r"\n    2  skipped: needs 2 x \d+ MiB; 0 MiB are free"),  # ends early
        ("fails", 3, 1 << 40, 0, r" 1  ended after 3 .*\n +2  failed with exit code 1; (.*\n)* +ValueError: two"),
    ],
)
def test_table(program, monkeypatch, tmp_path, capfd, no_leftovers, way, steps, num_bytes, num_rows, said):
    monkeypatch.setattr(topology, "num_usable_cores", lambda *_: 2)
    monkeypatch.setattr(topology, "free_memory", lambda: (num_bytes, ""))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["--env", "A=1", "--layout-seconds", "0.5", "--bind", "none", str(program(TRAIN)), way, str(steps)]
    code, shown = launcher.main(["--layouts", *words]), capfd.readouterr().out
    rows = re.findall(r"^ +(\d) x \d +([\d.]+) +([\d.]+) +[\d.]+ +\d+ MiB$", shown, re.MULTILINE)
    assert ([row[0] for row in rows], bool(re.search(said, shown))) == (["1", "2"][:num_rows], True), shown
    for ranks, rate, samples in rows:
        assert float(samples) == pytest.approx(float(rate) * int(ranks) * 6, rel=0.02)
        assert way == "engine" or float(rate) < 100
    assert code == (not rows)
    assert not rows or re.search(r"\nbest: -n [12] \(use it instead of --layouts, with your other options\)\n", shown)


@pytest.mark.parametrize(("cores", "last"), [(1, [1]), (6, [1, 2, 3, 6]), (31, [10, 15, 31]), (48, [6, 12, 24, 48])])
def test_numbers_of_ranks(cores, last):
    assert layouts.numbers_of_ranks(cores)[-4:][-len(last) :] == last


HOSTS = "-n 2 --hosts a:2,b:2 --elastic --max-restarts 1 --profile p --log-dir d --timeline t --dry-run"
THREADS = "--nproc-per-node 2 --elastic-restart 1:2 --env OMP_NUM_THREADS=1"


@pytest.mark.parametrize(
    ("words", "other"),
    [(HOSTS, "the other hosts (start torchmpirun in a job with one host)"), (THREADS, "the variable OMP_NUM_THREADS")],
)
def test_refused(monkeypatch, capfd, words, other):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launcher.main(["--layouts", *words.split(), "-m", "this"]) == 2
    expected = [other, *re.findall(r"(?<!\S)-\S+", words.partition(" --env")[0])]
    assert sorted(capfd.readouterr().err.partition("omit ")[2].strip().split(", ")) == sorted(expected)
