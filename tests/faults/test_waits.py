"""All ranks wait for rank 1, in each kind of wait: the report says that it sleeps, or has come to its end."""

import re

import harness
import pytest
from support.jobs import needs_mpi, write
from waits import HEAD, PATIENT, WAITS

pytestmark = [pytest.mark.timeout(1500), needs_mpi]

DEADLINE_SECONDS = 5
NEVER_SECONDS = 1000
RANKS = 3 if harness.ALL else 2
ASLEEP = list(WAITS) if harness.ALL else ["a future"]
SELDOM_REPORTED = ("mpi.stop", "a new process group", "bounded staleness", "init_process_group")
ENDING = [name for name in ASLEEP if not WAITS[name].words.startswith(SELDOM_REPORTED) and "stop" not in name]


def job(name, folder, text, deadline_seconds):
    program = write(folder, text, f"{re.sub('[^A-Za-z0-9]+', '_', name)}.py")
    environment = {"TORCHMPI_DEADLINE": str(deadline_seconds), "TORCHMPI_TUNING_DIR": "/dev/null"}
    return harness.run(name, harness.command(RANKS, program), environment, within_seconds=30.0)


@pytest.mark.slow
def test_a_rank_sleeps(judge, tmp_path):
    """The report at the deadline says what the others wait in, and that rank 1 is not there."""

    def sleeps(name):
        outcome = job(f"sleep: {name}", tmp_path, WAITS[name].text("sleep"), DEADLINE_SECONDS)
        outcome.expect(outcome.code == 1, "the exit code is not 1")
        waiting = re.search(rf"rank [02] waits in {WAITS[name].words}", outcome.errors)
        outcome.expect(bool(waiting), f"the report does not say that the others wait in {WAITS[name].words}")
        late = re.search(r"rank 1 \(process \d+\): (has not called it|its last|has called nothing)", outcome.errors)
        outcome.expect(bool(late), "the report does not say that rank 1 has not come")
        outcome.expect(" in strike\n" in outcome.errors, "the report does not say where rank 1 stands")
        return outcome

    judge("a rank sleeps", harness.at_once(2, ASLEEP, sleeps))


@pytest.mark.slow
def test_a_rank_comes_to_its_end(judge, tmp_path):
    """The report comes long before a deadline."""

    def ends(name):
        outcome = job(f"end: {name}", tmp_path, WAITS[name].text("end"), NEVER_SECONDS)
        outcome.expect(outcome.code == 1, "the exit code is not 1")
        left = r"rank 1 .*is in mpi\.stop\(\) and will not call|calls mpi\.stop\(\)"
        outcome.expect(bool(re.search(left, outcome.errors)), "the report does not say that rank 1 has ended")
        return outcome

    judge("a rank ends early", harness.at_once(2, ENDING, ends))


@pytest.mark.slow
def test_ranks_that_work_are_not_late(judge, tmp_path):
    """Longer than the deadline others wait where ranks that train asynchronously meet."""

    def goes_on(name):
        outcome = job(name, tmp_path, HEAD + PATIENT[name], DEADLINE_SECONDS)
        outcome.expect(outcome.code == 0 and not outcome.errors, "it did not go on")
        return outcome

    judge("ranks that work longer", harness.at_once(2, PATIENT, goes_on))
