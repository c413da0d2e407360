"""Ranks that call different things, in random programs: no silent wrong value, no hang, both sides are named."""

import harness
import mismatches
import pytest

pytestmark = [pytest.mark.timeout(1500), pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING)]

DEADLINE_SECONDS = 3 if harness.ALL else 12  # other tests may run
WITHIN_SECONDS = 20.0 if harness.ALL else 40.0
PARTS = harness.count(1, 10)
NUMBER = harness.count(4, 600)
AT_ONCE = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_a_rank_calls_something_else(judge, nursery, tmp_path, part):
    def trial(number):
        kind = mismatches.KINDS[number % len(mismatches.KINDS)]
        program = mismatches.draw_program(harness.seeded(f"mismatch {number}"), kind)
        path = tmp_path / str(number) / "program.py"
        path.parent.mkdir()
        path.write_text(program.text)
        line = harness.command(program.ranks, harness.HERE / "nursery.py", str(nursery), str(path), starter="mpirun")
        environment = {"TORCHMPI_DEADLINE_SECONDS": str(DEADLINE_SECONDS), "TORCHMPI_TUNING_DIR": "/dev/null"}
        outcome = harness.run(f"{number} {program.description}", line, environment, WITHIN_SECONDS)
        return mismatches.judged(program, outcome), outcome

    both = harness.at_once(AT_ONCE, range(part, NUMBER, PARTS), trial)
    kinds = {outcome.name: f"mismatch: {kind}" for kind, outcome in both}
    judge("mismatch", [outcome for _, outcome in both], lambda outcome: kinds[outcome.name])
