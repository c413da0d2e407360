"""All ranks wait for rank 1, in each kind of wait: the report says that it sleeps, or has come to its end."""

import importlib.util
import re

import harness
import pytest
from waits import HEAD, PATIENT, WAITS

pytestmark = [pytest.mark.timeout(1500), pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING)]

DEADLINE_SECONDS = 5
NEVER_SECONDS = 1000
WITHIN_SECONDS = 30.0
RANKS = 3
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
IMPORTS = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torchmpi_py.torch_backend.process_group",
    "torchmpi_py.paramserver",
]
IMPORTS += ["lightning"] * (HAS_LIGHTNING and harness.ALL)  # else they would come to the program at different times
DAILY = ("DDP", "DownpourUpdate.take_result")
ASLEEP = [name for name in WAITS if name in DAILY or harness.ALL]
SELDOM_REPORTED = ("mpi.stop", "a new process group", "monitored_barrier", "bounded staleness", "init_process_group")
ENDING = [name for name in ASLEEP if not WAITS[name].words.startswith(SELDOM_REPORTED) and "stop" not in name]


def trial(name, what, deadline_seconds, nursery, folder):
    path = written(folder, name, WAITS[name].text(what))
    line = harness.command(RANKS, harness.HERE / "nursery.py", str(nursery), str(path), starter="mpirun")
    outcome = job(f"{what}: {name}", line, deadline_seconds)
    outcome.expect(outcome.code == 1, "the exit code is not 1")
    return outcome


def written(folder, name, text):
    path = folder / f"{re.sub('[^A-Za-z0-9]+', '_', name)}.py"
    path.write_text(text)
    return path


def job(name, line, deadline_seconds):
    environment = {"TORCHMPI_DEADLINE": str(deadline_seconds), "TORCHMPI_TUNING_DIR": "/dev/null"}
    return harness.run(name, line, environment, WITHIN_SECONDS)


def names(chosen):
    return [name for name in chosen if HAS_LIGHTNING or "Lightning" not in name]


def test_a_rank_sleeps(judge, nursery, tmp_path):
    """The report at the deadline says what the others wait in, and that rank 1 is not there."""

    def sleeps(name):
        outcome = trial(name, "sleep", DEADLINE_SECONDS, nursery, tmp_path)
        waiting = re.search(rf"rank [02] waits in {WAITS[name].words}", outcome.errors)
        outcome.expect(bool(waiting), f"the report does not say that the others wait in {WAITS[name].words}")
        late = re.search(r"rank 1 \(process \d+\): (has not come to it|its last|has called nothing)", outcome.errors)
        outcome.expect(bool(late), "the report does not say that rank 1 has not come")
        outcome.expect(" in strike\n" in outcome.errors, "the report does not say where rank 1 stands")
        return outcome

    judge("a rank sleeps", harness.at_once(2, names(ASLEEP), sleeps))


def test_a_rank_comes_to_its_end(judge, nursery, tmp_path):
    """The report comes long before a deadline."""

    def ends(name):
        outcome = trial(name, "end", NEVER_SECONDS, nursery, tmp_path)
        left = r"rank 1 .*has come to its end, and will not come to|calls mpi\.stop\(\)"
        outcome.expect(bool(re.search(left, outcome.errors)), "the report does not say that rank 1 has come to its end")
        return outcome

    judge("a rank ends early", harness.at_once(2, names(ENDING), ends))


@pytest.mark.skipif(not harness.ALL, reason="scripts/test_faults runs it")
def test_ranks_that_work_are_not_late(judge, tmp_path):
    """Longer than the deadline others wait where ranks that train asynchronously meet."""

    def goes_on(name):
        path = written(tmp_path, name, HEAD + PATIENT[name])
        outcome = job(name, harness.command(RANKS, path), DEADLINE_SECONDS)
        outcome.expect(outcome.code == 0 and not outcome.errors, "it did not go on")
        return outcome

    judge("ranks that work longer", harness.at_once(2, PATIENT, goes_on))
