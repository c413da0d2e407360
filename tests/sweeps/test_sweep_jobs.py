"""Sweeps as jobs: groups of ranks that are killed, raise, or wait for ever; a whole sweep that is killed goes on."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchmpi_py.launch.group_jobs import GroupOfRanks
from torchmpi_py.sweeps.experiments import _Group
from torchmpi_py.sweeps.ledger import Ledger

pytestmark = pytest.mark.timeout(300)
PROGRAM = Path(__file__).parent / "swept.py"
KILL = "if mpi.rank() == mpi.size() - 1: os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('a bad configuration')"


def command(folder, plan, seconds=0.1, options=()):
    launch = [sys.executable, "-m", "torchmpi_py.launch", "--bind", "none", "--timeout", "250", *options]
    return [*launch, str(PROGRAM), str(folder), json.dumps(plan), str(seconds)]


def run(folder, plan, *options, seconds=0.1):
    line = command(folder, plan, seconds, options)
    return subprocess.run(line, capture_output=True, text=True, timeout=260, check=False)


def rows(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_values(found, size, failed=()):
    assert [row[0] for row in found] == list(range(12))
    for number, state, value, _, _, _ in found:
        assert state == ("failed" if number in failed else "finished")
        if number not in failed:
            torch.manual_seed(number)
            assert value == {"total": size * number + sum(range(size)), "drawn": torch.rand(1).item()}


@pytest.mark.parametrize("num_groups", [4, 2])
def test_a_group_that_is_killed_goes_on_with_the_next_experiment(tmp_path, num_groups):
    done = run(tmp_path / "sweep", {"3": RAISE, "5": KILL}, "-n", "4", "--groups", str(num_groups))
    found = rows(done)
    check_values(found, 4 // num_groups, failed=(3, 5))
    assert found[3][3] == "ValueError: a bad configuration"
    assert "was killed by signal 9" in found[5][3], found[5]
    assert found[5][5] > 0
    assert "it is started again for what is left" in done.stderr
    assert "a bad configuration" in (tmp_path / "sweep" / "0003.log").read_text()
    assert "on rank 0" not in done.stdout  # what experiments print is in their logs
    assert f"experiment 4 on rank 0 of {4 // num_groups}\n" in (tmp_path / "sweep" / "0004.log").read_text()


def test_no_group_is_idle_while_there_is_work(tmp_path):
    """Three experiments at a time wait for each other; where one begins, at most two before it are at work still."""
    folder = tmp_path / "sweep"
    wait = f"import glob\nwhile len(glob.glob({str(folder / '[0-9]*.log')!r})) < NUMBER: time.sleep(0.01)"
    plan = {str(number): wait.replace("NUMBER", str(number // 3 * 3 + 3)) for number in range(12)}
    found = rows(run(folder, plan, "-n", "3", "--groups", "3"))
    check_values(found, 1)
    begins, ends = [row[4] for row in found], [row[4] + row[5] for row in found]
    unfinished = [sum(end > begin for end in ends[:number]) for number, begin in enumerate(begins)]
    assert max(unfinished) == 2, unfinished


@pytest.mark.slow
def test_a_rank_that_raises_alone_ends_its_groups_job_only(tmp_path):
    alone = "if mpi.rank() == 1: raise RuntimeError('this rank alone')\nmpi.barrier()"
    found = rows(run(tmp_path / "sweep", {"2": alone}, "-n", "4", "--groups", "2"))
    check_values(found, 2, failed=(2,))
    assert found[2][3] == "rank 1: RuntimeError: this rank alone"


@pytest.mark.slow
@pytest.mark.parametrize("others", ["mpi.barrier()", "mpi.allreduce_async(torch.ones(3))"])
def test_without_groups_a_rank_that_raises_alone_ends_the_job_and_the_sweep_goes_on_later(tmp_path, others):
    alone = f"if mpi.rank() == 1: raise RuntimeError('this rank alone')\n{others}"
    program = PROGRAM.read_text().replace("progress=False", "progress=False, ranks_per_experiment=2")
    (tmp_path / "by_two.py").write_text(program)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "--bind", "none", "--timeout", "250", "-n", "2"]
    line = [*launch, str(tmp_path / "by_two.py"), str(tmp_path / "sweep"), json.dumps({"2": alone}), "0"]
    first = subprocess.run(line, capture_output=True, text=True, timeout=260, check=False)
    assert first.returncode != 0
    assert "experiment 2 failed on rank 1 of its group (RuntimeError: this rank alone)" in first.stderr
    assert "failed on rank 0" not in first.stderr
    assert "torchmpirun --groups" in first.stderr
    check_values(rows(subprocess.run(line, capture_output=True, text=True, timeout=260, check=False)), 2, failed=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "2", "--groups", "2"), ("-n", "2")])
def test_a_sweep_that_was_killed_goes_on(tmp_path, options):
    folder, plan = tmp_path / "sweep", {str(number): "time.sleep(1000)" for number in range(6, 12)}
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(command(folder, plan, 0.3, options), stdout=said, stderr=subprocess.STDOUT) as sweep,
    ):
        until = time.monotonic() + 200
        while len(list(folder.glob("ended-*"))) < 4 and time.monotonic() < until and sweep.poll() is None:
            time.sleep(0.05)
        sweep.kill()
    wait_until_all_are_dead(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("ended-*")}
    assert 4 <= len(before) < 12, (tmp_path / "said").read_text()
    check_values(rows(run(folder, {}, *options)), 1)
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}  # none was run again


def wait_until_all_are_dead(folder):
    def lives(process):
        try:
            return str(folder).encode() in (process / "cmdline").read_bytes()
        except OSError:
            return False

    until = time.monotonic() + 60
    while any(lives(each) for each in Path("/proc").glob("[0-9]*")) and time.monotonic() < until:
        time.sleep(0.1)


def test_a_program_that_fails_outside_of_experiments_ends_all_groups(tmp_path):
    (tmp_path / "broken.py").write_text("import torchmpi_py as mpi\nmpi.start()\nraise SystemExit('broken')\n")
    line = [sys.executable, "-m", "torchmpi_py.launch", "-n", "2", "--groups", "2", str(tmp_path / "broken.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stderr
    assert "failed outside of an experiment" in done.stderr


def test_a_program_that_fails_after_the_sweep_is_not_started_again(tmp_path):
    program = PROGRAM.read_text().replace("mpi.stop()", "raise SystemExit(7)")
    (tmp_path / "broken.py").write_text(program)
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "1", "--groups", "1", str(tmp_path / "broken.py")]
    line = [*launch, str(tmp_path / "sweep"), "{}", "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 7, done.stderr
    assert "started again" not in done.stderr


def test_a_rank_that_leaves_in_the_middle_and_two_sweeps_of_one_program(tmp_path):
    other = f"""
