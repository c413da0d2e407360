"""The page of ``--timeline``: what the ranks leave for it, and its making when the job is over.

The ranks keep what they note of their operations (`watch.kept_boards`) in a hidden folder beside the page, which is
removed when the page is there. Hosts that share the page's file system are in it; ranks of other hosts are named as
missing. The page is made by a process of its own, ``python -m torchmpi_py.bench timeline``, for it reads numbers with
numpy, and this package uses the standard library only.
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
    """The page of a job; ``path`` is None without ``--timeline``. ``folder``: where the ranks leave their boards."""

    path: Path | None
    folder: str
    command: str

    def write(self, code: int, reason: str, restart: int) -> None:
        """Make the page of a job that has ended with this exit code, in this restart; say why there is none."""
        if self.path is None:
            return
        ended = {"exit_code": code, "reason": reason, "restart": restart, "ended_ns": time.time_ns()}
        words = child_python.command("torchmpi_py.bench", "timeline", self.folder, "-o", str(self.path))
        try:
            done = subprocess.run(
                [*words, "--about", "/dev/stdin"],  # it may be longer than a command line
                input=json.dumps({"command": self.command, **ended}),
                env=variables.without_outer(os.environ),  # the process is no rank
                capture_output=True,
                text=True,
                timeout=_PAGE_SECONDS,
            )
            problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"it is not made after {_PAGE_SECONDS:g} s"
        except OSError as error:
            problem = str(error)
        if problem:
            say(f"no page for --timeline {self.path}: {problem}")


@contextlib.contextmanager
def kept(spec: JobSpec) -> Iterator[tuple[JobSpec, TimelinePage]]:
    """The job whose ranks leave what its page needs, and the page. LaunchError where the page cannot be written."""
    if spec.timeline is None:
        yield spec, TimelinePage(None, "", "")
        return
    path = spec.timeline.absolute()
    made = _folder_beside(path, f"--timeline {spec.timeline}")
    with Guardian(made.name), made as folder:  # this process may be killed also while the page is made
        yield replace(spec, variables={**spec.variables, VARIABLE: folder}), TimelinePage(path, folder, spec.text)


def check(spec: JobSpec) -> None:
    """LaunchError where the page of a job cannot be written."""
    if spec.timeline is not None:
        _folder_beside(spec.timeline.absolute(), f"--timeline {spec.timeline}").cleanup()


def _folder_beside(path: Path, option: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder beside a file that can be written. LaunchError else."""
    if path.is_dir():
        raise LaunchError(f"{option}: that is a folder; name a file in it, as {path / 'timeline.html'}")
    if not path.parent.is_dir():
        raise LaunchError(f"{option}: there is no folder {path.parent}; make it, or name a file in another one")
    try:
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "the file that is there may not be written to")
        return tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(f"{option}: cannot write there: {error.strerror}; name another file") from None
