"""Draws environments of odd launchers, and loads the package in them as the end of ``import torch`` does.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python odd_environments.py NUMBER [SEED]

Each environment is one process, forked from one that has imported torch without the package. Prints a line for each
environment in which the import fails, warns, or takes longer than `MOST_SECONDS`, and the number of those.
"""

import os
import random
import sys
import time

import torch

from torchmpi_py.launch import variables

MOST_SECONDS = 1.0
NAMES = (
    *variables._RANK,
    *variables.SIZE,
    *variables._LOCAL_RANK,
    *variables._LOCAL_SIZE,
    *variables._JOBS,
    *variables.NAMES,
    variables.RECORD,
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "TORCHELASTIC_RUN_ID",
)
VALUES = (
    *("0", "1", "2", "3", "4", "-1", "", " 1", "1.5", "x", "9" * 30, "9" * 5000, "00000001", "1_000"),
    *("\u00b2", "\u0663", "\u2460", "1\u00b2", "\udcff", "n\udcff[1-2]", "a b", "a\nb", "\t", "\x1b[2J", "a=b", "="),
    *("node[1-2-3]", "node[1-40000000]", "node[1-99999999999999999999]", "node[5-1]", "node[-3]", "node[1-]", "n[,]"),
    *("n[", "n]", "[1-2]", "n[1-2]]", "n[[1-2]", ",", ",,a,", "node[1-3],b", "n[\u0661-\u0663]", "n[1-\u00b2]"),
    *("r[0-1]n[0-3]", "a," * 20000, "[" * 20000, "n[" + "1," * 20000 + "2]", "n[1-9999]," * 2000),
    *("2(x2)", "2(x2),3", "2(x)", "(x2)", "9(x99999999999)", "1(x" + "9" * 5000 + ")", "\u0662(x\u0662)"),
    *("JOB=a BY=3/4", "BY=3/4", "BY=0/4 JOB=", "HOSTS=a:x MASTER_PORT=1", "HOSTS=a:1,b", "HOSTS=:", "HOSTS=a:\u00b2"),
    *("MASTER_PORT=x HOSTS=a:" + "9" * 5000, "HOSTS=a:2,b:2 MASTER_PORT=10000", "RANK=3 JOB=x BY=2/4 MASTER_ADDR=a"),
)


def draw(random):
    """One environment: a plausible place in a job in most, so that what reads the rest is reached."""
    environment = {}
    if random.random() < 0.8:
        size = random.randint(1, 4)
        rank, size_name = random.choice(variables._RANK), random.choice(variables.SIZE)
        environment |= {rank: str(random.randrange(size)), size_name: str(size)}
    for name in random.sample(NAMES, random.randint(1, 12)):
        environment[name] = random.choice(VALUES)
    return environment


def load_in(environment):
    """Load the package as torch does, in a forked process; what goes wrong there, "" if nothing does."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write_end, 2)
        text = ""
        try:
            os.environ.update(environment)
            begin = time.monotonic()
            torch._import_device_backends()
            seconds = time.monotonic() - begin
            text = f"{seconds:.1f} s" if seconds > MOST_SECONDS else ""
        except BaseException as error:
            text = f"{error!r} from {error.__cause__!r}"
        os.write(2, text.encode(errors="backslashreplace"))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read().decode(errors="replace")
    os.waitpid(child, 0)
    return text


def main():
    drawn = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchmpi_py"]:
        del sys.modules[name]
    for name in NAMES:
        os.environ.pop(name, None)
    num_failed = 0
    for _ in range(int(sys.argv[1])):
        environment = draw(drawn)
        if text := load_in(environment):
            num_failed += 1
            print(text[-300:], {name: value[:60] for name, value in environment.items()})  # noqa: T201
    print(f"{num_failed} failed")  # noqa: T201


if __name__ == "__main__":
    main()
