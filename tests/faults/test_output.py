"""Programs that write 1 KB to 3 MB and end at once, two jobs at a time: what reaches a file or a pipe is whole."""

import os
import subprocess
import time

import harness
import pytest

pytestmark = [
    pytest.mark.timeout(3000),
    pytest.mark.usefixtures("full_collections"),
    pytest.mark.skipif(bool(harness.MISSING), reason=harness.MISSING),
]

PROGRAM = """
import os, sys
rank, writer, num_lines, is_mpi, is_whole = int(os.environ["RANK"]), *map(int, sys.argv[1:])
if is_mpi:
    from mpi4py import MPI
lines = [f"{number:09d}\\n" for number in range(num_lines)] if rank == writer else []
for text in ["".join(lines)] if is_whole else lines:
    sys.stdout.write(text)
"""


def trial(case):
    number, folder = case
    draw = harness.seeded(f"output {number}")
    num_lines = int(100 * 3000 ** draw.random())
    words = [draw.randrange(2), num_lines, draw.randrange(2), draw.randrange(2)]
    place, program = folder / f"output-{number}", folder / "program.py"
    begin = time.monotonic()
    with open(place, "w+b") as output:
        to = output if number % 2 else subprocess.PIPE
        command = ["env", "-u", "RANK", *harness.command(2, program, *map(str, words))]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.PIPE, timeout=200, check=False
        )
        output.seek(0)
        shown = output.read() if number % 2 else done.stdout
    os.remove(place)
    name = "writer {}, {} lines, MPI {}, in one piece {}".format(*words)
    seconds = time.monotonic() - begin
    outcome = harness.Outcome(name, done.returncode, seconds, "", done.stderr.decode(), [], is_hang=False)
    whole = "".join(f"{number:09d}\n" for number in range(num_lines)).encode()
    outcome.expect(done.returncode == 0, "it failed")
    outcome.expect(shown == whole, f"{len(shown)} of {len(whole)} bytes, as they were: {whole.startswith(shown)}")
    return outcome


def test_the_output_of_a_program_that_ends_at_once_is_whole(judge, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    cases = [(number, tmp_path) for number in range(harness.count(4, 500))]
    judge("output", harness.at_once(2, cases, trial))
