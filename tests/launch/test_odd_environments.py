"""Environments that no launcher should set: ``import torch`` reads them, for it loads the package."""

import random
import time

from support import jobs

from torchmpi_py.launch import variables

MOST_SECONDS = 1.0
NAMES = (
    *(*variables._RANK, *variables.SIZE, *variables._LOCAL_RANK, *variables._LOCAL_SIZE, *variables._JOBS),
    *(*variables.NAMES, variables.RECORD, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID", "TORCHELASTIC_RUN_ID"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
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


def test_the_variables_of_odd_launchers_are_read_without_errors():
    """Without the guard that turns an error of the import into a warning. A second call changes nothing."""
    drawn = random.Random(0)
    for _ in range(2000):
        before = draw(drawn)
        once = dict(before)
        begin = time.process_time()
        variables.set_variables(once)
        seconds = time.process_time() - begin
        twice = dict(once)
        variables.set_variables(twice)
        assert (twice, seconds < MOST_SECONDS) == (once, True), before


def test_an_error_of_the_import_is_a_warning():
    done = jobs.python("import sys; sys.modules['torchmpi_py.launch.variables'] = None; import torchmpi_py")
    assert done.returncode == 0, done.stderr
    assert "torchrun's variables are not set" in done.stderr
