"""Ranks, or a whole host, die while digits are learned on several hosts; the others go on (torchmpirun --elastic).

What is judged is as on one host (``tests/faults/test_survivors.py``): every sample is in one step that counts, one
process that takes these steps ends with the same parameters, and the accuracy is that of a run without deaths.
"""

import time

import harness
import jobs
import pytest
import surviving
import test_survivors

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(not harness.ALL, reason="scripts/test_hosts runs it")]

WAY = jobs.Way("ssh", "openmpi")
WITHIN_SECONDS = 150


def elastic_job(bed, folder, layout, *deaths):
    if reason := WAY.missing(bed):
        pytest.skip(reason)
    folder.mkdir()
    line = [surviving.__file__, str(folder), str(test_survivors.EPOCHS), "1", *deaths]
    return jobs.Job(bed, WAY, layout, line, options=["--elastic"])


def check(ending, folder, ranks):
    assert not ending.is_hang, str(ending)
    assert ending.code == 0, str(ending)
    assert not ending.left, str(ending)
    test_survivors.check(folder, ranks)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies(bed, victim):
    """Rank 0 beside another, or rank 2 alone on its host."""
    folder = bed.shared / f"elastic-{victim}"
    job = elastic_job(bed, folder, {"nodea": 2, "nodeb": 1}, f"{victim}:update:20")
    check(job.wait(WITHIN_SECONDS), folder, 3)


def test_a_host_dies(bed):
    folder = bed.shared / "elastic-host"
    job = elastic_job(bed, folder, {"nodea": 2, "nodeb": 2})
    notes, until = folder / "rank-0", time.monotonic() + jobs.START_SECONDS
    while not notes.exists() or notes.read_text().count("\n") < 20:
        assert job.starter.poll() is None, job.errors
        assert time.monotonic() < until
        time.sleep(0.05)
    bed.kill("nodeb")
    check(job.wait(WITHIN_SECONDS), folder, 4)
