"""Jobs whose starter is a program that stands in for the MPI's: the launcher's own logic, without an MPI."""

import sys

from support import jobs

# Runs the starter argv[1] at most argv[2] times more when it fails; argv[3] is done in the launcher itself before.
LAUNCHER = """
import os, signal, sys
from pathlib import Path
from torchmpi_py.launch import attempts, cleanup, job as jobs, last_wait, mpirun, signals, terminal
from torchmpi_py.launch.command import StarterCommand
from torchmpi_py.launch.hosts import Host
from torchmpi_py.launch.job_spec import JobSpec

def make(folder, attempt, begin):
    environment = os.environ | {"TORCHMPIRUN_JOB_DIR": str(folder), "TORCHMPIRUN_RESTART": str(attempt)}
    command = [sys.executable, "-c", sys.argv[1], str(folder), *sys.argv[4:]]
    return jobs.Job(StarterCommand(command, environment, {}), JobSpec(**{"grace": 0.0, **options}), folder, begin)

def hear(*_):
    os.kill(os.getpid(), signal.SIGTERM)

options, tail = {}, terminal.Tail(None)
exec(sys.argv[3])
sys.exit(attempts.run(make, int(sys.argv[2]), tail)[0])
"""


def command(starter, *words, most=0, before=""):
    """A command that runs this starter, which gets the job's folder and these words as arguments."""
    return [sys.executable, "-c", LAUNCHER, starter, most, before, *words]


def run(starter, *words, most=0, before="", **options):
    """Run a job to its end; keywords as ``jobs.run`` has them."""
    return jobs.run(*command(starter, *words, most=most, before=before), **options)


def start(starter, *words, most=0, before="", **options):
    """Start a job in the background; keywords as ``jobs.start`` has them."""
    return jobs.start(*command(starter, *words, most=most, before=before), **options)
