"""Ranks die while a network is trained on several hosts; the others go on (torchmpirun --elastic), but for a lost host.

What is judged is as on one host (``tests/faults/test_survivors.py``): every sample is in one step that counts, and one
process that takes these steps ends with the same parameters.
"""

import time

import harness
import jobs
import pytest
import surviving
import test_survivors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not harness.ALL, reason="scripts/test_hosts runs it"),
]

WAY = jobs.Way("ssh", "openmpi")
WITHIN_SECONDS = 150


def elastic_job(bed, folder, layout, *deaths, **environment):
    if reason := WAY.missing(bed):
        pytest.skip(reason)
    folder.mkdir()
    line = [surviving.__file__, str(folder), str(test_survivors.EPOCHS), "1", *deaths]
    return jobs.Job(bed, WAY, layout, line, options=["--elastic"], environment=environment)


def wait_for_end(job, code):
    ending = job.wait(WITHIN_SECONDS)
    assert (ending.is_hang, ending.code, ending.left) == (False, code, {}), str(ending)
    return ending


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies(bed, victim):
    """Rank 0 beside another, or rank 2 alone on its host."""
    folder = bed.shared / f"elastic-{victim}"
    job = elastic_job(bed, folder, {"nodea": 2, "nodeb": 1}, f"{victim}:update:20")
    wait_for_end(job, 0)
    test_survivors.check(folder)


def job_whose_host_dies(bed, name, **environment):
    """A job on three hosts, of which one loses power after some steps; how it ended."""
    folder = bed.shared / name
    job = elastic_job(bed, folder, {"nodea": 2, "nodeb": 1, "nodec": 1}, **environment)
    notes, until = folder / "rank-0", time.monotonic() + jobs.START_SECONDS
    while not notes.exists() or notes.read_text().count("\n") < 20:
        assert job.starter.poll() is None, job.errors
        assert time.monotonic() < until
        time.sleep(0.05)
    bed.kill("nodeb")
    return wait_for_end(job, 1)


def test_a_host_dies(bed):
    """Open MPI's starter does not go on without one: the job ends, and the report says why."""
    ending = job_whose_host_dies(bed, "elastic-host")
    wanted = "host nodeb (rank 2) has not answered for 15 s; an elastic job survives lost ranks, but not lost hosts"
    assert wanted in ending.errors, str(ending)
