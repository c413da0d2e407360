"""Ranks that call different things: no silent wrong value, no hang, both sides are named; also if a program goes on."""

import harness
import mismatches
import pytest
from support.jobs import needs_mpi, torchmpirun, write

pytestmark = [pytest.mark.timeout(3000), needs_mpi]

DEADLINE_SECONDS = 3 if harness.ALL else 12  # other tests may run
WITHIN_SECONDS = 20.0 if harness.ALL else 40.0


@pytest.mark.slow  # core/test_journal.py and test_records.py have one of each kind
def test_a_rank_calls_something_else(judge, tmp_path):
    """Random programs."""

    def trial(number):
        kind = mismatches.KINDS[number % len(mismatches.KINDS)]
        program = mismatches.draw_program(harness.seeded(f"mismatch {number}"), kind)
        path = write(tmp_path / str(number), program.text)
        line = harness.command(program.ranks, path, starter="mpirun")
        environment = {"TORCHMPI_DEADLINE_SECONDS": str(DEADLINE_SECONDS), "TORCHMPI_TUNING_DIR": "/dev/null"}
        outcome = harness.run(f"{number} {program.description}", line, environment, WITHIN_SECONDS)
        return mismatches.judged(program, outcome), outcome

    both = harness.at_once(3, range(harness.count(2, 300)), trial)
    kinds = {outcome.name: f"mismatch: {kind}" for kind, outcome in both}
    judge("mismatch", [outcome for _, outcome in both], lambda outcome: kinds[outcome.name])


CAUGHT = """
import pickle, sys, torch, torchmpi_py as mpi

mpi.start()
rank, size = mpi.rank(), mpi.size()
odd = rank == size - 1
comm = mpi.split(0) if "group" in sys.argv else mpi.communicator()
CALLS = {
    "count": lambda: mpi.allreduce(torch.ones(17 + odd), comm=comm),
    "dtype": lambda: mpi.allreduce(torch.ones(4000, dtype=torch.float64 if odd else torch.float32), comm=comm),
    "launch": lambda: mpi.allreduce_async(torch.ones(17 + odd), comm=comm).wait(),
    "verb": lambda: mpi.broadcast(torch.ones(400), 0, comm=comm) if odd else mpi.allreduce(torch.ones(400), comm=comm),
    "object": lambda: mpi.broadcast_object((lambda: 1) if odd else None, size - 1, comm=comm),
    "barrier": lambda: mpi.barrier(comm) if odd else mpi.allreduce(torch.ones(3), comm=comm),
}


def attempt(call):
    try:
        return call()
    except (mpi.TorchMPIError, AttributeError, pickle.PicklingError) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)


attempt(CALLS[sys.argv[1]])
for number in range(4):
    x = torch.full((1000,), float(10 + rank + 100 * number))
    wanted = sum(10 + each + 100 * number for each in range(size))
    is_launched = sys.argv[1] == "launch"
    result = attempt(lambda: mpi.allreduce_async(x, comm=comm).wait() if is_launched else mpi.allreduce(x, comm=comm))
    if result is not None and not bool((result == wanted).all()):
        print(f"rank {rank}: call {number} is WRONG: {result.unique().tolist()[:4]}, right is {wanted}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks", "where"),
    [
        *((kind, 2, "world") for kind in ("count", "launch")),
        *((kind, 3, "group") for kind in ("dtype", "verb")),
        *(("barrier", 2, "group"), ("object", 3, "world")),
    ],
)
def test_a_caught_mismatch_leads_to_no_wrong_number(tmp_path, kind, num_ranks, where):
    options = ("-n", num_ranks, "--env", "TORCHMPI_DEADLINE_SECONDS=40")
    done = torchmpirun(*options, write(tmp_path, CAUGHT), kind, where)
    printed = done.stdout + done.stderr
    assert "WRONG" not in printed, printed
    assert done.returncode != 0, printed
    assert ("pickle" if kind == "object" else "RanksDisagree: ") in printed, printed  # also in a report
