"""Hosts that come and go: a script names those that are there, and the job starts again when they change.

The script (``--discover``) is a shell command that prints one host per line, in any form of a hostfile. A thread runs
it every few seconds. A script that fails, or does not answer, changes nothing, and one line says so. The job starts
again if a host of its ranks is gone or has too few slots, or if there is room for more ranks, up to the MAX of
``--elastic-restart``: the attempt is ended as by SIGTERM, so that the program saves.

The next attempt takes the hosts of the former one first, in their order: rank 0 stays where it was while its host is
there, and so does a folder of checkpoints that hosts do not share.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from dataclasses import replace

from torchmpi_py.errors import LaunchError
from torchmpi_py.launch.hosts import Host, merge, parse_host
from torchmpi_py.launch.job_spec import JobSpec
from torchmpi_py.launch.signals import Signals
from torchmpi_py.launch.terminal import say

_INTERVAL_SECONDS = 5.0
_ANSWER_SECONDS = 30
_WAIT_SECONDS = 600.0  # for hosts, in a job without --timeout
_POLL_SECONDS = 0.1


def ask(script: str) -> tuple[Host, ...]:
    """The hosts that the script prints. LaunchError if it fails, does not end, or prints something else."""
    # A file, because a pipe is open as long as a process that the script has left behind; timeout(1) ends its group.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        words = ["timeout", "-s", "KILL", str(_ANSWER_SECONDS), "sh", "-c", script]
        code = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL).returncode
        out.seek(0)
        lines = [line.partition("#")[0].strip() for line in out]
    if code:
        why = f"exit code {code}" if code > 0 else f"no end after {_ANSWER_SECONDS} s"
        raise LaunchError(f"--discover {script!r}: {why}; try it by hand: it has to print hosts, and to end with 0")
    return merge(parse_host(line, f"--discover {script!r}") for line in lines if line)


def chosen(spec: JobSpec, found: tuple[Host, ...]) -> JobSpec:
    """The job on the hosts ``found``: on its present ones first, and on no more slots than it may have ranks."""
    names, room, hosts = [host.name for host in spec.hosts], spec.elastic_restart[1], []
    for host in sorted(found, key=lambda host: names.index(host.name) if host.name in names else len(names)):
        if room:
            hosts.append(Host(host.name, min(host.num_slots, room)))
            room -= hosts[-1].num_slots
    return replace(spec, hosts=tuple(hosts), num_ranks=spec.elastic_restart[1] - room, system="", notes=())


def first(spec: JobSpec) -> JobSpec:
    """The job on the hosts that its script, if it has one, names now. LaunchError if that fails."""
    return chosen(spec, ask(spec.discover)) if spec.discover else spec


class Discovery:
    """The job on the hosts of its present attempt. Within ``with`` its script is asked; without one nothing changes."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self._found = spec, spec.hosts
        self._has_failed, self._said = False, ""
        self._ended = threading.Event()

    def __enter__(self) -> Discovery:
        if self.spec.discover:
            threading.Thread(target=self._follow, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _follow(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._ask()

    def _ask(self) -> None:
        try:
            self._found, self._has_failed = ask(self.spec.discover), False
        except (LaunchError, OSError) as error:
            if not self._has_failed:
                say(f"{error}; until then its last answer holds")
            self._has_failed = True

    def _change_to(self, now: JobSpec) -> str:
        ranks = f"({now.num_ranks} ranks, were {self.spec.num_ranks})"
        return f"hosts are now {','.join(map(str, now.hosts)) or 'none'} {ranks}"

    def news(self) -> str:
        """Why the attempt is to end and another one to start; empty if it is to go on."""
        if not self.spec.discover:
            return ""
        now, slots = chosen(self.spec, self._found), {host.name: host.num_slots for host in self._found}
        is_lost = any(slots.get(host.name, 0) < host.num_slots for host in self.spec.hosts)
        if now.num_ranks <= self.spec.num_ranks and not is_lost:
            return ""
        self._said = self._change_to(now)
        return f"{self._said}: saving, and starting again"

    def wait(self, begin: float, signals: Signals) -> bool:
        """Before an attempt: wait for enough hosts, or a signal; False if there are too few for too long."""
        if not self.spec.discover:
            return True
        self._ask()
        start, least, is_announced = time.monotonic(), self.spec.elastic_restart[0], False
        limit = _WAIT_SECONDS if self.spec.timeout is None else max(0.0, begin + self.spec.timeout - start)
        while (now := chosen(self.spec, self._found)).num_ranks < least and not signals.ending:
            what = f"{least} slots (--elastic-restart), {self.spec.discover!r} names {now.num_ranks}"
            if not is_announced:
                say(f"waiting for hosts, at most {limit:.0f} s: {what}")
            is_announced = True
            if time.monotonic() - start > limit:
                say(f"not enough hosts after {limit:.0f} s: {what}; start the job again when they are there")
                return False
            time.sleep(_POLL_SECONDS)
            signals.look_at_parent()
        if now.hosts != self.spec.hosts and (text := self._change_to(now)) != self._said:
            say(text)
        self.spec = now
        return True
