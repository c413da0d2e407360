"""Hosts that come and go (--discover): what the script's answers do to a job, with a stand-in, and in training."""

import json
import signal
import time

import pytest
import stand_in
from support import jobs

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import discovery, job_spec, mpirun, proc
from torchmpi_py.launch.hosts import parse_hosts
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.options import parse
from torchmpi_py.launch.signals import Signals

pytestmark = pytest.mark.timeout(300)


def test_what_a_script_prints(monkeypatch, no_leftovers):
    monkeypatch.setattr(discovery, "_ANSWER_SECONDS", 1)
    assert discovery.ask("echo 'a:2 # one'; echo; echo 'b slots=3'; echo a; sleep 5 &") == parse_hosts("a:3,b:3")
    assert discovery.ask("true") == ()
    left = discovery.ask("sleep 1000 & echo a:$!")[0].num_slots
    while not proc.is_gone(left):  # else for the time of the test
        time.sleep(0.01)
    for script, why in ("exit 3", "exit code 3"), ("sleep 60", "the script ran for more"), ("echo a:b", "'a:b' is not"):
        with pytest.raises(LaunchError, match=f"--discover '{script}': {why}"):
            discovery.ask(script)


@pytest.mark.parametrize(
    ("before", "found", "now"),
    [
        ("a:2", "a:2,b:2", "a:2,b:2"),
        ("a:2", "b:1,a:3", "a:3,b:1"),
        ("a:2,b:2", "b:2", "b:2"),
        ("a:2,b:2", "b:2,c:4", "b:2,c:2"),
        ("a:2,b:2", "c:8,b:2,a:2", ""),  # spare hosts
        ("a:2,b:2", "b:2,a:4", ""),
        ("a:2", "", "none"),
        ("a:2", "b:1", "b:1"),
    ],
)
def test_a_change_of_hosts(before, found, now):
    spec = JobSpec(elastic_restart=(1, 4), discover="?")
    job = discovery.Discovery(discovery.chosen(spec, parse_hosts(before)))
    job._found = parse_hosts(found) if found else ()
    hosts = parse_hosts(now) if now not in ("", "none") else ()
    numbers = sum(host.num_slots for host in hosts), job.spec.num_ranks
    ranks = "({} rank{}, previously {})".format(numbers[0], "s" * (numbers[0] != 1), numbers[1])
    assert job.news() == (now and f"hosts are now {now} {ranks}; letting the ranks save, then restarting")


def test_what_ends_an_attempt(monkeypatch, capfd):
    """An answer that comes twice in a row; a new host counts when it can be reached."""
    answers = iter(parse_hosts(each) if each else () for each in ["a:2,b:2", "a:2", *["a:2,b:2,c:2"] * 3, "", ""])
    monkeypatch.setattr(discovery, "ask", lambda script: next(answers))
    outcome = discovery.host_check.Outcome(["c: no route", "b: refused"], [], "")
    monkeypatch.setattr(discovery.host_check, "check", lambda *_: outcome)
    job = discovery.Discovery(discovery.chosen(JobSpec(elastic_restart=(1, 6), discover="?"), parse_hosts("a:2")))
    told = []
    for turn in range(7):
        if turn == 4:
            del outcome.problems[1]
        job._ask()
        told.append(job.news()[14:26])
    assert told == [*[""] * 4, *["a:2,b:2 (4 r"] * 2, "none (0 rank"]
    said = capfd.readouterr().err
    assert [said.count(text) for text in ("c: no route", "b: refused")] == [1, 1]


def test_waiting_for_hosts(tmp_path, capfd, monkeypatch):
    """A script that fails changes nothing, and is named once. A signal for ranks that comes meanwhile is dropped."""
    monkeypatch.setattr(discovery.host_check, "check", lambda *_: discovery.host_check.Outcome([], [], ""))
    (tmp_path / "hosts").write_text("a:1")
    job = discovery.Discovery(JobSpec(elastic_restart=(2, 4), discover=f"cat {tmp_path}/hosts", timeout=0.5))
    assert not job.wait(time.monotonic(), Signals())
    (tmp_path / "hosts").write_text("a:3")
    assert job.wait(time.monotonic(), Signals())
    (tmp_path / "hosts").unlink()
    assert [job.wait(time.monotonic(), Signals()) for _ in range(2)] == [True, True]
    assert job.spec.num_ranks == 3
    signals = Signals()
    signals.receive(signal.SIGUSR1)
    assert job.wait(time.monotonic(), signals)
    assert (signals._to_pass_on, signals.cause(5)) == ([], 0)
    assert not job.wait(time.monotonic() - 1, signals)  # --timeout has passed
    said = capfd.readouterr().err
    assert [said.count(text) for text in ("waiting up to", "not enough hosts after", "exit code 1")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--discover s", "--discover needs limits for the number of ranks; add the option --elastic-restart MIN:MAX"),
        ("--elastic-restart 1:2 -n 2", "omit -n"),
        ("--elastic-restart 1:2 --groups 2", "omit --groups"),
        ("--elastic-restart 1:2 --elastic", "omit --elastic"),
        ("--elastic-restart 1:2 --discover s --hosts a", "omit --hosts"),
        ("--elastic-restart 3:4 --hosts a:2", "the hosts have slots for 2 ranks"),
    ],
)
def test_what_does_not_go_together(words, error):
    options = parse([*words.split(), "--mpi", "openmpi", "--dry-run", "x.py"])
    with pytest.raises(LaunchError, match=error):
        job_spec.read(options, [], {})