def other_sweep():
    try:
        mpi.experiments([1], abs, directory=folder, progress=False)
    except ValueError as error:
        assert "was used by an earlier call" in str(error)
    mpi.experiments([-3, -4], abs, directory={str(tmp_path / "other")!r}, progress=False)


mpi.start()
"""
    program = PROGRAM.read_text().replace("if mpi.is_chief():", "other_sweep()\nif mpi.is_chief():")
    (tmp_path / "two.py").write_text(program.replace("mpi.start()\n", other))
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "2", "--groups", "2", "--timeout", "250"]
    line = [*launch, str(tmp_path / "two.py"), str(tmp_path / "sweep"), json.dumps({"4": "os._exit(0)"}), "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=260, check=False)
    check_values(rows(done), 1, failed=(4,))
    with open(tmp_path / "other" / "results.csv", newline="") as file:
        assert [row["value"] for row in csv.DictReader(file)] == ["3", "4"]
    with open(tmp_path / "sweep" / "results.csv", newline="") as file:
        assert [row["state"] for row in csv.DictReader(file)].count("finished") == 11


def test_a_signal_ends_all_groups(tmp_path):
    with subprocess.Popen(command(tmp_path / "sweep", {}, 30, ("-n", "2", "--groups", "2", "--grace", "0"))) as sweep:
        until = time.monotonic() + 200
        while len(list((tmp_path / "sweep").glob("claims-*/*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(60) == 128 + signal.SIGTERM
    wait_until_all_are_dead(tmp_path / "sweep")


@pytest.mark.slow
def test_a_group_that_is_started_again_goes_on_in_its_logs(tmp_path):
    (tmp_path / "begun.py").write_text(PROGRAM.read_text().replace("mpi.start()\n", "mpi.start()\nprint('begun')\n"))
    launch = [sys.executable, "-m", "torchmpi_py.launch", "-n", "1", "--groups", "1", "--log-dir", str(tmp_path / "l")]
    line = [*launch, str(tmp_path / "begun.py"), str(tmp_path / "sweep"), json.dumps({"2": KILL}), "0"]
    for num_starts in (2, 1):  # another torchmpirun begins new logs, and finds the sweep complete
        done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        for text in (done.stdout, (tmp_path / "l" / "group-0" / "rank-0.log").read_text()):
            assert text.count("begun\n") == num_starts


def test_a_claim_that_fails_is_outside_of_an_experiment(tmp_path):
    """For ever, if the group were started again."""
    ledger = Ledger(tmp_path / "sweep", "a", 0)
    ledger.prepare([1], 0, resume=True)
    (tmp_path / "sweep" / "claims-a").rmdir()
    place = GroupOfRanks(0, 1, "a", str(tmp_path))
    group = _Group(ledger, SimpleNamespace(rank=0), abs, None, place)
    with pytest.raises(FileNotFoundError):
        group._next()
    assert not (tmp_path / "experiment-0").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-n", "3", "--groups", "2"), "--groups 2 does not divide 3 ranks"),
        (("-n", "2", "--groups", "2", "--elastic"), "leave out --elastic"),
        (("-n", "2", "--groups", "2", "--max-restarts", "1"), "leave out --max-restarts"),
        (("-n", "4", "--groups", "2", "--hosts", "a:1,b:1"), "4 ranks need as many slots, and the hosts have 2"),
    ],
)
def test_options_that_do_not_fit(words, text, tmp_path):
    done = run(tmp_path, {}, *words)
    assert done.returncode == 2
    assert text in done.stderr
