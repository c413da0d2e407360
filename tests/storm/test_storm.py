"""Some seconds of a storm on the ranks of this run; that a storm finds what is planted. More: scripts/test_storm."""

import os

import pytest
import storm

SECONDS = float(os.environ.get("TORCHMPI_STORM_SECONDS", "5"))


@pytest.mark.mpi
@pytest.mark.timeout(110 + 2 * SECONDS)
def test_storm(mpi):
    """Groups, threads, verbs, forms, DDP and the engine at work at the same time: each result is the exact one."""
    import storm_job
    import torch.distributed as dist

    import torchmpi_py.torch_backend  # noqa: F401

    seed = os.environ.get("TORCHMPI_STORM_SEED", "daily")  # scripts/test_storm draws new ones
    dist.init_process_group("torchmpi")
    made = storm_job.Storm(seed)
    found = made.run(SECONDS)
    made.close()
    assert found is None, f"seed {seed}, {mpi.size()} ranks, round {found[0]}: {found[1][:5]}; see scripts/test_storm"
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_planted_is_found():
    """Slots of all groups in one place, as they were once."""
    outcomes = (storm.job(2, "--seed", f"planted {n}", "--fault", "--seconds", 30) for n in range(3))
    assert any(outcome.failed for outcome in outcomes)
