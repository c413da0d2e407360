"""The page of ``--timeline``: the folder with its data during the job, and the creation of the page after the job.

The ranks store the records of their operations (`watch.kept_boards`) in a hidden folder in the same directory as the
page. The folder is removed when the page has been written. It contains only the records from hosts that share the
page's file system, and the page lists the other ranks as missing. A separate process, ``python -m torchmpi_py.bench
timeline``, creates the page, because this step needs numpy, and the package `launch` may use only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch import child_python, variables
from torchmpi_py.launch.cleanup import Guardian
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.terminal import say

VARIABLE = "TORCHMPI_TIMELINE"
_PAGE_SECONDS = 300.0


@dataclass(frozen=True)
class TimelinePage:
    """The page of a job; ``path`` is None without ``--timeline``.

    ``folder`` contains the ranks' records. ``command`` is the command line that the page shows.
    """

    path: Path | None
    folder: str
    command: str

    def write(self, code: int, reason: str, restart: int) -> None:
        """Create the page of a job that has ended; print a line if this fails.

        ``code`` is the exit code of the job, ``reason`` a message about its failure, and ``restart`` the number of
        restarts.
        """
        if self.path is None:
            return
        facts = {"exit_code": code, "reason": reason, "restart": restart, "ended_ns": time.time_ns()}
        words = child_python.command("torchmpi_py.bench", "timeline", self.folder, "-o", str(self.path))
        try:
            done = subprocess.run(
                [*words, "--about", "/dev/stdin"],  # The description may be too long for a command line.
                input=json.dumps({"command": self.command, **facts}),
                env=variables.without_outer(os.environ),  # The process is not a rank.
                capture_output=True,
                text=True,
                timeout=_PAGE_SECONDS,
            )
            problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"the process that creates the page did not end within {_PAGE_SECONDS:g} s"
        except OSError as error:
            problem = str(error)
        if problem:
            say(f"cannot write the page for --timeline {self.path}: {problem}")


@contextlib.contextmanager
def kept(spec: JobSpec) -> Iterator[tuple[JobSpec, TimelinePage]]:
    """Yield the JobSpec, with the variable that makes the ranks store their records, and the TimelinePage.

    Raise LaunchError if the page cannot be written.
    """
    if spec.timeline is None:
        yield spec, TimelinePage(None, "", "")
        return
    path = spec.timeline.absolute()
    temporary_folder = _folder_beside(path, f"--timeline {spec.timeline}")
    # The guardian removes the folder if this process is killed.
    with Guardian(temporary_folder.name), temporary_folder as folder:
        yield replace(spec, variables={**spec.variables, VARIABLE: folder}), TimelinePage(path, folder, spec.text)


def check(spec: JobSpec) -> None:
    """Raise LaunchError if the page of a job cannot be written."""
    if spec.timeline is not None:
        _folder_beside(spec.timeline.absolute(), f"--timeline {spec.timeline}").cleanup()


def _folder_beside(path: Path, option: str) -> tempfile.TemporaryDirectory[str]:
    """Create a temporary folder in the same directory as a file. Raise LaunchError if the file cannot be written."""
    if path.is_dir():
        raise LaunchError(f"{option}: expected a file, found a folder; use a file in it: {path / 'timeline.html'}")
    if not path.parent.is_dir():
        raise LaunchError(f"{option}: there is no folder {path.parent}; create it, or use a file in another folder")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "the existing file is not writable")
        return tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(f"{option}: cannot write this file: {error.strerror}; use another file") from None
