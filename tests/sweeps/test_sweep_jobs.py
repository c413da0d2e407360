"""Sweeps as jobs: groups of ranks that are killed, raise, or wait for ever; a whole sweep that is killed goes on."""

import csv
import json
import signal
from pathlib import Path

import pytest
import torch
from support import jobs

pytestmark = [pytest.mark.timeout(300), jobs.needs_mpi]
PROGRAM = Path(__file__).with_name("swept.py")
KILL = "if mpi.rank() == mpi.size() - 1: os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise ValueError('a bad configuration')"
ALONE = "if mpi.rank() == 1: raise RuntimeError('this rank alone')\n"


def variant(folder, *replacements):
    """The program of the sweep with other words in place of some."""
    text = PROGRAM.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return jobs.write(folder, text, "variant.py")


def words(folder, plan, *options, seconds=0.0, program=PROGRAM):
    return ["--bind", "none", "--timeout", "250", *options, program, folder, json.dumps(plan), seconds]


def run(*arguments, **options):
    return jobs.torchmpirun(*words(*arguments, **options), seconds=260)


def rows(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_values(found, size, failed=()):
    assert [row[0] for row in found] == list(range(12))
    for number, state, value, *_ in found:
        assert state == ("failed" if number in failed else "finished")
        if number not in failed:
            torch.manual_seed(number)
            assert value == {"total": size * number + sum(range(size)), "drawn": torch.rand(1).item()}


@pytest.mark.slow
def test_a_group_goes_on_while_the_other_is_at_work(tmp_path):
    """One does experiment 0 until all others have ended, of which one raises, one is killed, and one leaves.

    A group that is started again goes on in its logs.
    """
    folder, other = tmp_path / "sweep", tmp_path / "other"
    wait = f"import glob\nwhile len(glob.glob({str(folder / 'ended-*')!r})) < 11: time.sleep(0.01)"
    another_sweep = f"""
try:
    mpi.experiments([1], abs, directory=folder, progress=False)
except ValueError as error:
    assert "pass a different directory" in str(error)
mpi.experiments([-3, -4], abs, directory={str(other)!r}, progress=False)
if mpi.is_chief():"""
    plan = {"0": wait, "3": RAISE, "5": KILL, "8": "os._exit(0)"}
    begun = ("mpi.start()\n", "mpi.start()\nprint('begun')\n")
    program = variant(tmp_path, ("\nif mpi.is_chief():", another_sweep), begun)
    done = run(folder, plan, "-n", 2, "--groups", 2, "--log-dir", tmp_path / "logs", program=program)
    logs = [(tmp_path / "logs" / f"group-{group}" / "rank-0.log").read_text() for group in range(2)]
    assert sorted(log.count("begun\n") for log in logs) == [1, 3]
    assert done.stdout.count("begun\n") == 4
    found = rows(done)
    check_values(found, 1, failed=(3, 5, 8))
    assert found[3][3] == "ValueError: a bad configuration"
    assert "was killed by signal 9" in found[5][3]
    assert found[5][5] > 0
    assert done.stderr.count("restarting it for the remaining experiments") == 2
    assert "a bad configuration" in (folder / "0003.log").read_text()
    assert "on rank 0" not in done.stdout  # what experiments print is in their logs
    assert "experiment 4 on rank 0 of 1\n" in (folder / "0004.log").read_text()
    for table, column, expected in ((other, "value", ["3", "4"]), (folder, "number", [str(n) for n in range(12)])):
        with open(table / "results.csv", newline="") as file:
            assert [row[column] for row in csv.DictReader(file)] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "error"), [(KILL, "killed by signal 9"), (ALONE + "mpi.barrier()", "rank 1: Runtime")]
)
def test_a_rank_that_fails_alone_ends_its_groups_job_only(tmp_path, plan, error):
    found = rows(run(tmp_path / "sweep", {"2": plan}, "-n", 4, "--groups", 2))
    check_values(found, 2, failed=(2,))
    assert error in found[2][3]


@pytest.mark.slow
@pytest.mark.parametrize("others", ["mpi.barrier()", "mpi.allreduce_async(torch.ones(3))"])
def test_without_groups_a_rank_that_raises_alone_ends_the_job_and_the_sweep_goes_on_later(tmp_path, others):
    by_two = variant(tmp_path, ("progress=False", "progress=False, ranks_per_experiment=2"))
    first, second = (run(tmp_path / "sweep", {"2": ALONE + others}, "-n", 2, program=by_two) for _ in range(2))
    assert first.returncode != 0
    assert "experiment 2 failed on rank 1 of its group (RuntimeError: this rank alone)" in first.stderr
    assert "failed on rank 0" not in first.stderr
    assert "torchmpirun --groups" in first.stderr
    check_values(rows(second), 2, failed=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", 2, "--groups", 2), ("-n", 2)])
def test_a_sweep_that_was_killed_goes_on(tmp_path, options):
    folder, plan = tmp_path / "sweep", {str(number): "time.sleep(1000)" for number in range(6, 12)}
    with jobs.start(*jobs.TORCHMPIRUN, *words(folder, plan, *options, seconds=0.3)) as sweep:
        jobs.until(lambda: len(list(folder.glob("ended-*"))) >= 4, 100)
        sweep.kill()
    jobs.until(lambda: not is_at_work(folder))
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("ended-*")}
    assert 4 <= len(before) < 12
    check_values(rows(run(folder, {}, *options)), 1)
    assert before == {name: (folder / name).stat().st_mtime_ns for name in before}  # none was run again


def is_at_work(folder):
    """Whether a process has the folder of the sweep in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                return True
        except OSError:
            pass
    return False


def test_a_program_that_fails_outside_of_experiments_ends_all_groups(tmp_path):
    """It is not started again: it would fail for ever."""
    broken = variant(tmp_path, ("mpi.stop()", "raise SystemExit(7)"))
    done = run(tmp_path / "sweep", {}, "-n", 2, "--groups", 2, program=broken)
    assert done.returncode == 7, done.stderr
    assert "failed with exit code 7, probably outside of an experiment" in done.stderr
    assert "started again" not in done.stderr


def test_a_signal_ends_all_groups(tmp_path):
    folder = tmp_path / "sweep"
    options = ("-n", 2, "--groups", 2, "--grace", 0)
    with jobs.start(*jobs.TORCHMPIRUN, *words(folder, {}, *options, seconds=30)) as sweep:
        jobs.until(lambda: len(list(folder.glob("claims-*/*"))) >= 2)
        sweep.send_signal(signal.SIGTERM)
        sweep.communicate(timeout=60)
    assert sweep.returncode == 128 + signal.SIGTERM
    jobs.until(lambda: not is_at_work(folder))


@pytest.mark.parametrize(
    ("options", "text"),
    [("-n 3 --groups 2", "--groups 2: cannot divide 3 ranks"), ("-n 2 --groups 2 --elastic", "omit one of the two")],
)
def test_options_that_do_not_fit(options, text, tmp_path):
    done = run(tmp_path, {}, *options.split())
    assert done.returncode == 2
    assert text in done.stderr