def test_an_allocation_decides_without_a_script():
    options = parse(["--elastic-restart", "2:4", "--hosts", "a:3,b:3", "--mpi", "openmpi", "--dry-run", "x.py"])
    spec = job_spec.read(options, [], {})
    assert (spec.num_ranks, spec.max_restarts, spec.vendor) == (4, 3, mpirun.OPEN_MPI)


IN_TURN = """
import os, signal, sys, time
from torchmpi_py.launch import exit_marks
attempt = int(os.environ["TORCHMPIRUN_RESTART"])
print("attempt", attempt, flush=True)
if attempt in (0, 2, 3):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with exit_marks.running(sys.argv[1], 0):
        time.sleep(100)
sys.exit(5 if attempt == 1 else 0)
"""
CHANGING = """
options |= {"grace": 9.0, "num_ranks": 1, "discover": "?"}
signals.Signals.wait = lambda _, seconds: terminal.say(f"pause of {seconds} s")
made = []
def make(folder, attempt, begin, make=make):
    made.append(make(folder, attempt, begin))
    begun = jobs.time.monotonic()
    made[-1].news = lambda: "other hosts" * (jobs.time.monotonic() > begun + 1)
    return made[-1]
"""


def test_a_change_is_no_failure(no_leftovers):
    """Attempt 1 fails, which is the one failure that is allowed. A program that saves and ends with 0 goes on."""
    job = stand_in.run(IN_TURN, most=1, before=CHANGING)
    assert (job.returncode, job.stdout.count("attempt")) == (0, 5), job.stderr
    assert job.stderr.splitlines() == [
        "torchmpirun: other hosts",
        "torchmpirun: attempt 1 of 2 failed (exit code 5); starting again",
        "torchmpirun: pause of 1.0 s",
        *["torchmpirun: other hosts"] * 2,
    ]


TRAIN = """
import json, os, sys, time
import torch
import torchmpi_py as mpi
from torchmpi_py.engine import AllReduceSGDEngine, Checkpoint, DatasetIterator

mpi.start()
torch.manual_seed(0)
inputs = torch.randn(600, 10)
samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(600))
attempt, begun = int(os.environ["TORCHMPIRUN_RESTART"]), []

def note(state):
    used = [] if state.sample is None else state.sample[2].tolist()
    with open(f"{attempt}-{mpi.rank()}.used", "a") as file:
        print(json.dumps([attempt, state.t, state.epoch, mpi.size(), state.loss.item(), used]), file=file)
    begun.append(state.t)
    if len(begun) >= 20 and attempt < 2:  # until the change is noticed
        os.symlink(f"hosts-{attempt + 1}", f"link-{mpi.rank()}")
        os.replace(f"link-{mpi.rank()}", "hosts")
        time.sleep(0.25)

engine = AllReduceSGDEngine()
engine.hooks.on_update = note
options = {"lr": 0.02, "maxepoch": 4, "extensions": [Checkpoint("checkpoints")]}
iterator = DatasetIterator(samples, 4)
engine.train(network=torch.nn.Linear(10, 1), criterion=torch.nn.MSELoss(), iterator=iterator, **options)
"""


@jobs.needs_mpi
@pytest.mark.slow
def test_training_with_two_three_and_two_ranks(tmp_path):
    for attempt, slots in enumerate((2, 3, 2)):
        (tmp_path / f"hosts-{attempt}").write_text(f"localhost:{slots}")
    (tmp_path / "hosts").symlink_to("hosts-0")
    options = ["--elastic-restart", "1:3", "--discover", "cat hosts"]
    job = jobs.torchmpirun(*options, jobs.write(tmp_path, TRAIN), cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    changes = [("3", "3 ranks, previously 2"), ("2", "2 ranks, previously 3")]
    said = [f"hosts are now localhost:{n} ({of}); letting the ranks save, then restarting" for n, of in changes]
    assert [line for line in job.stderr.splitlines() if "hosts" in line] == [f"torchmpirun: {line}" for line in said]
    rows = sorted(json.loads(line) for file in tmp_path.glob("*.used") for line in file.read_text().splitlines())
    assert {(row[0], row[3]) for row in rows} == {(0, 2), (1, 3), (2, 2)}
    for epoch in range(4):
        assert sorted(number for row in rows if row[2] == epoch for number in row[5]) == list(range(600))
    firsts = {}
    for row in rows:
        firsts.setdefault(row[0], row[4])
    assert firsts[2] < firsts[1] < firsts[0]
