"""Standard input: what the ranks get of it, and that every attempt to run a job gets the same.

A terminal is not handed on. The starter is in a session of its own, where Open MPI would never read from that terminal,
and MPICH would take the shell's keys when the job is in the background. A file is read from the same place by every
attempt. What has come out of a pipe is gone: the next attempt gets nothing, and is not left waiting for it.
"""

import os
import stat
import subprocess

from torchmpi_py.launch.terminal import say


def is_given() -> bool:
    """Whether there is something to read for rank 0: no terminal, not /dev/null, not closed."""
    try:
        return not stat.S_ISCHR(os.fstat(0).st_mode)
    except OSError:
        return False


def for_starter() -> int | None:
    """What a starter is to get, as ``subprocess`` has it."""
    return subprocess.DEVNULL if os.isatty(0) else None


def position() -> int | None:
    """Where it stands, if it is a file."""
    try:
        return os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else None
    except OSError:
        return None


def rewind(begin: int | None) -> None:
    """Before another attempt: back to where it stood; nothing at all where that cannot be done."""
    if begin is not None:
        os.lseek(0, begin, os.SEEK_SET)
    elif is_given():
        say("standard input is a pipe, which can be read only once: further attempts get none (`< file` works)")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
