"""What `torchmpirun` prints for Slurm, and `--check`, on hosts of their own."""

import os
import sys
import time
from pathlib import Path

import pytest
import testbed
from support.jobs import script, until

import torchmpi_py
from torchmpi_py.launch import ready_scripts, topology

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 360  # of which Slurm takes 120 before it starts a job again

TRAIN = """
import hashlib, os, time
import torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator

mpi.start()
torch.manual_seed(mpi.rank())
network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
x = torch.arange(384.0).reshape(48, 8).sin()
samples = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
engine = AllReduceSGDEngine()


def on_update(state):
    if mpi.rank() == 0:
        print(f"step {state.t} of {os.environ['SLURM_JOB_ID']}", flush=True)
    while state.t > 6 and not os.path.exists("go"):  # until the signal is under way
        time.sleep(0.05)


engine.hooks.on_update = on_update
engine.train(
    network=network,
    criterion=torch.nn.MSELoss(),
    iterator=DatasetIterator(samples, batch_size=4),
    optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
    maxepoch=3,
    extensions=[Checkpoint(f"runs/{os.environ['SLURM_JOB_ID']}")],
)
bits = b"".join(parameter.detach().numpy().tobytes() for parameter in network.parameters())
print(f"rank {mpi.rank()} of {mpi.num_nodes()} nodes: {hashlib.sha256(bits).hexdigest()}", flush=True)
"""


def run(bed, *command):
    done = bed.run(bed.hosts[0], list(command), cwd=bed.shared)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def slurm(bed):
    if reason := testbed.why_not(slurm=True):
        pytest.skip(reason)
    return bed


def test_a_job_that_is_asked_to_end_is_queued_again_and_ends_with_the_same_bits(slurm, monkeypatch):
    monkeypatch.chdir(slurm.shared)
    monkeypatch.setenv("PYTHON", sys.executable)
    Path("train.py").write_text(TRAIN)
    Path("job.sbatch").write_text(ready_scripts.text("slurm"))
    submit = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=20", "job.sbatch", "train.py"]
    job = run(slurm, *submit)
    output = Path(f"torchmpi-{job}.out")
    until(lambda: output.exists() and f"step 7 of {job}" in output.read_text(), SECONDS)
    run(slurm, "scancel", "--signal=TERM", job)  # as Slurm does before the time limit: to the ranks, not to the script
    time.sleep(1)
    Path("go").touch()
    until(lambda: run(slurm, "squeue", "--noheader", "--format=%t", f"--jobs={job}") == "PD", SECONDS)
    assert f"job {job} was asked to end, has saved, and is queued again" in output.read_text()
    assert "rank 0 of" not in output.read_text()
    undisturbed = run(slurm, *submit)
    ends = {}
    for number in (job, undisturbed):
        path = Path(f"torchmpi-{number}.out")
        until(lambda path=path: path.exists() and path.read_text().count(" of 2 nodes: ") == 2, SECONDS)
        text = path.read_text()
        ends[number] = sorted(line for line in text.splitlines() if line.startswith("rank"))
        assert text.count(f"step 7 of {number}\n") == 1  # neither repeated nor left out
    assert ends[job] == ends[undisturbed]


def check(bed, hosts):
    command = [sys.executable, "-m", "torchmpi_py.launch", "--check", "--hosts", hosts]
    return bed.run(bed.hosts[0], command, cwd=testbed.ROOT)


def test_check_through_ssh(bed):
    done = check(bed, "nodea:2,nodeb:2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"2 hosts answer and have the same software: torchmpi_py {torchmpi_py.__version__}, ")
    package = os.path.dirname(torchmpi_py.__file__)
    (bed.shared / "empty").mkdir()
    bed.run("nodeb", ["mount", "--bind", str(bed.shared / "empty"), package])
    try:
        done = check(bed, "nodea:2,nodeb:2,nowhere:1")
    finally:
        bed.run("nodeb", ["umount", package])
    first, second = done.stdout.splitlines()
    assert first.startswith(f"nodeb: no torchmpi_py at {package} ({torchmpi_py.__version__} here); ")
    assert second.startswith("nowhere: ssh: Could not resolve hostname nowhere: ")
    assert done.returncode == 2


def test_check_in_an_allocation_asks_through_slurm(slurm):
    words = ["salloc", "--quiet", "--nodes=2", "--ntasks=2", sys.executable, "-m", "torchmpi_py.launch", "--check"]
    bed_environment = slurm.environment() | {"PATH": f"{slurm.shared / 'no-ssh'}:{testbed.PATH}"}
    script(slurm.shared / "no-ssh", "#!/bin/sh\nexit 255\n", "ssh")
    done = slurm.run("nodea", words, cwd=testbed.ROOT, env=bed_environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 hosts answer and have the same software: ")


WHERE = (
    "import socket\nfrom mpi4py import MPI\nnames = MPI.COMM_WORLD.gather(socket.gethostname())\nprint(*names or ())"
)


@pytest.mark.parametrize(
    ("asked", "words", "counts", "said"),
    [
        ("", [], "cores cores", "torchmpirun: {all} ranks: one for each core of the 2 hosts of Slurm's job\n"),
        ("--ntasks-per-node=1", [], "1 1", ""),
        ("", ["--hosts", "nodea:1,nodeb:3"], "1 3", ""),  # Open MPI alone makes 2 and 2 of that
        ("", ["-n", "1"], "1 0", "torchmpirun: Slurm's job has hosts without a rank (nodeb); omit -n,"),
    ],
)
def test_ranks_fill_the_nodes_of_an_allocation(slurm, asked, words, counts, said):
    (slurm.shared / "where.py").write_text(WHERE)
    line = ["salloc", "--quiet", "--exclusive", "--nodelist=nodea,nodeb", *asked.split()]
    done = slurm.run(
        "nodea", [*line, sys.executable, "-m", "torchmpi_py.launch", *words, str(slurm.shared / "where.py")]
    )
    cores = topology.num_usable_cores()
    expected = [int(count.replace("cores", str(cores))) for count in counts.split()]
    names = done.stdout.split()
    assert (done.returncode, [names.count(host) for host in ("nodea", "nodeb")]) == (0, expected), done.stderr
    assert done.stderr.startswith(said.format(all=2 * cores)) if said else done.stderr == ""
