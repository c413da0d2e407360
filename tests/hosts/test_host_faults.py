"""A rank or a host is lost in the middle of a job: how the job ends on the other hosts."""

import harness
import jobs
import pytest
from trial import OF_HOSTS, OF_RANKS, Trial

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not harness.ALL, reason="scripts/test_hosts runs it; test_random_faults.py has some of each"),
]

WAYS = [jobs.Way(launcher, mpi) for mpi in ("openmpi", "mpich") for launcher in ("ssh", "slurm")]
LAYOUTS = {"beside another": {"nodea": 2, "nodeb": 2}, "alone": {"nodea": 2, "nodeb": 1}}


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", OF_RANKS + OF_HOSTS)
def test_the_job_ends(bed, judge, fault, way, where):
    """The last rank is the victim: ``beside another`` on its host, or ``alone`` there."""
    if reason := way.missing(bed):
        pytest.skip(reason)
    layout = LAYOUTS[where]
    trial = Trial(fault, way, layout, victim=sum(layout.values()) - 1)
    judge(f"{fault}, {way}", [trial.run(bed)])
