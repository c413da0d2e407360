"""Start programs, alone or as the ranks of a job, and read what they print."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import mpirun

TORCHMPIRUN = [sys.executable, "-m", "torchmpi_py.launch"]
SECONDS = 200  # for a program, on a machine under load

try:
    VENDOR = mpirun.find("", os.environ)[0].name
    MISSING = ""
except LaunchError as error:
    VENDOR, MISSING = "", str(error)

needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def write(folder, text, name="program.py"):
    """Write a program to a file, and return its path."""
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def script(folder, text, name):
    """Write a program that runs by its name, and return its path."""
    path = write(folder, text, name)
    path.chmod(0o755)
    return path


def until(holds, seconds=60):
    """Wait until ``holds()`` is true of something; return that."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


def run(*command, seconds=SECONDS, **options):
    """Run a command to its end. Keywords as in ``subprocess.run``; ``env`` is added to this process's environment."""
    options["env"] = os.environ | options.get("env", {})
    words = [str(word) for word in command]
    return subprocess.run(words, **{"capture_output": True, "text": True, "timeout": seconds} | options)


def python(text, *arguments, **options):
    """Run a program on one process, without a launcher."""
    return run(sys.executable, "-c", textwrap.dedent(text), *arguments, **options)


def torchmpirun(*arguments, **options):
    """Run ``torchmpirun`` with these arguments to its end."""
    return run(*TORCHMPIRUN, *arguments, **options)


def start(*command, **options):
    """Start a command in the background, with pipes; it heeds SIGINT and SIGHUP even if the tests ignore them."""

    def heed():
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(word) for word in command], preexec_fn=heed, **pipes | options)


def listeners(process_id):
    """The TCP sockets on which a process listens: inode -> address, as the kernel writes it."""
    links = [os.path.realpath(file) for file in Path(f"/proc/{process_id}/fd").iterdir()]
    inodes = {link.partition("[")[2].rstrip("]") for link in links if "socket:[" in link}
    net = Path(f"/proc/{process_id}/net")
    lines = [line.split() for name in ("tcp", "tcp6") for line in (net / name).read_text().splitlines()]
    return {words[9]: words[1].partition(":")[0] for words in lines if words[3] == "0A" and words[9] in inodes}
