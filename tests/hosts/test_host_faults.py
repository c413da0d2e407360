"""A rank or a host is lost in the middle of a job: how the job ends on the other hosts."""

import jobs
import pytest
from trial import OF_HOSTS, OF_RANKS, Trial

pytestmark = pytest.mark.timeout(400)

WAYS = [jobs.Way(launcher, mpi) for mpi in ("openmpi", "mpich") for launcher in ("ssh", "slurm")]
LAYOUTS = {"beside another": {"nodea": 1, "nodeb": 2}, "alone": {"nodea": 2, "nodeb": 1}}


@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fault", OF_RANKS + OF_HOSTS)
def test_the_job_ends(bed, judge, fault, way, where):
    """The last rank is the victim: ``beside another`` on its host, or ``alone`` there."""
    if reason := way.missing(bed):
        pytest.skip(reason)
    judge(f"{fault}, {way}", [Trial(fault, way, LAYOUTS[where], victim=2).run(bed)])
