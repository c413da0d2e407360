"""Tests that run on ranks, on several hosts: those of this folder each way, and those of the other rooms."""

import os

import harness
import jobs
import pytest
from testbed import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

WAYS = [jobs.Way(launcher, mpi) for mpi in ("openmpi", "mpich") for launcher in ("ssh", "slurm")]
LAYOUTS = {"1 + 1": (1, 1), "2 + 1": (2, 1), "2 + 2": (2, 2), "3 + 1": (3, 1), "1 + 1 + 1": (1, 1, 1)}
ROOMS = ["collectives", "engine", "nn", "paramserver", "torch_backend"]
# What these ask for is so on one node alone.
OF_ONE_NODE = ["engine/test_loaders.py::test_it_goes_on_in_the_middle_of_an_epoch"]


def run_on_hosts(bed, way, layout, *line, within_seconds):
    """What is printed by a job that ends in order."""
    if reason := way.missing(bed):
        pytest.skip(reason)
    placed = dict(zip(bed.hosts, layout, strict=False))
    environment = {"PYTEST_DEBUG_TEMPROOT": str(bed.shared)}
    ending = jobs.run(bed, way, placed, line, within_seconds=within_seconds, environment=environment)
    assert (ending.code, ending.left) == (0, {}), str(ending)
    return ending.output


def run_tests(bed, way, layout, *arguments, within_seconds=600):
    """pytest on every rank."""
    line = ["-m", "pytest", "--color=no", "-q", "-x", "--only-mpi", "-p", "no:cacheprovider", *arguments]
    assert " passed" in run_on_hosts(bed, way, layout, *line, within_seconds=within_seconds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_across_hosts(bed, way, layout):
    run_tests(bed, way, LAYOUTS[layout], str(ROOT / "tests" / "hosts" / "test_across_hosts.py"))


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_rooms(bed, mpi, room):
    """Every test that runs on ranks, of the rooms in which no test asks for one node."""
    left_out = [f"--deselect=tests/{name}" for name in OF_ONE_NODE if name.startswith(room)]
    run_tests(bed, jobs.Way("ssh", mpi), (2, 1), str(ROOT / "tests" / room), *left_out, within_seconds=1400)


@pytest.mark.parametrize("layout", ["1 + 1", "2 + 1", "2 + 2", "1 + 1 + 1"])
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_storm(bed, mpi, layout):
    """Groups, threads, verbs, DDP and the engine at work at the same time, on several hosts: each result is exact."""
    seed = str(harness.seeded(f"storm {mpi} {layout}").getrandbits(32))
    seconds = float(os.environ.get("TORCHMPI_STORM_SECONDS", "20"))
    line = [str(ROOT / "tests" / "storm" / "storm_job.py"), "--seed", seed, "--seconds", str(seconds)]
    output = run_on_hosts(bed, jobs.Way("ssh", mpi), LAYOUTS[layout], *line, within_seconds=300 + 2 * seconds)
    assert f"seed {seed}, {sum(LAYOUTS[layout])} ranks, " in output
    assert "0 wrong" in output
