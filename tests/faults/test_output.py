"""Programs that write 1 KB to 3 MB and end at once, two jobs at a time: what reaches a file or a pipe is whole."""

import subprocess

import harness
import pytest
from support.jobs import needs_mpi, write

pytestmark = [pytest.mark.timeout(3000), pytest.mark.slow, pytest.mark.usefixtures("full_collections"), needs_mpi]

PROGRAM = """
import os, sys
rank, writer, num_lines, is_mpi, is_whole = int(os.environ["RANK"]), *map(int, sys.argv[1:])
if is_mpi:
    from mpi4py import MPI
lines = [f"{number:09d}\\n" for number in range(num_lines)] if rank == writer else []
for text in ["".join(lines)] if is_whole else lines:
    sys.stdout.write(text)
"""


def test_the_output_of_a_program_that_ends_at_once_is_whole(tmp_path):
    program = write(tmp_path, PROGRAM)

    def problem(number):
        draw = harness.seeded(f"output {number}")
        num_lines = int(100 * 3000 ** draw.random())
        words = [draw.randrange(2), num_lines, draw.randrange(2), draw.randrange(2)]
        command = ["env", "-u", "RANK", *harness.command(2, program, *map(str, words))]
        with open(tmp_path / str(number), "w+b") as output:
            to = output if number % 2 else subprocess.PIPE
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=to, timeout=200, check=False)
            output.seek(0)
            shown = output.read() if number % 2 else done.stdout
        whole = "".join(f"{line:09d}\n" for line in range(num_lines)).encode()
        told = f"writer {words[0]}, {num_lines} lines, MPI {words[2]}, in one piece {words[3]}: code {done.returncode}"
        return f"{told}, {len(shown)} of {len(whole)} bytes" if done.returncode or shown != whole else None

    problems = harness.at_once(2, range(harness.count(4, 500)), problem)
    assert problems == [None] * len(problems)
