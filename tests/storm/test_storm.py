"""Some seconds of a storm on the ranks of this run; that a storm finds what is planted. More: scripts/test_storm."""

import os

import pytest
import storm
import storm_draw

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
    outcomes = (storm.job(2, "--seed", f"planted {n}", "--fault", "one_arena", "--seconds", 30) for n in range(3))
    assert any(outcome.failed for outcome in outcomes)


def test_programs_are_legal():
    """Every group belongs to one actor; what is launched without waiting is waited for in the end."""
    for size in (1, 2, 3, 4, 5):
        for number in range(50):
            actors = storm_draw.program("legal", number, size)
            assert sum(actor.kind in ("async", "engine") for actor in actors) == 1
            owned = [
                ({"dist", "ddp"} >= {actor.kind}, group)
                for actor in actors
                for group in {step.group for step in actor.steps}
            ]
            assert len(owned) == len(set(owned))
            assert all(actor.steps[-1].waits for actor in actors)
            numbers = [step.number for actor in actors for step in actor.steps]
            assert len(numbers) == len(set(numbers))
    assert str(storm_draw.program("legal", 3, 4)[0]) == str(storm_draw.program("legal", 3, 4)[0])
