"""Programs in the ranks of one job, one after the other: a rank imports torch once, and not for each of them.

Its arguments: a line that rank 0 prints before each program's output, and the programs with their options, as JSON.
"""

import json
import os
import runpy
import sys

import torchmpi_py as mpi

mark, commands = sys.argv[1:]
sys.stderr = sys.stdout  # in one order
for program, *options in json.loads(commands):
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"{mark}\n")
        sys.stdout.flush()
    sys.path[0], sys.argv = os.path.dirname(program), [program, *options]
    runpy.run_path(program, run_name="__main__")
    mpi.stop()  # which a program on init_process_group leaves to the end of the process
